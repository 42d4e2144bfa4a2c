"""States that move between devices, and models that are spread over two of them."""

import accelerate
import pytest
import torch
from torch.nn import functional as F

import looplib as ll
from far import cases
from far.device import far
from far.test_cases import bits

CPU = torch.device("cpu")
OPTIMIZER = ll.chain(ll.skip_nonfinite(3), cases.ADAMW, ll.ema(buffers=True))


@pytest.fixture(autouse=True)
def first():
    with far() as device:
        yield device


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_saved_on_one_device_is_restored_on_another_to_the_bit(tmp_path, first, asynchronous):
    for number, (source, target) in enumerate([(first, CPU), (CPU, first), (first, torch.device("far:1"))]):
        state, _ = cases.train(source, optimizer=OPTIMIZER)
        ckpt = ll.checkpoint_io(tmp_path / str(number), asynchronous=asynchronous)
        ckpt.save(state)
        ckpt.wait()
        _, template = cases.started(target, OPTIMIZER)
        restored = ckpt.restore(template)
        assert {name: tensor.device for name, tensor in restored.params.items()} == dict.fromkeys(
            state.params, target
        )
        assert bits((restored.params, restored.buffers, restored.opt_state)) == bits(
            (state.params, state.buffers, state.opt_state)
        )


def spread():
    """A model whose first half is on far:0 and whose second is on far:1, as accelerate's `device_map` does it."""
    torch.manual_seed(0)
    half = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(
        torch.nn.Sequential(*half), torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
    )
    return accelerate.dispatch_model(model, {"0": "far:0", "1": "far:1"}, main_device="far:0")


def spread_loss(model, batch):
    out = model(batch[0])
    return F.cross_entropy(out.to("far:1"), batch[1].to("far:1"))


WRAPPED = {
    "plain": lambda g, o: (g, o),
    "accumulate": lambda g, o: (ll.accumulate(g, 2), ll.chain(ll.clip_by_global_norm(0.1), o)),
    "conditional": lambda g, o: (g, ll.chain(ll.optim.dynamic_loss_scale(), ll.skip_nonfinite(2), o)),
    "averaged": lambda g, o: (ll.contrib.sam(g), ll.chain(o, ll.ema())),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        cases.ADAMW,
        cases.SGD,
        ll.optimizer(torch.optim.NAdam, lr=0.01),
        ll.optim.offload_state(cases.ADAMW, buffer_bytes=300),
    ],
)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_model_on_two_devices_trains_and_resumes_and_leaves_both_random_streams(tmp_path, wrap, donate, optimizer):
    def begin():
        model = spread()
        grad_fn, wrapped = wrap(ll.make_grad_fn(model, spread_loss), optimizer)
        return ll.make_train_step(grad_fn, wrapped, donate=donate), ll.init_state(model, wrapped)

    def run(step, state, batches):
        for batch in batches:
            state, _ = step(state, batch)
        return state

    batches = cases.batches(torch.device("far:0"))
    streams = [torch.far.get_rng_state(index) for index in range(2)]
    whole = bits(run(*begin(), batches))
    assert all(torch.equal(torch.far.get_rng_state(index), streams[index]) for index in range(2))
    torch.far.manual_seed_all(77)  # what was drawn before does not matter
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(run(*begin(), batches[:1]))
    step, state = begin()
    restored = ckpt.restore(state)
    assert {str(tensor.device) for tensor in restored.params.values()} == {"far:0", "far:1"}
    assert bits(run(step, restored, batches[1:])) == whole
