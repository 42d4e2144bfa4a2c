"""Sums over weights: batches without any, and losses that do not say what they weigh."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from shared import SGD, both_steps, mean_square
from torch import nn
from torch.nn import functional as F

import looplib as ll
from looplib import testing


def ragged(seed=0, rows=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, 4, generator=generator, dtype=torch.double)
    labels = torch.randint(0, 3, (rows, 5), generator=generator)
    return {"x": x, "labels": labels.masked_fill(torch.arange(5) >= torch.arange(1, rows + 1)[:, None], -100)}


def plain_loss(model, batch):  # what transformers' output.loss is
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def exact_loss(model, batch):
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return ll.Mean(total, (batch["labels"] != -100).sum())


@pytest.mark.parametrize("weight", ["int tensor", "float tensor", "number", "times"])
@both_steps
def test_a_batch_without_any_weight_gives_the_same_whole_and_in_microbatches(weight, donate):
    model = nn.Linear(4, 3).double()
    batch = {"x": torch.randn(6, 5, 4).double(), "labels": torch.full((6, 5), -100)}

    def loss_fn(model, batch):
        total, count, _ = exact_loss(model, batch)
        one = {"int tensor": count, "float tensor": count.float(), "number": count.item(), "times": count}[weight]
        return ll.Mean(total, one, 3 if weight == "times" else 1)

    grad_fn = ll.make_grad_fn(model, loss_fn)
    for wrap in (lambda g: g, lambda g: ll.accumulate(g, 1), lambda g: ll.accumulate(g, 4)):
        state = ll.copy_state(ll.init_state(model, SGD))
        assert all((grad == 0).all() for grad in wrap(grad_fn)(state, batch).grads.values())
        before = ll.copy_state(state)
        state, metrics = ll.make_train_step(wrap(grad_fn), SGD, donate=donate)(state, batch)
        assert all(torch.equal(tensor, state.params[name]) for name, tensor in before.params.items())
        assert torch.tensor(ll.compute(metrics)["loss"]).isnan()  # 0 / 0, as cross_entropy's own mean


def test_a_weight_of_zero_counts_as_one_whatever_the_total():
    model = nn.Linear(4, 3).double()
    x = torch.randn(6, 4).double()
    for times in (1, 3):
        grad_fn = ll.make_grad_fn(
            model, lambda model, x, times=times: ll.Mean(model(x).sum(), torch.tensor(0.0), times)
        )
        state = ll.init_state(model)
        whole, pieces = grad_fn(state, x).grads, ll.accumulate(grad_fn, 4)(state, x).grads
        torch.testing.assert_close(whole, pieces, rtol=1e-12, atol=0)


@pytest.mark.parametrize("keys", [("x", "labels"), (0, 1)])
def test_a_plain_scalar_with_ignored_labels_is_warned_of_once_under_accumulate(keys):
    model = nn.Linear(4, 3).double()
    batch = ragged()
    if keys == (0, 1):
        batch = (batch["x"], batch["labels"])
    grad_fn = ll.accumulate(
        ll.make_grad_fn(model, lambda model, b: plain_loss(model, {"x": b[keys[0]], "labels": b[keys[1]]})), 3
    )
    state = ll.init_state(model)
    with pytest.warns(
        UserWarning, match=r"labels of -100 \(batch.*\) .*ll\.Mean\(total, weight\).*next_token_loss"
    ) as caught:
        grad_fn(state, batch)
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            grad_fn(state, batch)


def test_ignored_labels_that_come_later_are_found_and_others_are_not():
    model, state = nn.Linear(4, 3).double(), None
    state, clean = ll.init_state(model), {**ragged(), "labels": torch.ones(6, 5, dtype=torch.long)}
    grad_fn = ll.accumulate(ll.make_grad_fn(model, plain_loss), 2)
    for _ in range(8):
        grad_fn(state, clean)
    with pytest.warns(UserWarning, match="labels of -100"):
        [grad_fn(state, ragged()) for _ in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ll.make_grad_fn(model, plain_loss)(state, ragged())  # whole, where a plain mean is right
        ll.accumulate(ll.make_grad_fn(model, exact_loss), 2)(state, ragged())
        of_floats = ll.make_grad_fn(model, mean_square)
        ll.accumulate(of_floats, 2)(state, torch.full((4, 4), -100.0).double())


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(6, 4, generator=generator, dtype=torch.double),
        "y": torch.tensor([0, 0, 0, 1, 2, 2]),
        "target": torch.rand(6, 3, generator=generator, dtype=torch.double),
    }


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 20.0]).double()
SUMS = {
    "cross_entropy": lambda out, b: F.cross_entropy(out, b["y"], reduction="sum"),
    "of each, then the sum": lambda out, b: F.cross_entropy(out, b["y"], reduction="none").sum(),
    "pixels": lambda out, b: F.cross_entropy(out[..., None], b["y"][:, None], reduction="none").sum(),
    "mse": lambda out, b: nn.MSELoss(reduction="sum")(out, b["target"]),
    "a term": lambda out, b: (
        F.binary_cross_entropy_with_logits(out, b["target"], reduction="sum") + 0.1 * out.square().sum()
    ),
}
NOT_SUMS = {
    "divided": lambda out, b: F.cross_entropy(out, b["y"], reduction="sum") / len(out),
    "multiplied": lambda out, b: F.mse_loss(out, b["target"], reduction="sum") * (1 / len(out)),
    "mean": lambda out, b: F.cross_entropy(out, b["y"], label_smoothing=0.1),
    "mean of sums": lambda out, b: F.mse_loss(out, b["target"], reduction="none").sum(1).mean(),
    "sum of means": lambda out, b: torch.stack([F.mse_loss(out, b["target"]), out.square().mean()]).sum(),
    "a Mean": lambda out, b: ll.Mean(F.cross_entropy(out, b["y"], reduction="sum"), len(out)),
}
MEANS_BY_CLASS = {
    "cross_entropy": lambda out, b: F.cross_entropy(out, b["y"], CLASS_WEIGHTS),
    "smoothed": lambda out, b: 2 * F.cross_entropy(out, b["y"], CLASS_WEIGHTS, label_smoothing=0.1),
    "beside another": lambda out, b: nn.NLLLoss(CLASS_WEIGHTS)(out.log_softmax(1), b["y"]) + out.square().mean(),
}


def both(loss, batch, microbatches=3):
    """The gradient function around a loss of the outputs, and the gradients of the whole batch by torch alone."""
    model = nn.Linear(4, 3).double()

    def loss_fn(model, batch):
        return loss(model(batch["x"]), batch)

    grad_fn = ll.make_grad_fn(model, loss_fn)
    value = loss_fn(model, batch)
    value = value.compute() if isinstance(value, ll.Mean) else value
    raw = dict(zip(["weight", "bias"], torch.autograd.grad(value, [model.weight, model.bias]), strict=True))
    return ll.accumulate(grad_fn, microbatches), grad_fn, ll.init_state(model), raw


@pytest.mark.every_case
@pytest.mark.parametrize("kind", SUMS)
def test_a_plain_sum_is_warned_of_once_under_accumulate(kind):
    batch = images()
    grad_fn, whole, state, raw = both(SUMS[kind], batch, 2)
    with pytest.warns(UserWarning, match=r"the loss is a sum over the samples.*ll\.Mean\(total, number") as caught:
        split = grad_fn(state, batch).grads
    assert [one.filename for one in caught] == [__file__]
    torch.testing.assert_close({name: 2 * grad for name, grad in split.items()}, raw)  # the warning is right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(whole(state, batch).grads, raw)  # where it means what it says
        for _ in range(5):
            grad_fn(state, batch)
    fresh = both(SUMS[kind], batch)[1]  # one that has not warned
    with pytest.raises(AssertionError, match=r"Or a sum over the samples: return a mean"):
        testing.assert_microbatches_equal_batch(fresh, state, batch)


SEEN = {
    "cross_entropy": lambda out, b: F.cross_entropy(out, b["y"], reduction="sum"),
    "nll_loss": lambda out, b: F.nll_loss(out.log_softmax(1), b["y"], reduction="sum"),
    "mse_loss": lambda out, b: F.mse_loss(out, b["target"], reduction="sum"),
    "smooth_l1_loss": lambda out, b: F.smooth_l1_loss(out, b["target"], reduction="sum"),
    "huber_loss": lambda out, b: F.huber_loss(out, b["target"], reduction="sum"),
    "soft_margin_loss": lambda out, b: F.soft_margin_loss(out, b["target"].sign(), reduction="sum"),
    "multi_margin_loss": lambda out, b: F.multi_margin_loss(out, b["y"], reduction="sum"),
    "multilabel_margin_loss": lambda out, b: F.multilabel_margin_loss(
        out, b["y"][:, None].expand(-1, 3), reduction="sum"
    ),
    "binary cross-entropies": lambda out, b: F.binary_cross_entropy(out.sigmoid(), b["target"], reduction="sum"),
}
UNSEEN = {
    "l1_loss": lambda out, b: F.l1_loss(out, b["target"], reduction="sum"),
    "kl_div": lambda out, b: F.kl_div(out.log_softmax(1), b["target"], reduction="sum"),
    "class probabilities": lambda out, b: F.cross_entropy(out, b["target"], reduction="sum"),
    "label smoothing": lambda out, b: F.cross_entropy(out, b["y"], reduction="sum", label_smoothing=0.1),
}


def test_the_losses_whose_sums_are_seen_are_those_that_the_page_of_accumulate_names():
    seen, unseen = " ".join(ll.accumulate.__doc__.split()).split("It does not show")
    batch = images()
    for name, loss in {**SEEN, **UNSEEN}.items():
        assert name in (seen if name in SEEN else unseen)
        grad_fn, _, state, raw = both(loss, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            split = grad_fn(state, batch).grads
        assert len(caught) == (name in SEEN), name
        torch.testing.assert_close({name: 3 * grad for name, grad in split.items()}, raw)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", NOT_SUMS)
def test_a_mean_that_is_written_with_a_sum_is_not_warned_of(kind):
    batch = images()
    grad_fn, _whole, state, raw = both(NOT_SUMS[kind], batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(grad_fn(state, batch).grads, raw)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MEANS_BY_CLASS)
def test_class_weights_in_a_plain_mean_are_warned_of_once_under_accumulate(kind):
    batch = images()
    grad_fn, whole, state, raw = both(MEANS_BY_CLASS[kind], batch)
    with pytest.warns(UserWarning, match=r"class weights.*weight\[labels\]\.sum\(\)"):
        split = grad_fn(state, batch).grads
    assert max((split[name] - raw[name]).abs().max() for name in raw) > 1e-2  # the warning is right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole(state, batch)
        for _ in range(5):
            grad_fn(state, batch)
    fresh = both(MEANS_BY_CLASS[kind], batch)[1]
    with pytest.raises(AssertionError, match="what a mask leaves, class weights"):
        testing.assert_microbatches_equal_batch(fresh, state, batch)


def test_class_weights_that_are_all_alike_are_no_mistake():
    batch = images()
    for number in (1.0, 3.0):
        weights = torch.full((3,), number).double()
        for smoothing in (0.0, 0.1):
            grad_fn, _, state, raw = both(
                lambda out, b, w=weights, s=smoothing: F.cross_entropy(out, b["y"], w, label_smoothing=s), batch
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.testing.assert_close(grad_fn(state, batch).grads, raw)


IGNORING = {
    "cross_entropy": lambda out, b: F.cross_entropy(out, b["y"], ignore_index=0),
    "nll": lambda out, b: F.nll_loss(out.log_softmax(1), b["y"], ignore_index=0),
    "pixels": lambda out, b: nn.NLLLoss(ignore_index=0)(out.log_softmax(1)[..., None], b["y"][:, None]),
    "a term, smoothed": lambda out, b: (
        2 * F.cross_entropy(out, b["y"], ignore_index=0, label_smoothing=0.1) + out.square().mean()
    ),
    "negative": lambda out, b: F.cross_entropy(out, b["y"] - 5 * (b["y"] == 0).long(), ignore_index=-5),
    "made in the loss": lambda out, b: F.cross_entropy(out, b["y"].masked_fill(b["y"] == 0, -100)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", IGNORING)
def test_labels_that_the_loss_leaves_out_are_warned_of_once_under_accumulate(kind):
    batch, label = images(), {"negative": -5, "made in the loss": -100}.get(kind, 0)
    grad_fn, whole, state, raw = both(IGNORING[kind], batch, 2)
    words = rf"leaves out labels of {label} \(ignore_index\).*the number of labels that are not {label}\."
    with pytest.warns(UserWarning, match=words) as caught:
        split = grad_fn(state, batch).grads
    assert [one.filename for one in caught] == [__file__]
    assert max((split[name] - raw[name]).abs().max() for name in raw) > 1e-2  # the warning is right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(whole(state, batch).grads, raw)
        grad_fn(state, batch)
    fresh = both(IGNORING[kind], batch)[1]  # one that has not warned
    with pytest.raises(AssertionError, match="what a mask leaves"):
        testing.assert_microbatches_equal_batch(fresh, state, batch)


def test_labels_that_could_be_left_out_and_are_not_there_are_not_warned_of():
    batch = images() | {"tokens": torch.tensor([[0, -100]] * 6)}  # which the loss does not take for labels
    for loss in (
        lambda out, b: F.cross_entropy(out, b["y"], ignore_index=7),
        lambda out, b: F.cross_entropy(out, b["y"]),
        lambda out, b: F.cross_entropy(out, b["y"], ignore_index=0, reduction="none").mean(),  # over the samples
    ):
        grad_fn, _, state, raw = both(loss, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(grad_fn(state, batch).grads, raw)


def test_a_look_at_the_labels_does_not_run_a_checkpoint_again():
    calls = []

    def loss_fn(model, batch):
        def loss(x, y):
            calls.append(len(x))
            return F.cross_entropy(model(x), y, CLASS_WEIGHTS, ignore_index=0)

        return torch.utils.checkpoint.checkpoint(loss, batch["x"], batch["y"], use_reentrant=False)

    model, batch = nn.Linear(4, 3).double(), images()
    ll.grads.backward(ll.make_grad_fn(model, loss_fn), model, batch, step=0)
    once, calls[:] = len(calls), []
    with pytest.warns(UserWarning, match="class weights"):
        ll.grads.backward(ll.accumulate(ll.make_grad_fn(model, loss_fn), 2), model, batch, step=0)
    assert len(calls) == 2 * once


def stacked(step):
    mapped = ll.vmap_step(step)
    return lambda state, batch: mapped(ll.transforms.stack_states([state, ll.state.fold_in(state, 1)]), batch)


TRACED = {
    "compile": partial(ll.compile_step, backend="eager"),
    "vmap": stacked,
    "differentiable": ll.transforms.differentiable,
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("transform", "kind"),
    [
        ("compile", "sum"),
        ("compile", "class weights"),
        ("differentiable", "sum"),
        ("differentiable", "class weights"),
        pytest.param("vmap", "sum", marks=pytest.mark.slow),
    ],
)
def test_a_traced_step_is_warned_of_as_an_eager_one(transform, kind):
    loss = {"sum": SUMS, "class weights": MEANS_BY_CLASS}[kind]["cross_entropy"]
    words = {"sum": "the loss is a sum over the samples", "class weights": "a cross-entropy with class weights"}[kind]
    batch = images()
    grad_fn, _, state, _ = both(loss, batch, 2)
    sgd = ll.optimizer(torch.optim.SGD, lr=1.0)
    state = state.replace(opt_state=sgd.init(state.params))
    eager = ll.make_train_step(grad_fn, sgd)
    step = TRACED[transform](eager)
    with pytest.warns(UserWarning, match=words) as caught:
        first, _ = step(state, batch)
    assert [one.filename for one in caught if words in str(one.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*within accumulate or on several ranks")
        wanted, _ = eager(state, batch)
        if transform == "compile":
            step(state, {name: tensor[:5] for name, tensor in batch.items()})  # another trace
    weight = first.params["weight"][0] if transform == "vmap" else first.params["weight"]
    torch.testing.assert_close(weight, wanted.params["weight"])


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["class weights all alike", "labels"])
def test_a_trace_is_not_warned_of_what_is_no_mistake_or_what_it_cannot_see(kind):
    alike = torch.ones(3).double()
    loss = {
        "class weights all alike": lambda out, b: F.cross_entropy(out, b["y"], alike),
        "labels": lambda out, b: F.cross_entropy(out, b["y"], ignore_index=0),
    }[kind]
    grad_fn, _, state, _ = both(loss, images())
    step = ll.compile_step(ll.make_train_step(grad_fn, SGD), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state.replace(opt_state=SGD.init(state.params)), images())


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_look_leaves_a_trace_as_it_is_and_keeps_nothing_of_it():
    def operations(warn):
        tensors = []
        note = tensors.extend  # a list that a trace changes would be refused

        def loss(out, batch):
            logps, weights = out.log_softmax(1), out.new_tensor([1.0, 2.0, 3.0])  # which its graph holds
            loss = F.nll_loss(logps, batch["y"], weights)
            note(map(weakref.ref, (loss, logps, weights)))
            return loss

        batch = images()
        grad_fn, _, state, _ = both(loss, batch)
        tensors.clear()
        state = state.replace(opt_state=SGD.init(state.params))
        step = ll.compile_step(ll.make_train_step(grad_fn, SGD), backend="eager")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ll.debug.warn_of_misuse(warn)
            try:
                step(state, batch)
                with Counted() as counted:
                    step(state, batch)
            finally:
                ll.debug.warn_of_misuse(True)
        assert any("class weights" in str(one.message) for one in caught) == warn
        gc.collect()
        return counted.names, len(tensors), [ref() for ref in tensors if ref() is not None]

    names, noted, kept = operations(True)
    assert operations(False) == (names, noted, kept)
    assert noted == 9
    assert not kept


def test_the_advice_on_class_weights_gives_the_gradient_of_the_whole_batch():
    def loss(out, batch):
        total = F.cross_entropy(out, batch["y"], weight=CLASS_WEIGHTS, reduction="sum")
        return ll.Mean(total, CLASS_WEIGHTS[batch["y"]].sum())

    batch = images()
    torch.manual_seed(0)
    _, _, _, raw = both(MEANS_BY_CLASS["cross_entropy"], batch)
    torch.manual_seed(0)  # the same weights
    exact, _, state, _ = both(loss, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(exact(state, batch).grads, raw)


def pairs():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 11, (2, 6, 7), generator=generator)
    labels = ids.masked_fill(torch.arange(7) < torch.tensor([[1], [2], [3], [4], [5], [2]]), -100)
    return {"chosen": ids[0], "chosen_labels": labels[0], "rejected": ids[1], "rejected_labels": labels[1]}


class Policy(nn.Module):
    """Log probabilities of the labels of each row that are not -100."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids, labels):
        logps = self.head(self.embed(ids[:, :-1])).log_softmax(-1)
        labels = labels[:, 1:]
        seen = labels != -100
        return (logps.gather(2, labels.clamp(min=0)[..., None])[..., 0] * seen).sum(1)


