"""Seeds as a function of counts.

Randomness in looplib is never a stream that somebody advances: each draw belongs to a place (a step, an
epoch, a sample), and the place is hashed into a seed.
"""

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """One well-mixed 63-bit seed from any integers: equal for equal ones, unrelated for others.

    A chain of splitmix64 finalisers (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), so that neighbouring steps share nothing, in their low 32 bits either.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    seed = 0
    for value in values:
        seed = ((seed ^ value) + 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed >> 1
