"""Graphs update parameters by torch's fused kernel, as eager steps do: any number, and machine code from 64 on."""

import math

import pytest
import torch
from shared import SGD, both_steps, trained
from torch import nn, optim
from torch.utils._pytree import tree_leaves

import looplib as ll
from looplib.transforms import _backends, _compile_step
from looplib.transforms._backends import eager

QUICK = {"backend": "eager"}
ADAMW = ll.optimizer(optim.AdamW, lr=0.1)
FEW = 5  # parameters: without machine code, any number is updated by the kernel


class Many(nn.Module):
    """A model whose gradients have the same bits in each form of the step."""

    def __init__(self, count, shape=(3,)):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for _ in range(count))

    def forward(self, x):
        return (torch.stack([*self.weights]) * x).sum()


def loss_fn(model, batch):
    return model(batch)


def batches(model, count=4, **scales):
    generator = torch.Generator().manual_seed(2)
    shape = len(model.weights), *model.weights[0].shape
    return [torch.randn(shape, generator=generator) * scales.get(f"at_{number}", 1.0) for number in range(count)]


def steps_of(model, optimizer, donate, **options):
    plain = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    return plain, ll.compile_step(plain, **options)


def counted(word, step):
    """The operations with this word in their names, for each graph of a compiled step."""
    waiting, found = [*step.compiler.table.values()], []
    while waiting:
        for answer in waiting.pop().values():
            if hasattr(answer, "answers"):
                waiting.append(answer.answers)
            else:
                found.append(sum(word in str(node.target) for node in answer.program.graph.graph.nodes))
    return found


def kernels_in(step):
    """The fused operations in each graph of a compiled step."""
    return counted("fused_update_", step)


def same(one, other):
    leaves = [tree_leaves((state.params, state.buffers, state.opt_state)) for state in (one, other)]
    return one.step == other.step and all(map(torch.equal, *leaves))


def compared(model, optimizer, donate, data=None, **options):
    """The graphs of the compiled step, after it has ended in the bits of the eager step."""
    data = batches(model) if data is None else data
    plain, compiled = steps_of(model, optimizer, donate, **(options or QUICK))
    start = ll.copy_state(ll.init_state(model, optimizer))
    expected = trained(plain, ll.copy_state(start), data)
    assert same(trained(compiled, ll.copy_state(start), data), expected)
    assert not same(start, expected)
    return kernels_in(compiled)


def schedule(step):
    return 0.1 / (1 + step)


OPTIMIZERS = {
    "AdamW": lambda: ll.optimizer(optim.AdamW, lr=schedule),
    "Adam": lambda: ll.optimizer(optim.Adam, lr=0.1, amsgrad=True, weight_decay=0.1, maximize=True),
    "by the user": lambda: ll.optimizer(optim.Adam, lr=0.1, fused=True),
    "SGD": lambda: ll.optimizer(optim.SGD, lr=schedule, momentum=0.9, nesterov=True, weight_decay=schedule),
    "SGD without state": lambda: SGD,
    "Adagrad": lambda: ll.optimizer(optim.Adagrad, lr=0.1, lr_decay=0.1),
    "injected": lambda: ll.optimizer(optim.AdamW, lr=ll.optim.inject(0.1)),
    "groups": lambda: ll.optimizer(optim.AdamW, lr=schedule, groups=GROUPS),
}
GROUPS = [  # the last of nothing
    (lambda name, tensor: name.endswith("1"), {"lr": 0.2, "weight_decay": 0.0}),
    (lambda name, tensor: name.endswith("none"), {"lr": 0.3}),
]


@both_steps
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_operation_updates_each_group_with_the_bits_of_the_eager_step(name, donate):
    assert compared(Many(FEW), OPTIMIZERS[name](), donate) == [2 if name == "groups" else 1]


def test_a_parameter_alone_is_updated_by_the_kernel():
    assert compared(Many(1), ll.optimizer(optim.AdamW, lr=schedule), True) == [1]