def dpo_loss(policy, batch, beta=0.1):
    margin = policy(batch["chosen"], batch["chosen_labels"]) - policy(batch["rejected"], batch["rejected_labels"])
    return -F.logsigmoid(beta * margin).mean(), {"margin": margin.mean()}


def test_a_mean_over_pairs_with_ignored_labels_is_right_and_not_warned_of():
    policy, batch = Policy().double(), pairs()
    grad_fn = ll.make_grad_fn(policy, dpo_loss)
    state = ll.init_state(policy)
    raw = torch.autograd.grad(dpo_loss(policy, batch)[0], list(policy.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = ll.accumulate(grad_fn, 4)(state, batch).grads
        torch.testing.assert_close(split, dict(zip(state.params, raw, strict=True)))

    def with_sft(policy, batch):  # a term that is a mean over the labels
        loss, _ = dpo_loss(policy, batch)
        logits = policy.head(policy.embed(batch["chosen"][:, :-1]))
        return loss + 0.2 * F.cross_entropy(logits.flatten(0, 1), batch["chosen_labels"][:, 1:].flatten())

    def selected(policy, batch):  # a mean over what a mask leaves
        logps = policy.head(policy.embed(batch["chosen"])).log_softmax(-1)[..., 0]
        return -logps[batch["chosen_labels"] != -100].mean()

    for loss_fn in (with_sft, selected):
        with pytest.warns(UserWarning, match="labels of -100"):
            ll.accumulate(ll.make_grad_fn(policy, loss_fn), 4)(state, batch)


def beside(value_of):
    def loss_fn(model, batch):
        loss = exact_loss(model, batch)
        return loss, {"other": value_of(model, batch, loss)}

    return loss_fn


def evaluated(model, loss_fn, batch):
    step = ll.make_eval_step(model, loss_fn)
    halves = [{name: column[part] for name, column in batch.items()} for part in (slice(3), slice(3, 6))]
    return lambda state: ll.evaluate(step, state, halves)


@pytest.mark.parametrize("where", ["accumulate", "evaluate"])
def test_a_plain_scalar_beside_a_loss_over_tokens_is_warned_of_once(where):
    model, batch = nn.Linear(4, 3).double(), ragged()
    state = ll.init_state(model)
    loss_fn = beside(lambda model, batch, loss: plain_loss(model, batch))  # the same quantity

    def calls(loss_fn):
        if where == "evaluate":
            return evaluated(model, loss_fn, batch)
        grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), 2)
        return lambda state: ll.compute(grad_fn(state, batch).metrics)

    call = calls(loss_fn)
    with pytest.warns(UserWarning, match=r"'other' beside the loss.*return ll.Mean\(total, weight\)") as caught:
        values = call(state)
    assert [one.filename for one in caught] == [__file__]
    assert abs(values["loss"] - values["other"]) > 5e-3  # the warning is right
    assert values["loss"] == pytest.approx(plain_loss(model, batch).item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            call(state)
        by_tokens = beside(lambda model, batch, loss: ll.Mean(loss.total.detach(), loss.weight))
        of_samples = beside(
            lambda model, batch, loss: ll.Mean(model(batch["x"]).mean(), 1, times=len(batch["labels"]))
        )
        constant, weight = torch.tensor(0.5), nn.Parameter(torch.tensor(2.0))
        for right in (by_tokens, of_samples, *(beside(lambda *_, it=it: it) for it in (0.5, constant, weight.exp()))):
            calls(right)(state)
        if where == "accumulate":  # where the graph tells
            calls(beside(lambda model, batch, loss: model(batch["x"]).mean()))(state)


def test_a_plain_scalar_beside_a_loss_over_samples_is_not_warned_of():
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()

    def loss_fn(model, x):
        out = model(x)
        return ll.Mean(out.square().sum(), len(x)), {"norm": out.detach().norm()}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ll.accumulate(ll.make_grad_fn(model, loss_fn), 3)(ll.init_state(model), x)
