"""Means over steps that a checkpoint holds: the log after a stop is that of the unbroken run, wherever it stopped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import SGD, assert_each_refused
from torch import nn

import looplib as ll

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
EPOCHS = 4


def loss_fn(model, x):
    loss = model(x).square().sum(1)
    kept = loss[loss < loss.mean()]  # of a different number of samples in each batch
    return ll.Mean(kept.sum(), len(kept)), {"largest": ll.Mean(loss.max(), 1)}


def run(folder, log_now, save_now, stop=None):
    """The lines of the log by step, as a script writes them that is stopped behind a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = ll.optimizer(torch.optim.Adam, lr=0.1)
    loader = ll.make_loader(X, batch_size=2)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    ckpt, done, lines = ll.checkpoint_io(folder), ll.after_epochs(EPOCHS), {}
    state = ll.init_state(model, optimizer, loader=loader, extra={"window": ll.Window()})
    state = ckpt.restore(state, quiet=True)
    while not done(state):
        for batch in loader(state):
            state, metrics = step(state, batch)
            state = state.with_extra(window=state.extra["window"].add(metrics))
            if log_now(state):
                lines[state.step] = ll.compute(state.extra["window"].metrics()), len(state.extra["window"])
                state = state.with_extra(window=ll.Window())
            if save_now(state):
                ckpt.save(state)
            if state.step == stop:
                return lines
    return lines


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    known = {}

    def lines_of(every, log_now):
        if every not in known:
            known[every] = run(tmp_path_factory.mktemp("unbroken"), log_now, ll.predicates.at_step(1))
        return known[every]

    return lines_of


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    stops=st.lists(st.integers(1, EPOCHS * 20), max_size=2),
    every=st.sampled_from([75, 20, 7]),  # over 64 records, an epoch, and a number that divides nothing
    save=st.integers(3, 13),
)
def test_a_run_that_is_stopped_anywhere_logs_what_the_unbroken_one_does(
    unbroken, tmp_path_factory, stops, every, save
):
    log_now = ll.at_epoch_end() if every == 20 else ll.every_n_steps(every)
    folder, lines = tmp_path_factory.mktemp("stopped"), {}
    for stop in (*stops, None):
        lines |= run(folder, log_now, ll.every_n_steps(save), stop)
    assert lines == unbroken(every, log_now)


def test_the_means_are_those_of_all_samples_of_the_window(tmp_path):
    records = [{"loss": ll.Mean(torch.tensor(1.0 * n), n + 1, times=2)} for n in range(70)]
    window = ll.Window()
    for metrics in records[:67]:
        window = window.add(metrics)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.TrainState(step=67, extra=[{"here": (window,)}]))
    state = ckpt.restore(ll.TrainState(extra=[{"here": (ll.Window(),)}]), quiet=True)
    restored = state.extra[0]["here"][0]
    for metrics in records[67:]:
        restored = restored.add(metrics)
    expected = sum(2 * n for n in range(70)) / sum(2 * (n + 1) for n in range(70))
    assert ll.compute(restored.metrics()) == {"loss": pytest.approx(expected, rel=1e-15)}
    assert (len(restored), len(restored.waiting)) == (70, 6)


def test_what_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    ckpt, loss = ll.checkpoint_io(tmp_path), ll.Mean(torch.tensor(1.0))
    window = ll.Window().add({"loss": loss, "perplexity": ll.metrics.perplexity(loss)})
    ckpt.save(ll.TrainState(extra={"window": ll.Window().add({"loss": loss})}))
    assert_each_refused(
        (
            lambda: ckpt.save(ll.TrainState(step=1, extra={"window": window})),
            TypeError,
            r"/extra/window is a Window of perplexity \(Reading\), and a checkpoint holds windows of Means alone",
        ),
        (
            lambda: ckpt.restore(ll.TrainState(extra={"window": 0})),
            ValueError,
            "/extra/window is in the state, and not in",
        ),
        (
            lambda: ckpt.restore(ll.TrainState()),
            ValueError,
            "/extra/window/.* is in the checkpoint, and not in the state",
        ),
    )


