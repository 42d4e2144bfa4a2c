"""Steps against the raw loop: the same bits, and nothing left behind."""

import collections
import contextlib
import copy
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from problem import step_of
from shared import SGD, bits, both_steps, classify, mean_output, mean_square, mix
from torch import nn
from torch.utils.checkpoint import checkpoint

import looplib as ll

STEPS = 30


class TiedTransformer(nn.Module):
    def __init__(self, vocabulary=30, width=16, recompute=False):
        super().__init__()
        self.embedding, self.recompute = nn.Embedding(vocabulary, width), recompute
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(32))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions[: tokens.shape[1], None] / 32
        return self.head(checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), 2, 8))[0][:, -1])


class Temperature(nn.Module):
    """A loss that uses the model for its attributes, and calls it several times."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.log_scale = nn.Parameter(torch.zeros(()))


def contrast(model, batch):
    x, _ = batch
    one, two = F.normalize(model.encoder(x)), F.normalize(model.encoder(x * 1.1))
    logits = one @ two.T * model.log_scale.exp()
    return F.cross_entropy(logits, torch.arange(len(x))) + 0.01 * model.encoder[0].weight.square().sum()


def next_token(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def vectors():
    return torch.randn(12, 16), torch.randint(0, 4, (12,))


def tokens():
    return torch.randint(0, 30, (6, 9))


def batch_norm():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


def frozen():
    model = batch_norm().requires_grad_(False)
    model[4].requires_grad_(True)
    return model


def with_a_module_in_eval_mode():
    model = batch_norm()
    model[1].eval()
    return model


def unused():
    model = batch_norm()
    model[0].unused = nn.Linear(16, 4)
    return model


# The fast tier runs the first one.
CASES = {
    "batch_norm": (batch_norm, classify, vectors),
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), classify, vectors),
    "frozen": (frozen, classify, vectors),
    "eval_mode": (with_a_module_in_eval_mode, classify, vectors),
    "unused": (unused, classify, vectors),
    "tied_transformer": (TiedTransformer, next_token, tokens),
    "activation_checkpointing": (lambda: TiedTransformer(recompute=True), next_token, tokens),
    "lstm": (Lstm, classify, vectors),
    "attributes": (Temperature, contrast, vectors),
}


def make(case, steps=STEPS):
    build, loss_fn, make_batch = CASES[case]
    torch.manual_seed(7)
    batches = [make_batch() for _ in range(steps)]
    torch.manual_seed(3)
    return build(), loss_fn, batches


def raw_loop(model, loss_fn, batches, optimizer, seed=0):
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(mix(seed, step, 0, 0))
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_bits_of_the_raw_loop(case):
    model, loss_fn, batches = make(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = raw_loop(model, loss_fn, batches, optimizer)
    moments = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}

    for donate, bound in itertools.product([False, True], repeat=2):
        ours, loss_fn, batches = make(case)
        adamw = ll.optimizer(torch.optim.AdamW, lr=3e-3)
        grad_fn = ll.make_grad_fn(ours, loss_fn, allow_unused=case == "unused")
        step = ll.make_train_step(grad_fn, adamw, donate=donate)
        state = ll.init_state(ours, adamw)
        if not bound:
            state = ll.copy_state(state)
        found = []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(ll.compute(metrics)["loss"])
        assert found == losses
        assert bits(state.params) == bits(dict(model.named_parameters()))
        assert bits(state.buffers) == bits(dict(model.named_buffers()))
        updated = {name: entry for name, entry in state.opt_state["AdamW"]["state"].items() if entry["step"]}
        assert bits(updated) == bits(moments)
        assert (state.step, state.samples) == (
            STEPS,
            STEPS * len(batches[0][0] if loss_fn != next_token else batches[0]),
        )
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in model.parameters()]
        if donate and bound:
            assert all(state.params[name] is p for name, p in ours.named_parameters())


def test_mean_losses_and_aux_are_recorded():
    model, _, [(x, y)] = make("mlp", 1)

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return ll.Mean((losses * (y != 0)).sum(), (y != 0).sum()), {"largest": losses.max()}

    out = ll.make_grad_fn(model, loss_fn)(ll.init_state(model), (x, y))
    losses = F.cross_entropy(model(x), y, reduction="none")
    losses[y != 0].mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(out.grads[name], parameter.grad)
    expected = {"loss": losses[y != 0].mean().item(), "largest": losses.max().item()}
    assert ll.compute(out.metrics) == pytest.approx(expected, rel=1e-6)


def test_counts_follow_batches_epochs_and_samples():
    model, loss_fn, _ = make("mlp", 1)
    step = step_of(model, SGD, loss_fn=loss_fn)
    state, total = ll.init_state(model, SGD, epoch_length=3), 0
    for count, size in enumerate((5, 5, 2, 5, 5, 2, 5), 1):
        state, _ = step(state, (torch.randn(size, 16), torch.zeros(size, dtype=torch.long)))
        total += size
        assert (state.step, state.samples, state.batch_samples) == (count, total, size)
        assert (state.epoch, state.batch) == divmod(count, 3)


def everything(model, state, batch):
    """All that a pure step must leave as it was."""
    return bits(
        [
            dict(model.named_parameters()),
            dict(model.named_buffers()),
            [p.grad for p in model.parameters()],
            [module.training for module in model.modules()],
            [p.requires_grad for p in model.parameters()],
            [id(p) for p in model.parameters()],
            state,
            batch,
            torch.get_rng_state(),
            torch.is_grad_enabled(),
        ]
    ), random.getstate()


@pytest.mark.filterwarnings("ignore:.* went into eval mode")
@pytest.mark.parametrize("case", CASES)
def test_a_pure_step_leaves_everything_and_repeats(case):
    model, loss_fn, batches = make(case, 3)
    adamw = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn, allow_unused=True), adamw)
    start = ll.init_state(model, adamw, seed=5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.eval()
    next(iter(model.children())).train()
    before = everything(model, start, batches[1])
    first, first_metrics = step(start, batches[1])
    assert everything(model, start, batches[1]) == before

    # Anything may be done between.
    step(first, batches[2])
    torch.manual_seed(99)
    torch.rand(5)
    model.train()
    model.requires_grad_(True)
    model.zero_grad()
    told = pytest.warns(UserWarning, match="requires_grad of") if case == "frozen" else contextlib.nullcontext()
    with torch.no_grad(), told:
        second, second_metrics = step(start, batches[1])
    assert bits(second) == bits(first)
    assert bits(second_metrics) == bits(first_metrics)


# Donation


def donated(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.register_buffer("table", torch.randn(3))
    model[0].bias.requires_grad_(False)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)
    step = step_of(model, adamw, True, classify)
    return model, step, ll.init_state(model, adamw)


def test_a_spent_state_says_what_took_it():
    _, step, start = donated()
    one, _ = step(start, vectors())
    two, _ = step(one, vectors())
    for spent in (start, one):
        for field in ("params", "opt_state"):
            with pytest.raises(
                ll.DonatedStateError, match=rf"state at step {spent.step} .* its {field} can .*step 2 now"
            ):
                getattr(spent, field)
        with pytest.raises(
            ll.DonatedStateError, match=r"lost, .* checkpoint .* copy it first: kept = ll.copy_state\(state\)"
        ):
            step(spent, vectors())
        with pytest.raises(ll.DonatedStateError):
            spent.replace(step=9)
        with pytest.raises(ll.DonatedStateError):
            torch.utils._pytree.tree_map(lambda leaf: leaf, spent)
        assert "donated" in repr(spent)
        assert spent.step == (0 if spent is start else 1)  # counts can still be read
    assert two.params is not None


def test_a_copy_continues_to_the_same_bits_and_bind_rolls_back():
    model, step, start = donated()
    torch.manual_seed(5)
    batches = [vectors() for _ in range(6)]
    state = start
    for batch in batches[:3]:
        state, _ = step(state, batch)
    kept = ll.copy_state(state)
    for batch in batches[3:]:
        state, _ = step(state, batch)
    end = bits(state)
    for _ in range(2):
        again = ll.bind(model, kept)
        with pytest.raises(ll.DonatedStateError, match=r"ll.bind\(model, state\) has written"):
            _ = state.params
        assert again.params["0.weight"] is model[0].weight
        for batch in batches[3:]:
            again, _ = step(again, batch)
        assert bits(again) == end
        state = again
    unbound = kept
    for batch in batches[3:]:
        unbound, _ = step(unbound, batch)
    assert bits(unbound) == end


def test_donated_steps_write_in_place():
    model, step, state = donated()
    addresses = [p.data_ptr() for p in model.parameters()]
    moments = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(state.opt_state)]
    for _ in range(3):
        state, _ = step(state, vectors())
    assert [state.params[name].data_ptr() for name, _ in model.named_parameters()] == addresses
    assert [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(state.opt_state)] == moments


@pytest.mark.slow
def test_tensors_of_a_finished_run_are_freed_at_once():
    import gc
    import weakref

    _, step, state = donated()
    state = ll.copy_state(state)
    for _ in range(3):
        state, metrics = step(state, vectors())
    held = [weakref.ref(leaf) for leaf in torch.utils._pytree.tree_leaves(state) if leaf is not None]
    gc.collect()
    gc.disable()
    try:
        del state, metrics
        assert [ref() for ref in held if ref() is not None] == []
    finally:
        gc.enable()


# Wrapped modules


def test_ddp_runs_bound_and_donated_and_is_refused_otherwise(one_process):
    model, loss_fn, batches = make("batch_norm", 5)
    plain = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    raw_loop(plain, loss_fn, batches, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    adamw = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    state = ll.init_state(wrapped, adamw)
    assert list(state.params) == [name for name, _ in plain.named_parameters()]
    grad_fn = ll.make_grad_fn(wrapped, loss_fn)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel works on the module's own.*donate=True"):
        ll.make_train_step(grad_fn, adamw)(state, batches[0])
    step = ll.make_train_step(grad_fn, adamw, donate=True)
    with pytest.raises(RuntimeError, match=r"bound state"):
        step(ll.copy_state(state), batches[0])
    for batch in batches:
        state, _ = step(state, batch)
    assert bits(state.params) == bits(dict(plain.named_parameters()))
    assert bits(state.buffers) == bits(dict(plain.named_buffers()))


def test_names_are_the_innermost_modules_own():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = [name for name, _ in plain.named_parameters()]
    assert list(ll.init_state(torch.compile(plain)).params) == names
    nested = nn.Sequential(torch.compile(plain[0]), checkpoint_wrapper(plain[1]))
    assert list(ll.init_state(nested).params) == names


# Refusals


class Output:
    loss = torch.zeros(())


class Unlabeled:
    loss = None


LOSSES = [
    (lambda model, x: model(x), ValueError, r"\(12, 4\).*loss\.mean\(\)"),
    (lambda model, x: model(x).sum().item(), TypeError, "float"),
    (lambda model, x: (model(x).sum(), model(x)), TypeError, "Tensor, Tensor"),
    (lambda model, x: x.sum(), ValueError, "trainable parameter"),
    (lambda model, x: ll.Mean(model(x).sum(), x[:, 0]), ValueError, r"weight.*\(12,\)"),
    (lambda model, x: (model(x).sum(), {"logits": model(x)}), ValueError, r"'logits'.*\(12, 4\)"),
    (lambda model, x: (model(x).sum(), {"loss": 1.0}), ValueError, 'aux.*"loss"'),
    (lambda model, x: Output(), TypeError, r"an Output.*return output\.loss$"),
    (lambda model, x: Unlabeled(), TypeError, r"return output\.loss, which is None here: without labels"),
    (lambda model, x: None, TypeError, "returned None.*return loss.*without labels"),
    (lambda model, x: {"loss": model(x).sum()}, TypeError, 'a dict.*return loss, {"name": value}'),
]


@both_steps
def test_bad_losses_are_named_and_leave_the_state(donate):
    model, _, [(x, _)] = make("mlp", 1)
    state = ll.init_state(model, SGD)
    before = bits(state)
    for loss_fn, error, words in LOSSES:
        with pytest.raises(error, match=words):
            step_of(model, SGD, donate, loss_fn)(state, x)
    model[0].unused = nn.Linear(3, 2)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).sum()), SGD, donate=donate)
    with pytest.raises(
        ValueError, match=r"0\.unused\.weight, 0\.unused\.bias.*make_grad_fn\(\.\.\., allow_unused=True\)"
    ):
        step(ll.init_state(model, SGD), x)
    assert bits(state) == before


def stepped(model, state, batch=None):
    return step_of(model, SGD, loss_fn=classify)(state, vectors() if batch is None else batch)


def eval_of(model, metrics, batch=None):
    eval_step = ll.make_eval_step(model, lambda model, batch: metrics(model(batch[0])))
    return eval_step(ll.init_state(model), batch or vectors())


NARROW, WIDE = nn.Sequential(nn.Linear(16, 4)), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
FAR = torch.zeros(4, 16, device="meta"), torch.zeros(4, dtype=torch.long)
REFUSED = [
    (lambda m: stepped(m, ll.init_state(m, SGD), FAR), RuntimeError, "device cpu .* device meta"),
    (lambda m: eval_of(m, lambda logits: {}, FAR), RuntimeError, "device cpu .* device meta"),
    (lambda m: stepped(m, ll.init_state(NARROW, SGD)), ValueError, r"Sequential.*'2\.bias', '2\.weight'"),
    (lambda m: stepped(m, ll.init_state(WIDE, SGD)), ValueError, r"0\.weight.*\(64, 16\).*\(32, 16\)"),
    (lambda m: ll.bind(m, ll.init_state(WIDE)), ValueError, r"0\.weight.*\(64, 16\)"),
    (lambda m: stepped(m, {}), TypeError, "dict.*TrainState.*in this order: state, metrics"),
    (lambda m: ll.make_grad_fn(m, classify, trainable=lambda name, tensor: False), ValueError, "none"),
    (lambda m: ll.init_state(nn.Sequential(nn.LazyLinear(3))), ValueError, "weight.*lazy"),
    (
        lambda m: ll.init_state(copy.deepcopy(m).to("meta"), SGD),
        ValueError,
        r"0\.weight.* on the meta device.*device_map",
    ),
    (
        lambda m: eval_of(copy.deepcopy(m).to("meta"), lambda logits: {}),
        ValueError,
        r"0\.weight.* on the meta device.*device_map",
    ),
    (lambda m: eval_of(m, lambda logits: logits), ValueError, r"'loss'.*\(12, 4\)"),
    (lambda m: eval_of(m, lambda logits: (logits, logits)), TypeError, r"tuple.*\(loss, aux\)"),
    (lambda m: eval_of(m, lambda logits: {"logits": logits}), ValueError, r"'logits'.*\(12, 4\)"),
]


def test_wrong_parts_are_named():
    model, _, _ = make("mlp", 1)
    for batch, words in ((None, "samples in a NoneType"), (torch.ones(()), r"tensor of shape \(\): .*ll\.Mean")):
        with pytest.raises(TypeError, match=words):
            step_of(model, SGD, loss_fn=classify)(ll.init_state(model, SGD), batch)
    for call, error, words in REFUSED:
        with pytest.raises(error, match=words):
            call(model)


# Evaluation


def test_an_eval_step_takes_a_loss_function_as_well():
    model, _, (batch,) = make("mlp", 1)
    state = ll.init_state(model)
    loss = classify(model, batch).item()
    count = ll.Mean(3, 2)
    for function, expected in (
        (classify, {"loss": loss}),
        (lambda model, batch: ll.Mean(classify(model, batch) * 6, 2), {"loss": 3 * loss}),
        (lambda model, batch: (classify(model, batch), {"count": count}), {"loss": loss, "count": 1.5}),
    ):
        assert ll.evaluate(ll.make_eval_step(model, function), state, [batch]) == pytest.approx(expected)


def test_evaluation_is_in_eval_mode_with_the_states_values():
    model, _, batches = make("batch_norm", 4)
    twin = copy.deepcopy(model).eval()
    state = ll.copy_state(ll.init_state(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    predict_step = ll.make_predict_step(model, lambda model, batch: model(batch[0]))
    with torch.no_grad():
        assert torch.equal(predict_step(state, batches[0]), twin(batches[0][0]))
    assert not predict_step(state, batches[0]).requires_grad
    assert model.training


# Layers that run for the first time after many steps


class Conditional(nn.Module):
    """A batch norm that some batches go through, and a large table that they write."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)
        self.register_buffer("table", torch.zeros(100_000))

    def forward(self, x, through):
        y = self.linear(x)
        if through:
            y = self.norm(y)
            self.table += 1
        return y


