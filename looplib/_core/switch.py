"""The switch of warnings for misuse, which `ll.debug.warn_of_misuse` sets for the whole process."""


class _Switch:
    on = True


warnings_of_misuse = _Switch()