@pytest.mark.parametrize("others", [None, {}, {"count": 3, "history": [1, 2]}], ids=["none", "empty", "others"])
def test_a_window_that_a_script_adds_or_takes_out_is_optional(tmp_path, others):
    window = ll.Window().add({"loss": ll.Mean(torch.tensor(1.0))})
    with_window = {**(others or {}), "window": window}
    added, gone = ll.checkpoint_io(tmp_path / "added"), ll.checkpoint_io(tmp_path / "gone")
    added.save(ll.TrainState(step=3, extra=others))
    gone.save(ll.TrainState(step=3, extra=with_window))
    empty = {**(others or {}), "window": ll.Window()}
    for ckpt, extra in ((added, empty), (gone, others)):
        for optional in ((), ("window",), ("extra.other",)):
            with pytest.raises(ValueError, match=r"(?s)/extra/window.*optional=\('extra\.window',\)"):
                ckpt.restore(ll.TrainState(extra=extra), optional=optional)
    start = {**empty, **({"count": 0, "history": [0, 0]} if others else {})}
    for state in (
        added.restore(ll.TrainState(extra=start), optional=("extra.window",), quiet=True),
        added.restore(ll.TrainState(extra=start), optional=["extra.window", "ema"], quiet=True),
    ):
        assert (state.step, state.extra) == (3, empty)
    state = gone.restore(ll.TrainState(extra=others), optional=("extra.window",), quiet=True)
    assert (state.step, state.extra) == (3, others)
    kept = gone.restore(ll.TrainState(extra=start), optional=("extra.window",), quiet=True)  # the line may stay
    assert len(kept.extra["window"]) == 1
    if others:
        fewer = {"window": ll.Window(), "count": 0}
        with pytest.raises(
            ValueError, match=r"(?s)/extra/history/0 is in the checkpoint.*optional=\('extra\.history',\)"
        ):
            gone.restore(ll.TrainState(extra=fewer), optional=("extra.window",))
        assert gone.restore(ll.TrainState(extra=fewer), optional=("extra.history",), quiet=True).extra["count"] == 3


def members_with_windows():
    """Three states that share a stack, whose windows have means and records, and each member's records."""
    model = nn.Linear(3, 1)

    def loss_fn(model, x):
        out = model(x).squeeze(1)
        return out.square().mean(), {
            "outputs": ll.metrics.Cat(out.detach()[:2]),
            "weighted": ll.Mean(out.sum(), x.sum()),
        }

    def state_of(seed):
        torch.manual_seed(seed)
        return ll.init_state(nn.Linear(3, 1), SGD, seed=seed, extra={"window": ll.Window()})

    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
    return step, [state_of(seed) for seed in range(3)]


def values_of(window):
    return {name: torch.as_tensor(metric.compute()).double() for name, metric in window.metrics().items()}


@pytest.mark.parametrize("steps", [2, 70])
def test_members_keep_their_windows_in_another_order(steps):
    step, alone = members_with_windows()
    stack, stacked_step = ll.transforms.stack_states(alone), ll.vmap_step(step)
    for x in X[:8].split(4) * (steps // 2):
        stack, metrics = stacked_step(stack, x)
        metrics = {name: metric for name, metric in metrics.items() if name != "outputs" or steps < 64}
        stack = stack.with_extra(window=stack.extra["window"].add({**metrics, "lr": ll.Mean(torch.tensor(0.1))}))
        for number, state in enumerate(alone):
            state, metrics = step(state, x)
            metrics = {name: metric for name, metric in metrics.items() if name != "outputs" or steps < 64}
            window = state.extra["window"].add({**metrics, "lr": ll.Mean(torch.tensor(0.1))})
            alone[number] = state.with_extra(window=window)
    members = ll.transforms.unstack_states(stack)
    assert [len(member.extra["window"]) for member in members] == [steps] * 3
    for member, state in zip(members, alone, strict=True):
        torch.testing.assert_close(
            values_of(member.extra["window"]), values_of(state.extra["window"]), rtol=1e-4, atol=1e-6
        )
    again = ll.transforms.stack_states([members[2], members[0], members[1]])
    rotated = ll.transforms.compute_members(
        {name: metric for name, metric in again.extra["window"].metrics().items() if name != "outputs"}
    )
    for row, state in zip(rotated, (alone[2], alone[0], alone[1]), strict=True):
        expected = values_of(state.extra["window"])
        assert row == pytest.approx({name: expected[name].item() for name in row}, rel=1e-4, abs=1e-6)
        assert row.keys() == {"loss", "weighted", "lr"}
    two = ll.transforms.stack_states(members[:2])
    two, metrics = stacked_step(two, X[:4])
    assert len(two.extra["window"].add({**metrics, "lr": ll.Mean(0.1)}).metrics()["loss"].total) == 2


def test_windows_of_other_steps_and_tensors_without_members_are_refused_in_a_stack():
    _, (first, second, _) = members_with_windows()
    fuller = second.with_extra(window=ll.Window().add({"loss": ll.Mean(torch.tensor(1.0))}))
    with pytest.raises(
        ValueError, match=r"extra\['window'\]\.waiting.*members 0 and 1.*with_extra\(window=ll\.Window"
    ):
        ll.transforms.stack_states([first, fuller])
    stack = ll.transforms.stack_states([first, second])
    stack = stack.with_extra(window=ll.Window().add({"loss": ll.Mean(torch.ones(5))}))
    with pytest.raises(
        ValueError, match=r"extra\['window'\]\.waiting\[0\]\['loss'\].* has shape \(5,\), and no first dim"
    ):
        ll.transforms.unstack_states(stack)


def test_a_state_with_a_window_is_copied_and_stacked_or_refused():
    window = ll.Window().add({"loss": ll.Mean(torch.tensor(1.0))})
    state = ll.init_state(nn.Linear(2, 1), extra={"window": window})
    assert ll.copy_state(state).extra["window"].metrics()["loss"].item() == 1.0