def conditional_loss(model, batch):
    x, through, fails = batch
    loss = model(x, through).square().mean() * x.sum()
    if fails:
        raise ArithmeticError("the loss fails after its forward pass")
    return loss


def conditional_step():
    model = Conditional()
    optimizer = ll.chain(ll.skip_nonfinite(max_consecutive=5), ll.optimizer(torch.optim.SGD, lr=0.01))
    step = step_of(model, optimizer, True, conditional_loss)
    state = ll.init_state(model, optimizer)
    for _ in range(3):
        state, _ = step(state, (torch.rand(5, 4), False, False))
    return step, state


@pytest.mark.parametrize("how", ["skipped", "failed"])
def test_a_layer_that_first_runs_in_a_step_that_is_not_made_is_put_back(how):
    step, state = conditional_step()
    before = bits(state.buffers)
    if how == "skipped":
        bad = torch.rand(5, 4)
        bad[0, 0] = math.inf
        state, _ = step(state, (bad, True, False))
        assert state.skipped
    else:
        with pytest.raises(ArithmeticError):
            step(state, (torch.rand(5, 4), True, True))
        assert all(parameter.grad is None for parameter in state.params.values())
    assert bits(state.buffers) == before
    kept = state
    state, _ = step(state, (torch.rand(5, 4), True, False))
    assert state.buffers["norm.num_batches_tracked"] == 1
    assert state.buffers["table"][0] == 1
    with pytest.raises(ll.DonatedStateError, match=r"the state at step 3 .* its buffers"):
        _ = kept.buffers


