"""Steps against the raw loop: the same bits, and nothing left behind."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from shared import bits, mix
from torch import nn
from torch.utils.checkpoint import checkpoint

import looplib as ll

STEPS = 100


class Block(nn.Module):
    def __init__(self, width, heads, recompute):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))
        self.recompute = recompute

    def forward(self, x):
        return checkpoint(self.whole, x, use_reentrant=False) if self.recompute else self.whole(x)

    def whole(self, x):
        h = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TiedTransformer(nn.Module):
    def __init__(self, vocabulary=30, width=16, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width, 2, recompute) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(32))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens) + self.positions[: tokens.shape[1], None] / 32))


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


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


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


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), classify, vectors),
    "batch_norm": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)),
        classify,
        vectors,
    ),
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


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("case", CASES)
def test_100_steps_have_the_bits_of_the_raw_loop(case, donate, bound):
    model, loss_fn, batches = make(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = raw_loop(model, loss_fn, batches, optimizer)

    ours, loss_fn, batches = make(case)
    adamw = ll.optimizer(torch.optim.AdamW, lr=3e-3)
    step = ll.make_train_step(ll.make_grad_fn(ours, loss_fn), adamw, donate=donate)
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
    moments = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    assert bits(state.opt_state["state"]) == bits(moments)
    assert state.step == STEPS
    assert state.samples == STEPS * len(batches[0][0] if isinstance(batches[0], tuple) else batches[0])
    if donate and bound:
        assert all(state.params[name] is p for name, p in ours.named_parameters())


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-3}),
    "SGD_plain": (torch.optim.SGD, {"lr": 0.05}),
    "SGD_nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adam_amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    **{
        name: (getattr(torch.optim, name), {"lr": 1e-2})
        for name in (
            *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
            *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
        )
    },
    "RMSprop_centered": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2}),
}


def test_every_optimizer_of_torch_is_compared_with_the_raw_loop():
    public = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    elsewhere = {"LBFGS", "SparseAdam"}  # refused; on sparse gradients in test_optimizer.py
    assert public == {cls.__name__ for cls, _ in OPTIMIZERS.values()} | elsewhere


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_raw_loop(name, donate):
    cls, hyperparameters = OPTIMIZERS[name]
    build = (
        (lambda: nn.Sequential(nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)))
        if (name == "Muon")
        else CASES["batch_norm"][0]
    )
    _, loss_fn, batches = make("mlp", 40)
    torch.manual_seed(0)
    model = build()
    ours = copy.deepcopy(model)
    flags = dict(hyperparameters)
    if cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad) and "foreach" not in flags:
        flags["fused"] = True  # what ll.optimizer chooses
    raw = cls(model.parameters(), **flags)
    losses = raw_loop(model, loss_fn, batches, raw)

    pure = ll.optimizer(cls, **hyperparameters)
    step = ll.make_train_step(ll.make_grad_fn(ours, loss_fn), pure, donate=donate)
    state = ll.init_state(ours, pure)
    structure = bits(state.opt_state)[1]
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(ll.compute(metrics)["loss"])
    assert found == losses
    assert bits(state.params) == bits(dict(model.named_parameters()))
    kept = {key: {k: v for k, v in raw.state[p].items() if v is not None} for key, p in model.named_parameters()}
    assert bits(state.opt_state["state"]) == bits(kept)
    assert bits(state.opt_state)[1] == structure, "the structure of opt_state must not change on the way"


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


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize("case", CASES)
def test_a_pure_step_leaves_everything_and_repeats(case, bound):
    model, loss_fn, batches = make(case, 3)
    adamw = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), adamw)
    start = ll.init_state(model, adamw, seed=5)
    if not bound:
        start, _ = step(start, batches[0])  # moments that are not zero
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
    with torch.no_grad():
        second, second_metrics = step(start, batches[1])
    assert bits(second) == bits(first)
    assert bits(second_metrics) == bits(first_metrics)


def test_a_pure_step_shares_parameters_that_it_does_not_change():
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    model[0].bias.requires_grad_(False)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    start = ll.init_state(model, sgd)
    state, _ = ll.make_train_step(ll.make_grad_fn(model, classify), sgd)(start, vectors())
    assert state.params["0.bias"] is start.params["0.bias"]
    for name, buffer in start.buffers.items():
        assert state.buffers[name] is not buffer
    assert torch.equal(state.buffers["mask"], start.buffers["mask"])


def test_trainable_subset_and_frozen_parameters_equal_the_raw_loop():
    for donate in (False, True):
        model, loss_fn, batches = make("batch_norm", 30)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("4"))
        raw_loop(model, loss_fn, batches, torch.optim.Adam(model[4].parameters(), lr=1e-2, fused=True))

        adam = ll.optimizer(torch.optim.Adam, lr=1e-2)
        for chosen in (None, lambda name, tensor: name.startswith("4")):
            ours, loss_fn, batches = make("batch_norm", 30)
            if chosen is None:
                for name, parameter in ours.named_parameters():
                    parameter.requires_grad_(name.startswith("4"))
            step = ll.make_train_step(ll.make_grad_fn(ours, loss_fn, trainable=chosen), adam, donate=donate)
            state = ll.init_state(ours, adam, trainable=chosen)
            assert set(state.opt_state["state"]) == {"4.weight", "4.bias"}
            flags = [p.requires_grad for p in ours.parameters()]
            for batch in batches:
                state, _ = step(state, batch)
            assert bits(state.params) == bits(dict(model.named_parameters()))
            assert bits(state.buffers) == bits(dict(model.named_buffers()))
            assert [p.requires_grad for p in ours.parameters()] == flags


def test_submodules_in_eval_mode_stay_so_and_a_pretrained_model_trains():
    model, loss_fn, batches = make("batch_norm", 10)
    ours = copy.deepcopy(model)
    model[1].eval()
    ours[1].eval()
    raw_loop(model, loss_fn, batches, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(ours, loss_fn), sgd)
    ours.eval()  # as an evaluation by hand leaves it
    state = ll.init_state(ours, sgd)
    for batch in batches:
        state, _ = step(state, batch)
    assert bits(state.params) == bits(dict(model.named_parameters()))
    assert not torch.any(state.buffers["1.num_batches_tracked"])

    whole, loss_fn, batches = make("batch_norm", 1)
    with pytest.warns(UserWarning, match="whole Sequential is in eval mode"):
        step = ll.make_train_step(ll.make_grad_fn(whole.eval(), loss_fn), sgd)  # as from_pretrained hands it out
    state, _ = step(ll.init_state(whole, sgd), batches[0])
    assert state.buffers["1.num_batches_tracked"] == 1


def test_unused_parameters_are_named_or_left_as_the_raw_loop_leaves_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Two()
    ours = copy.deepcopy(model)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)
    state = ll.init_state(ours, adamw)
    batch = vectors()
    before = bits(state)
    with pytest.raises(ValueError, match=r"no gradient reached unused\.weight, unused\.bias.*allow_unused=True"):
        ll.make_train_step(ll.make_grad_fn(ours, classify), adamw, donate=True)(state, batch)
    assert bits(state) == before
    raw_loop(model, classify, [batch] * 5, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    for donate in (False, True):
        step = ll.make_train_step(ll.make_grad_fn(ours, classify, allow_unused=True), adamw, donate=donate)
        run = ll.copy_state(state)
        for _ in range(5):
            run, _ = step(run, batch)
        assert bits(run.params) == bits(dict(model.named_parameters()))
        assert run.opt_state["state"]["unused.weight"]["step"] == 0


def test_mean_losses_and_aux_are_recorded():
    model, _, batches = make("mlp", 1)

    def loss_fn(model, batch):
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        valid = y != 0
        return ll.Mean((losses * valid).sum(), valid.sum()), {
            "accuracy": ll.Mean((model(x).argmax(1) == y).sum(), len(y)),
            "largest": losses.max(),
        }

    x, y = batches[0]
    out = ll.make_grad_fn(model, loss_fn)(ll.init_state(model), batches[0])
    loss = F.cross_entropy(model(x)[y != 0], y[y != 0])
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(out.grads[name], parameter.grad)
    values = ll.compute(out.metrics)
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert values["accuracy"] == pytest.approx((model(x).argmax(1) == y).float().mean().item())
    assert not any(
        leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(out.metrics) if torch.is_tensor(leaf)
    )
    with torch.no_grad():
        assert values["largest"] == F.cross_entropy(model(x), y, reduction="none").max().item()


def test_counts_follow_batches_epochs_and_samples():
    model, loss_fn, _ = make("mlp", 1)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), sgd)
    state = ll.init_state(model, sgd, epoch_length=3)
    seen = []
    for size in (5, 5, 2, 5, 5, 2, 5):
        state, _ = step(state, (torch.randn(size, 16), torch.zeros(size, dtype=torch.long)))
        seen.append((state.step, state.epoch, state.batch, state.samples, state.batch_samples))
    assert seen == [
        (i + 1, (i + 1) // 3, (i + 1) % 3, sum((5, 5, 2, 5, 5, 2, 5)[: i + 1]), (5, 5, 2, 5, 5, 2, 5)[i])
        for i in range(7)
    ]


# Donation


def donated(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.register_buffer("table", torch.randn(3))
    model[0].bias.requires_grad_(False)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, classify), adamw, donate=True)
    return model, step, ll.init_state(model, adamw)


def test_a_spent_state_says_what_took_it():
    _, step, start = donated()
    one, _ = step(start, vectors())
    two, _ = step(one, vectors())
    for spent in (start, one):
        for field in ("params", "opt_state"):
            with pytest.raises(
                ll.DonatedStateError, match=rf"{field} of the state at step {spent.step} .*step 2 now"
            ):
                getattr(spent, field)
        with pytest.raises(ll.DonatedStateError, match=r"copy it first \(kept = ll.copy_state\(state\)\)"):
            step(spent, vectors())
        with pytest.raises(ll.DonatedStateError):
            spent.replace(step=9)
        with pytest.raises(ll.DonatedStateError):
            torch.utils._pytree.tree_map(lambda leaf: leaf, spent)
        assert "donated" in repr(spent)
        assert spent.step == (0 if spent is start else 1)  # counts can still be read
    assert two.params is not None


def test_what_the_step_does_not_write_stays_good():
    _, step, start = donated()
    state, _ = step(start, vectors())
    frozen = state.params["0.bias"].clone()
    share = ll.TrainState(
        params={"0.bias": state.params["0.bias"]}, buffers={"table": state.buffers["table"]}, extra=state.samples
    )
    running = ll.TrainState(buffers={"mean": state.buffers["1.running_mean"]})
    kept = ll.copy_state(state)
    state, _ = step(state, vectors())
    state, _ = step(state, vectors())
    assert torch.equal(share.params["0.bias"], frozen)
    assert share.buffers["table"].shape == (3,)
    with pytest.raises(ll.DonatedStateError):
        _ = running.buffers
    assert kept.params.keys() == state.params.keys()


def test_two_runs_that_are_donated_side_by_side_do_not_disturb_each_other():
    _, step_a, a = donated(0)
    _, step_b, b = donated(1)
    _, alone, c = donated(0)
    torch.manual_seed(5)
    batches = [vectors() for _ in range(6)]
    for batch in batches:
        a, _ = step_a(a, batch)
        a = a.replace(extra={"seen": a.step})
        b, _ = step_b(b.replace(extra=a.extra), batch)
        c, _ = alone(c, batch)
    assert bits(a.params) == bits(c.params)
    assert b.extra == a.extra


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


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_step_that_fails_leaves_the_state_as_it_was(donate):
    model, loss_fn, batches = make("batch_norm", 2)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)

    def fails(model, batch):
        loss = loss_fn(model, batch)
        if batch is batches[1]:
            raise ArithmeticError("from within")
        return loss

    step = ll.make_train_step(ll.make_grad_fn(model, fails), adamw, donate=donate)
    state, _ = step(ll.init_state(model, adamw), batches[0])
    before = bits(state)
    with pytest.raises(ArithmeticError, match="from within"):
        step(state, batches[1])
    assert bits(state) == before
    assert all(p.grad is None for p in model.parameters())


# Wrapped modules


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_runs_bound_and_donated_and_is_refused_otherwise(process_group):
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


# Bad input


def test_bad_losses_are_named():
    model, _, batches = make("mlp", 1)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, sgd)

    def step_with(loss_fn):
        return ll.make_train_step(ll.make_grad_fn(model, loss_fn), sgd)(state, batches[0])

    with pytest.raises(ValueError, match=r"loss has shape \(12, 4\).*loss\.mean\(\)"):
        step_with(lambda model, batch: model(batch[0]))
    with pytest.raises(TypeError, match=r"loss_fn returned a float"):
        step_with(lambda model, batch: model(batch[0]).sum().item())
    with pytest.raises(TypeError, match=r"loss_fn returned a tuple of Tensor, Tensor"):
        step_with(lambda model, batch: (model(batch[0]).sum(), model(batch[0])))
    with pytest.raises(ValueError, match=r"does not depend on any trainable parameter"):
        step_with(lambda model, batch: batch[0].sum())
    with pytest.raises(ValueError, match=r"'logits' has shape \(12, 4\)"):
        step_with(lambda model, batch: (model(batch[0]).sum(), {"logits": model(batch[0])}))
    with pytest.raises(ValueError, match=r'aux of loss_fn has a "loss"'):
        step_with(lambda model, batch: (model(batch[0]).sum(), {"loss": 1.0}))

    class Output:
        loss = torch.zeros(())

    with pytest.raises(TypeError, match=r"returned a Output.*return output\.loss"):
        step_with(lambda model, batch: Output())


def test_a_batch_on_another_device_is_named():
    model, _loss_fn, _ = make("mlp", 1)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, sgd)
    batch = {"x": torch.zeros(4, 16, device="meta"), "y": torch.zeros(4, dtype=torch.long)}
    for step in (
        ll.make_train_step(ll.make_grad_fn(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])), sgd),
        ll.make_eval_step(model, lambda m, b: {"loss": F.cross_entropy(m(b["x"]), b["y"])}),
    ):
        with pytest.raises(ValueError, match=r"batch\['x'\] is on meta, and the parameters are on cpu: move"):
            step(state, batch)


def test_a_state_of_another_model_is_named():
    model, loss_fn, batches = make("mlp", 1)
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), sgd)
    other = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(ValueError, match=r"not those of this Sequential: missing \['2\.bias', '2\.weight'\]"):
        step(ll.init_state(other, sgd), batches[0])
    wider = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with pytest.raises(ValueError, match=r"0\.weight has shape \(64, 16\), the model's has \(32, 16\)"):
        step(ll.init_state(wider, sgd), batches[0])
    with pytest.raises(ValueError, match=r"0\.weight has shape \(64, 16\)"):
        ll.bind(model, ll.init_state(wider))
    with pytest.raises(TypeError, match=r"state is a dict; give a TrainState"):
        step({}, batches[0])


def test_wrong_parts_are_named():
    model, loss_fn, _ = make("mlp", 1)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    instance = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer is a SGD; give what ll\.optimizer returns"):
        ll.make_train_step(grad_fn, instance)
    with pytest.raises(TypeError, match=r"optimizer is an instance of SGD; init_state needs what ll\.optimizer"):
        ll.init_state(model, instance)
    with pytest.raises(TypeError, match=r"grad_fn is a Sequential; give ll\.make_grad_fn"):
        ll.make_train_step(model, ll.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(TypeError, match=r"make_grad_fn takes the model first: write make_grad_fn\(model, loss_fn\)"):
        ll.make_grad_fn(loss_fn, model)
    with pytest.raises(ValueError, match=r"chose none"):
        ll.make_grad_fn(model, loss_fn, trainable=lambda name, tensor: False)
    with pytest.raises(ValueError, match=r"weight has no shape yet \(a lazy module\)"):
        ll.init_state(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(TypeError, match=r"cannot count the samples in a NoneType"):
        ll.make_train_step(grad_fn, ll.optimizer(torch.optim.SGD, lr=0.1))(
            ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1)), None
        )


# Evaluation


def test_evaluation_leaves_training_as_it_was():
    def train(evaluating):
        model, loss_fn, batches = make("batch_norm", 20)
        adamw = ll.optimizer(torch.optim.AdamW, lr=1e-2)
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), adamw, donate=True)

        def metric_fn(model, batch):
            torch.rand(3)
            model[1].running_mean.add_(1)  # a metric that misbehaves
            return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

        eval_step = ll.make_eval_step(model, metric_fn)
        state = ll.init_state(model, adamw)
        for batch in batches:
            state, _ = step(state, batch)
            if evaluating:
                before = everything(model, state, batch)
                ll.evaluate(
                    eval_step, state, torch.utils.data.DataLoader(list(zip(*batches[0], strict=True)), shuffle=True)
                )
                assert everything(model, state, batch) == before
        return bits(state)

    assert train(True) == train(False)


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


@pytest.mark.parametrize("size", [1, 3, 7, 10, 11])
def test_evaluation_is_exact_for_sets_that_no_batch_size_divides(size):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(10, 4, dtype=torch.double), torch.randint(0, 3, (10,))
    eval_step = ll.make_eval_step(
        model,
        lambda model, batch: {
            "loss": F.cross_entropy(model(batch[0]), batch[1]),
            "accuracy": ll.Mean((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])),
        },
    )
    found = ll.evaluate(
        eval_step, ll.init_state(model), list(zip(x.split(size), y.split(size), strict=True)), prefix="eval/"
    )
    with torch.no_grad():
        # Sums of up to ten terms in another order: a few units in the last place.
        assert math.isclose(found["eval/loss"], F.cross_entropy(model(x), y).item(), rel_tol=1e-15 * 10)
        assert found["eval/accuracy"] == (model(x).argmax(1) == y).double().mean().item()


def test_bad_evaluations_are_named():
    model, _, batches = make("mlp", 1)
    state = ll.init_state(model)
    with pytest.raises(ValueError, match=r"evaluate got no batches"):
        ll.evaluate(ll.make_eval_step(model, lambda m, b: {}), state, [])
    with pytest.raises(TypeError, match=r"metric_fn returned a Tensor; return a dict"):
        ll.make_eval_step(model, lambda m, b: m(b[0]))(state, batches[0])
    with pytest.raises(ValueError, match=r"'logits' has shape \(12, 4\)"):
        ll.make_eval_step(model, lambda m, b: {"logits": m(b[0])})(state, batches[0])


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
    optimizer = ll.optim.apply_if_finite(ll.optimizer(torch.optim.SGD, lr=0.01), max_consecutive=5)
    step = ll.make_train_step(ll.make_grad_fn(model, conditional_loss), optimizer, donate=True)
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
    assert bits(state.buffers) == before
    kept = state
    state, _ = step(state, (torch.rand(5, 4), True, False))
    assert state.buffers["norm.num_batches_tracked"] == 1
    assert state.buffers["table"][0] == 1
    with pytest.raises(ll.DonatedStateError, match="buffers of the state at step 3"):
        _ = kept.buffers


def test_a_parameter_or_a_buffer_among_the_metrics_keeps_the_value_of_its_step():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.scale * x

    def loss_fn(model, x):
        loss = model(x).square().mean()
        scale, calls = model.scale, model.calls
        return loss, {
            "parameter": scale,
            "view": scale[0],
            "detached": scale.detach(),
            "calls": calls,
            "mean": ll.Mean(calls, 1),
        }

    found = []
    for donate in (False, True):
        model, optimizer = Scaled(), ll.optimizer(torch.optim.SGD, lr=0.1)
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
        state, metrics = ll.init_state(model, optimizer), []
        for _ in range(3):
            state, of_step = step(state, torch.ones(2))
            metrics.append(of_step)
        found.append([ll.compute(of_step) for of_step in metrics])
    assert found[0] == found[1]
    assert [row["calls"] for row in found[0]] == [1, 2, 3]
    assert len({row["view"] for row in found[0]}) == 3


def test_what_steps_return_of_a_state_stays_when_a_donated_step_spends_it():
    model, optimizer = nn.Linear(3, 2), ll.optimizer(torch.optim.SGD, lr=0.1)

    def metrics_of(model, x):
        return {"corner": model.weight[0, 0], "mean": ll.Mean(model.bias[1], 1), "out": model(x).mean()}

    grad_fn = ll.make_grad_fn(model, lambda model, x: (model(x).mean(), metrics_of(model, x)))
    pure, donated = (ll.make_train_step(grad_fn, optimizer, donate=donate) for donate in (False, True))
    eval_step = ll.make_eval_step(model, metrics_of)
    predict_step = ll.make_predict_step(model, lambda model, x: {"rows": [model.weight[:, 0], model.bias.detach()]})
    state, x = ll.init_state(model, optimizer), torch.ones(2, 3)
    for _ in range(2):
        of_step, of_eval, rows = pure(state, x)[1], eval_step(state, x), predict_step(state, x)["rows"]
        before = ll.compute(of_step), ll.compute(of_eval), [row.tolist() for row in rows]
        state, _ = donated(state, x)
        assert (ll.compute(of_step), ll.compute(of_eval)) == before[:2]
        assert rows[0].tolist() == before[2][0]
    assert rows[1].tolist() == before[2][1]  # from the second step on, the run is known to own its memory


def test_the_first_donated_step_grows_with_the_tensors_and_not_with_their_square(monkeypatch):
    class Many(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])

        def forward(self, x):
            return torch.cat(list(self.weights)).sum() * x

    asked = 0
    storage = torch.Tensor.untyped_storage

    def counted(tensor):
        nonlocal asked
        asked += 1
        return storage(tensor)

    monkeypatch.setattr(torch.Tensor, "untyped_storage", counted)
    found = []
    for count in (50, 400):
        model, asked = Many(count), 0
        optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
        ll.make_train_step(grad_fn, optimizer, donate=True)(ll.init_state(model, optimizer), torch.ones(4))
        found.append(asked)
    assert found[1] <= 9 * found[0]


@pytest.mark.parametrize("donate", [False, True])
def test_a_metric_of_the_update_keeps_its_value_when_a_later_step_writes_the_optimizers_state(donate):
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)

    def init(params, **info):
        return {"inner_state": sgd.init(params, **info), "made": torch.zeros(())}

    def update_(grads, opt_state, params, step, **info):
        params, opt_state["inner_state"] = sgd.update_(grads, opt_state["inner_state"], params, step, **info)
        return params, opt_state, {"made": opt_state["made"].add_(1)}

    model = nn.Linear(2, 1)
    optimizer = ll.types.Optimizer(init, update_)
    train_step = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: model(x).mean()), optimizer, donate=donate
    )
    state, metrics = ll.init_state(model, optimizer), []
    for _ in range(3):
        state, of_step = train_step(state, torch.ones(4, 2))
        metrics.append(of_step)
    assert [ll.compute(of_step)["made"] for of_step in metrics] == [1, 2, 3]