@pytest.mark.slow
def test_the_kernel_writes_to_a_donated_state_and_not_to_copies():
    model, found = Many(FEW), []
    for donate in (True, False):
        _, compiled = steps_of(model, ADAMW, donate, **QUICK)
        compiled(ll.copy_state(ll.init_state(model, ADAMW)), batches(model)[0])
        found += counted("clone", compiled)
    assert found == [0, 4 * FEW]  # the parameters, two moments and a count


def averaged(optimizer):
    return ll.chain(optimizer, ll.optim.swa(start=1, every=2), ll.optim.ema(0.9))


@both_steps
@pytest.mark.parametrize("wrapped", [lambda optimizer: optimizer, averaged])
def test_old_weights_that_are_read_after_the_update_are_old(wrapped, donate):
    def with_a_weight(model, batch):
        return model(batch), {"weight": model.weights[0].sum(), "itself": model.weights[1]}

    model = Many(FEW, ())
    optimizer = wrapped(ADAMW)
    step = ll.make_train_step(ll.make_grad_fn(model, with_a_weight), optimizer, donate=donate)
    start = ll.copy_state(ll.init_state(model, optimizer))
    expected, found, compiled = ll.copy_state(start), start, ll.compile_step(step, **QUICK)
    for batch in batches(model):
        expected, wanted = step(expected, batch)
        found, metrics = compiled(found, batch)
        assert ll.compute(metrics) == ll.compute(wanted)
    # An average over steps is rounded differently in a graph.
    torch.testing.assert_close((found.params, found.opt_state), (expected.params, expected.opt_state))


@pytest.mark.slow
@both_steps
def test_machine_code_has_the_bits_of_the_eager_step_too(donate):
    model, optimizer = Many(64, (3, 2)), ll.chain(ll.skip_nonfinite(3), OPTIMIZERS["AdamW"]())
    assert compared(model, optimizer, donate, batches(model, at_1=math.inf), backend="inductor") == [1]


def near(model, optimizer, backend="eager"):
    """The kernels in the graphs of a compiled step, after it has ended near the eager step."""
    plain, compiled = steps_of(model, optimizer, False, backend=backend)
    start, data = ll.init_state(model, optimizer), batches(model, 2)
    torch.testing.assert_close(trained(compiled, start, data).params, trained(plain, start, data).params)
    return sorted(kernels_in(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 63])
def test_generated_code_updates_few_parameters_and_a_graph_without_it_none(most, monkeypatch):
    # The graph for Inductor, run as it is: generating the code would take long.
    monkeypatch.setattr(_backends, "_by_inductor", lambda settings, program: eager(program.graph))
    if most == 2:  # in place of 63
        monkeypatch.setattr(_compile_step, "_KERNELS_FROM", 3)
    for backend, count, kernels in (("inductor", most, 0), ("inductor", most + 1, 1), ("eager", 1, 1)):
        assert near(Many(count), ADAMW, backend) == [kernels], (backend, count)


def moving_betas():
    return ll.optimizer(optim.AdamW, lr=0.1, betas=lambda step: (0.9, 0.99)), Many(FEW)


def mixed():
    model = Many(FEW)
    model.weights[3].data = model.weights[3].data.double()
    return ADAMW, model


def with_gaps():
    model = Many(FEW, (3, 2))
    model.weights[3].data = torch.zeros(3, 4)[:, ::2]
    return ADAMW, model


@pytest.mark.parametrize("make", [moving_betas, mixed, with_gaps])
def test_other_updates_are_those_of_the_class(make):
    optimizer, model = make()
    # A graph's own copy of a tensor with gaps has none. Two dtypes take two calls of the kernel.
    assert near(model, optimizer) == {mixed: [2], with_gaps: [1, 1]}.get(make, [0])


def test_a_gradient_with_other_strides_is_paired_by_its_indices():
    def updated(grad):
        param = torch.ones(2, 3)
        values = '{"weight_decay": 0, "momentum": 0, "lr": 1.0, "dampening": 0, "nesterov": false, "maximize": false}'
        torch.ops.looplib.fused_update_("SGD", values, [], [], [grad], [param], [], [])
        return param

    grad = torch.arange(6.0).reshape(3, 2).t()
    assert grad.stride() == (1, 2)
    assert torch.equal(updated(grad), 1 - grad)
    assert torch.equal(updated(grad.contiguous()), 1 - grad)