class Outputs(collections.UserDict):
    pass


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.scale * x


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("donate", [True, False])
def test_metrics_and_outputs_keep_their_values_when_later_steps_write_the_tensors(donate, copied):
    def metrics_of(model, x):
        calls = model.calls
        return {"view": model.scale[0], "detached": model.scale.detach(), "calls": calls, "mean": ll.Mean(calls, 1)}

    def loss_fn(model, x):
        return model(x).square().mean(), metrics_of(model, x)

    model, x = Scaled(), torch.ones(2)
    step = step_of(model, SGD, donate, loss_fn)
    eval_step = ll.make_eval_step(model, metrics_of)
    predict_step = ll.make_predict_step(
        model, lambda model, x: Outputs(view=model.scale[:], detached=model.scale.detach(), itself=model.scale)
    )
    state, kept = ll.init_state(model, SGD), []
    state = ll.copy_state(state) if copied else state
    for count in range(1, 5):
        scale, of_state = state.params["scale"].item(), (eval_step(state, x), predict_step(state, x))
        state, metrics = step(state, x)
        kept.append((scale, count, metrics, *of_state))
    for scale, count, metrics, scores, outputs in kept:
        values = {"view": scale, "detached": scale, "calls": count, "mean": count}
        assert ll.compute(metrics) == values | {"loss": pytest.approx(scale**2)}
        assert ll.compute(scores) == values | {"calls": count - 1, "mean": count - 1}
        assert type(outputs) is Outputs
        assert [(output.item(), output.requires_grad) for output in outputs.values()] == [(scale, False)] * 3


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["donated", "pure", "gradients", "predict"])
def test_a_step_whose_loss_donates_its_state_to_another_step_is_refused(kind):
    """As when another thread takes the state meanwhile."""
    model = nn.Linear(2, 1)

    def square(model, x):
        return model(x).square().mean()

    inner = step_of(model, SGD, True, square)
    state, x = ll.init_state(model, SGD), torch.ones(3, 2)

    def trains_itself(model, x):
        inner(state, x)
        return square(model, x)

    call = {
        "donated": step_of(model, SGD, True, trains_itself),
        "pure": step_of(model, SGD, False, trains_itself),
        "gradients": ll.make_grad_fn(model, trains_itself),
        "predict": ll.make_predict_step(model, trains_itself),
    }[kind]
    with pytest.raises(ll.DonatedStateError, match="that run is at step 1 now"):
        call(state, x)


