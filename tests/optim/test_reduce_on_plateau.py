"""The learning rate on a plateau against torch's ReduceLROnPlateau, to the bit."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples
from torch.optim.lr_scheduler import ReduceLROnPlateau

import looplib as ll

MODEL = torch.nn.Linear(3, 2)
# The rate of the weight, and then the default, which is that of the bias.
SGD = ll.optimizer(
    torch.optim.SGD,
    lr=ll.optim.inject(0.1),
    groups=[(lambda name, _: name == "weight", {"lr": ll.optim.inject(0.03)})],
)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.integers(1, 12).map(lambda n: n / 8), max_size=30),
    st.sampled_from(["min", "max"]),
    st.sampled_from(["rel", "abs"]),
    *(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 1e-4, 0.25])),
    *(
        st.sampled_from([0.0, 0.1, 0.7]),
        st.sampled_from([0.0, 0.004, 0.05, 1.0, [0.01, 0.03], [0.0, 0.09]]),
        st.sampled_from([0.0, 1e-8, 0.02]),
    ),
)
def test_the_rates_have_the_bits_of_torchs(metrics, mode, kind, patience, cooldown, threshold, factor, min_lr, eps):
    weight, bias = MODEL.parameters()
    theirs = torch.optim.SGD([{"params": [weight], "lr": 0.03}, {"params": [bias], "lr": 0.1}])
    options = {"patience": patience, "cooldown": cooldown, "threshold": threshold, "threshold_mode": kind}
    scheduler = ReduceLROnPlateau(theirs, mode, factor, min_lr=min_lr, eps=eps, **options)
    state = ll.init_state(MODEL, SGD, extra={"plateau": ll.predicates.Plateau("score", mode=mode, **options)})
    for value in metrics:
        scheduler.step(value)
        state = ll.optim.reduce_on_plateau(state, {"score": value}, factor=factor, min_lr=min_lr, eps=eps)
        rates = [group["lr"].item() for group in state.opt_state["SGD"]["hyperparameters"]]
        assert rates == [group["lr"] for group in theirs.param_groups]


def test_the_defaults_are_torchs():
    theirs = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    defaults = ll.optim.reduce_on_plateau.__kwdefaults__
    assert (defaults["factor"], defaults["eps"], defaults["min_lr"]) == (theirs.factor, theirs.eps, theirs.min_lrs[0])


def test_a_donated_run_is_torchs_loop_and_resumes(tmp_path):
    """Weights and rates over 12 steps with an evaluation each, from a checkpoint after each step."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    y = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # which no line fits

    def loss_fn(model, x):
        return (model(x) - y).square().mean()

    theirs = torch.nn.Linear(3, 2)
    theirs.load_state_dict(MODEL.state_dict())
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(sgd, patience=1, cooldown=1, threshold=0.1, factor=0.5)

    optimizer = ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.5), foreach=False)
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(MODEL.state_dict())
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    plateau = ll.predicates.Plateau("loss", patience=1, cooldown=1, threshold=0.1)
    ckpt = ll.checkpoint_io(tmp_path)
    state = ll.init_state(model, optimizer, extra={"plateau": plateau})
    rates = []
    for _ in range(12):
        sgd.zero_grad()
        loss = loss_fn(theirs, x)
        loss.backward()
        sgd.step()
        scheduler.step(loss.item())
        state, metrics = train_step(state, x)
        state = ll.optim.reduce_on_plateau(state, ll.compute(metrics), factor=0.5)
        ckpt.save(state)
        state = ckpt.restore(ll.init_state(model, optimizer, extra={"plateau": plateau}))
        rates.append(ll.optim.hyperparameters(optimizer, state)["lr"])
        assert rates[-1] == sgd.param_groups[0]["lr"]
        assert torch.equal(state.params["weight"], theirs.weight)
    assert len(set(rates)) > 2


def test_only_injected_rates_are_lowered():
    parts = {"w": ll.optimizer(torch.optim.SGD, lr=ll.optim.inject(0.1)), "b": ll.optimizer(torch.optim.SGD, lr=0.1)}
    optimizer = ll.optim.partition(parts, lambda name, tensor: "w" if tensor.ndim > 1 else "b")
    record, x = {"plateau": ll.predicates.Plateau("loss", patience=0)}, torch.ones(4, 2)
    model = torch.nn.Linear(2, 1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum() / 4), optimizer)
    state = ll.init_state(model, optimizer, extra=record)
    for _ in range(2):
        state = ll.optim.reduce_on_plateau(state, {"loss": 1.0}, factor=0.5)
    after, _ = step(state, x)
    torch.testing.assert_close(state.params["weight"] - after.params["weight"], torch.full((1, 2), 0.05))
    torch.testing.assert_close(state.params["bias"] - after.params["bias"], torch.full((1,), 0.1))


def test_refusals():
    record, scores = {"plateau": ll.predicates.Plateau("loss")}, {"loss": 1.0}
    plain = ll.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="no injected lr"):  # at the first evaluation
        ll.optim.reduce_on_plateau(ll.init_state(MODEL, plain, extra=record), scores)
    state = ll.init_state(MODEL, SGD, extra=record)
    for options, named in (
        ({"factor": 1.0}, "factor is 1.0"),
        ({"min_lr": -1.0}, "min_lr is -1.0"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"key": "best"}, r"state.extra\['best'\]"),
    ):
        with pytest.raises(ValueError, match=named):
            ll.optim.reduce_on_plateau(state, scores, **options)
    other = state.with_extra(plateau=ll.predicates.BestSoFar("loss"))
    for without in (ll.init_state(MODEL, SGD), other):  # the advice is not refused when it is followed
        with pytest.raises(ValueError, match=r"there is no Plateau in .*ll\.predicates\.Plateau\(") as refused:
            ll.optim.reduce_on_plateau(without, scores)
        record = getattr(ll.predicates, re.search(r"ll\.predicates\.(\w+)", str(refused.value))[1])("loss")
        ll.optim.reduce_on_plateau(without.replace(extra={"plateau": record}), scores)
    with pytest.raises(TypeError, match=r"state is a tuple.*ll\.optim\.reduce_on_plateau\(state, scores\)"):
        ll.optim.reduce_on_plateau((state, {}), scores)
    for floors in ([], [0.0], [0.0] * 3):
        with pytest.raises(ValueError, match=rf"min_lr has {len(floors)} entries, and the optimizer has 2 groups"):
            ll.optim.reduce_on_plateau(state, scores, min_lr=floors)
    with pytest.raises(ValueError, match=r"min_lr is -1\.0"):
        ll.optim.reduce_on_plateau(state, scores, min_lr=[0.0, -1.0])
    with pytest.raises(ValueError, match=r"'loss'.* 'accuracy'"):
        ll.optim.reduce_on_plateau(state, {"accuracy": 1.0})
