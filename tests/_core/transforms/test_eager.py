"""Graphs that run operation by operation: they write in place and call torch directly, with the bits of the graph."""

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from looplib.transforms._backends import _calls, eager

OPERATIONS = [
    lambda x, y, z: x + y,
    lambda x, y, z: x * 0.9,
    lambda x, y, z: torch.add(x, y, alpha=0.3),
    lambda x, y, z: torch.lerp(x, y, 0.1),
    lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    lambda x, y, z: x * y[0],
    lambda x, y, z: x[1:2] + y,
    lambda x, y, z: x.t(),
    lambda x, y, z: x.expand(3, 3),
    lambda x, y, z: x.reshape(9).view(3, 3),
    lambda x, y, z: torch.where(x > 0, y, z),
    lambda x, y, z: x.double().sin().float(),
    lambda x, y, z: x * torch.full((), 2.0),
    lambda x, y, z: x @ y / 3,
    lambda x, y, z: torch.cat([x, y])[2:5],
    lambda x, y, z: torch.cat([x, y])[:3].as_strided((3, 3), (3, 1), 9),
    lambda x, y, z: torch.where(x > 0, y > 0, z > 0).float(),
    lambda x, y, z: x.sum(0, keepdim=True).expand(3, 3),
    lambda x, y, z: torch.stack(x.unbind()),
]


def program(seed):
    """A function that computes from its inputs, and overwrites some of them at the end as a donated step does."""

    def run(wide, *inputs):
        draws, values = random.Random(seed), [wide.float(), *inputs]
        for _ in range(14):
            values.append(draws.choice(OPERATIONS)(*draws.choices(values[-6:], k=3)))
        results = [value.clone() if draws.random() < 0.5 else value * 1 for value in draws.choices(values, k=2)]
        news = draws.sample([values[0], *values[5:]], 3)
        addresses = {old.untyped_storage()._cdata for old in inputs}
        news = [new.clone() if new.untyped_storage()._cdata in addresses else new for new in news]
        for old, new in zip((wide, *inputs), (wide * 0.5, *news), strict=False):
            old.copy_(new)
        return [*results, *news[: seed % 2], torch.full((), 2.0)]

    return run


class Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), func]
        return func(*args, **kwargs or {})


def test_a_new_value_is_written_over_the_old_one_by_torchs_own_methods():
    run = eager(make_fx(lambda x: x.copy_(x * 2))(x := torch.zeros(3)))
    with Calls() as calls:
        run([x])
    assert calls.seen == [torch.Tensor.mul_]


def equal(one, other):
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(one, other, strict=True))


@pytest.mark.slow
def test_random_programs_have_the_same_bits():
    torch.manual_seed(0)
    inputs = [torch.randn(3, 3, dtype=torch.float32 if number else torch.float64) for number in range(5)]
    for seed in range(10):
        graph = make_fx(program(seed), tracing_mode="fake")(*inputs)
        expected, found = ([value.clone() for value in inputs] for _ in range(2))
        with torch.no_grad():
            run = eager(graph)
            rounds = []
            for _ in range(2):
                results, known = run(found), graph(*expected)
                assert equal(results, known), seed
                assert equal(found, expected), seed
                results.pop().zero_()  # results are the caller's
                rounds.append((results, known[:-1]))
            assert all(equal(*both) for both in rounds), seed  # also after the state has been overwritten again


def test_a_function_that_calls_the_operation_with_other_arguments_is_not_it():
    x, add = torch.ones(2), torch.ops.aten.add.Tensor
    assert _calls(torch.add, add, (x, x), {"alpha": 2})
    for other in (
        lambda x, y, alpha: torch.add(x, y),
        lambda x, y, alpha: torch.add(x, y, alpha=2.0),
        lambda x, y, alpha: torch.add(x, y.clone(), alpha=2),
        lambda x, y, alpha: torch.sub(x, y, alpha=2),
    ):
        assert not _calls(other, add, (x, x), {"alpha": 2})