@both_steps
def test_an_update_may_ask_for_the_loss_and_the_gradients_at_other_parameters(donate):
    def update_(grads, opt_state, params, step, *, evaluate):
        loss, there = evaluate({"weight": params["weight"] + 1})
        return {name: params[name] - 0.1 * grad for name, grad in there.items()}, {"loss": loss}

    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    optimizer = ll.optim.part("ahead", init=lambda params: {"loss": torch.zeros(())}, update_=update_, role="weights")
    state = ll.init_state(model, optimizer)
    moved = {"weight": model.weight.detach() + 1, "bias": model.bias.detach()}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in moved.items()}
    loss = torch.func.functional_call(model, leaves, x).square().mean()
    loss.backward()
    expected = {name: param.detach() - 0.1 * leaves[name].grad for name, param in model.named_parameters()}
    grad_fn = ll.make_grad_fn(model, mean_square)
    state, _ = ll.make_train_step(grad_fn, optimizer, donate=donate)(state, x)
    torch.testing.assert_close({name: param.detach() for name, param in state.params.items()}, expected)
    assert state.opt_state["ahead"]["loss"] == loss


def test_an_expanded_buffer_is_no_matter_to_a_skipped_donated_step():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model.register_buffer("ones", torch.ones(1).expand(3))
    optimizer = ll.chain(ll.skip_nonfinite(), SGD)
    step = step_of(model, optimizer, True, mean_output)
    state, _ = step(ll.init_state(model, optimizer), torch.full((4, 2), math.nan))
    assert state.skipped
    assert model[0].running_mean.tolist() == [0, 0]


def test_a_loss_function_in_place_of_a_gradient_function_is_named_at_its_first_call():
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    state = ll.init_state(model, SGD)
    for loss_fn in (lambda model, batch, **more: model(batch).mean(), lambda *args, **more: torch.tensor(1.0)):
        for donate in (False, True):
            with pytest.raises(TypeError) as error:
                ll.make_train_step(loss_fn, SGD, donate=donate)(state, x)
            said = [str(error.value), *getattr(error.value, "__notes__", [])]
            assert any(
                "write ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)" in line for line in said
            )
    ll.make_train_step(ll.make_grad_fn(model, lambda model, batch: model(batch).mean()), SGD)(state, x)
