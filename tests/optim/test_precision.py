"""Loss scaling, autocast and master weights against torch's GradScaler and hand-written loops."""

import copy
import itertools
import re

import pytest
import schedulefree
import torch
from torch import nn
from torch.nn import functional as F

import looplib as ll

HALF = [torch.bfloat16, torch.float16]
WAYS = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(count, size=8):
    """Every 23rd batch is so large that float16 overflows at any scale that is above 1."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        x, y = torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)
        made.append((x * 1e9 if index % 23 == 22 else x, y))
    return made


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) + model(x).square().mean()


def in_float16(model, batch):
    with torch.autocast("cpu", torch.float16):
        return loss_fn(model, batch)


def rate(step):
    return 1 / (1 + 0.05 * step)


def same_tensors(one, two):
    one, two = (torch.utils._pytree.tree_leaves(tree) for tree in (one, two))
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


SCALES = {"init_scale": 2.0**14, "growth_interval": 4}
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"momentum": 0.9}), "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1})}


def raw_loop(name, data, pieces=1, **scales):
    """The loop of torch's AMP pages; gives the model and, after each step, scale, tracker and what was skipped."""
    model = net()
    cls, hyperparameters = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), lr=1e-2, fused=True, **hyperparameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", **{**SCALES, **scales})
    log = []
    for x, y in data:
        optimizer.zero_grad()
        for piece in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            scaler.scale(in_float16(model, piece) / pieces).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < before
        if not skipped:
            scheduler.step()
        log.append((scaler.get_scale(), scaler._get_growth_tracker(), skipped))
    return model, log


def scaled_step(name, donate, pieces=None):
    model = net()
    grad_fn = ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))
    grad_fn = ll.clip_by_global_norm(ll.grads.scale_loss(ll.accumulate(grad_fn, pieces) if pieces else grad_fn), 0.5)
    cls, hyperparameters = OPTIMIZERS[name]
    optimizer = ll.optimizer(cls, lr=lambda step: 1e-2 * rate(step), **hyperparameters)
    optimizer = ll.optim.dynamic_loss_scale(optimizer, **SCALES)
    return ll.make_train_step(grad_fn, optimizer, donate=donate), ll.init_state(model, optimizer)


def scale_and_tracker(state):
    return state.opt_state["loss_scale"].item(), state.opt_state["growth_tracker"].item()


@WAYS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_with_overflows_have_the_bits_of_grad_scaler(name, donate):
    data = batches(200)
    model, log = raw_loop(name, data)
    scales = [scale for scale, _, _ in log]
    skips = sum(skipped for _, _, skipped in log)
    grown = sum(after > before for before, after in itertools.pairwise(scales))
    assert min(skips, grown) >= 15, (skips, grown)

    train_step, state = scaled_step(name, donate)
    ours = []
    for batch in data:
        used = state.opt_state["loss_scale"].item()
        state, metrics = train_step(state, batch)
        assert ll.compute(metrics)["loss_scale"] == used
        ours.append((*scale_and_tracker(state), state.skipped))
    assert ours == log
    assert (state.step, state.batch) == (200 - skips, 200)
    assert same_tensors(state.params, dict(model.named_parameters()))


@WAYS
@pytest.mark.parametrize("pieces", [[20, 7, 5], [1] * 32])
def test_accumulation_of_ragged_pieces_within_scale_loss_is_the_whole_batchs_gradient(pieces, donate):
    model, (batch,) = net(), batches(1, size=32)
    optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1), init_scale=2.0**10)
    state = ll.init_state(model, optimizer)
    grad_fn = ll.grads.scale_loss(ll.accumulate(ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))))
    parts = list(zip(*(tensor.split(pieces) for tensor in batch), strict=True))
    grads = grad_fn(state, parts, ll.types.GradRequest(donate=donate)).grads
    whole = net().double()
    loss_fn(whole, (batch[0].double(), batch[1])).backward()
    for name, p in whole.named_parameters():
        # float16 keeps 11 bits, and the errors of 32 examples do not all have one sign.
        assert (grads[name].double() - p.grad).norm() < 2**-9 * p.grad.norm()


@pytest.mark.parametrize("donate", [False, True])
def test_a_scale_that_cannot_be_the_cause_ends_the_run(donate):
    optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1), init_scale=4.0, min_scale=1.0)
    train_step = ll.make_train_step(
        ll.grads.scale_loss(ll.make_grad_fn(model := net(), loss_fn)), optimizer, donate=donate
    )
    state, (x, y) = ll.init_state(model, optimizer), batches(1)[0]
    state, _ = train_step(state, (x, y))
    bad = (x * torch.nan, y)
    for scale in (2.0, 1.0):
        state, _ = train_step(state, bad)
        assert state.opt_state["loss_scale"] == scale
    kept = ll.copy_state(state)
    message = (
        r"not finite at step 1 though the loss scale is down to 1\.0 \(min_scale=1\.0\).*lower the learning rate"
    )
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=message):
        train_step(state, bad)
    assert same_tensors((state.params, state.opt_state), (kept.params, kept.opt_state))
    state, _ = train_step(state, (x, y))
    assert state.step == 2


def test_arguments_of_the_loss_scale_are_checked():
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    for wrong in (
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"min_scale": 0.0},
        {"init_scale": 1e-5},
        {"init_scale": float("nan")},
    ):
        (name, value), *_ = wrong.items()
        with pytest.raises(ValueError, match=re.escape(f"{name}={value}") + ".*growth is above 1"):
            ll.optim.dynamic_loss_scale(sgd, **wrong)
    with pytest.raises(TypeError, match="got a SGD"):
        ll.optim.dynamic_loss_scale(torch.optim.SGD(net().parameters(), lr=0.1))


def test_scale_loss_in_a_wrong_place_is_refused():
    grad_fn = ll.make_grad_fn(model := net(), loss_fn)
    batch = batches(1)[0]
    plain = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(
        ValueError, match=r"no loss scale in the state: wrap the optimizer.*ll\.optim\.dynamic_loss_scale"
    ):
        ll.grads.scale_loss(grad_fn)(plain, batch)
    with pytest.raises(ValueError, match="no loss scale in the state"):
        ll.grads.scale_loss(grad_fn)(ll.init_state(model), batch)
    scaled = ll.init_state(model, ll.ema(ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1))))
    with pytest.raises(ValueError, match="scale_loss within scale_loss: once is enough"):
        ll.grads.scale_loss(ll.grads.scale_loss(grad_fn))(scaled, batch)
    with pytest.raises(ValueError, match=r"put it around, scale_loss\(accumulate\(grad_fn"):
        ll.accumulate(ll.grads.scale_loss(grad_fn), 4)
    with pytest.raises(ValueError, match=r"put it around, clip_by_global_norm\(accumulate"):
        ll.accumulate(ll.clip_by_global_norm(ll.grads.scale_loss(grad_fn), 1.0), 4)(scaled, batch)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_autocast_has_the_bits_of_the_raw_loop(dtype, enabled):
    batch = batches(1, size=16)[0]
    raw = net()
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        loss = loss_fn(raw, batch)
        assert raw(batch[0]).dtype is (dtype if enabled else torch.float32)
    loss.backward()
    model = net()
    state = ll.init_state(model)
    for given in (state, ll.copy_state(state)):
        out = ll.make_grad_fn(model, ll.autocast(loss_fn, dtype, enabled=enabled))(given, batch)
        assert ll.compute(out.metrics)["loss"] == loss.item()
        assert same_tensors(out.grads, {name: p.grad for name, p in raw.named_parameters()})
        assert all(grad.dtype is torch.float32 for grad in out.grads.values())
        plain = ll.make_grad_fn(model, loss_fn)(given, batch)
        assert same_tensors(plain.grads, out.grads) is not enabled

        def metric_fn(model, batch):
            return {"loss": loss_fn(model, batch), "logits": ll.Mean(model(batch[0]).sum(), 48)}

        raw.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            want = {"loss": loss_fn(raw, batch).item(), "logits": (raw(batch[0]).sum() / 48).item()}
            logits = raw(batch[0])
        assert (
            ll.compute(ll.make_eval_step(model, ll.autocast(metric_fn, dtype, enabled=enabled))(given, batch)) == want
        )
        predict_step = ll.make_predict_step(model, ll.autocast(lambda m, b: m(b[0]), dtype, enabled=enabled))
        predicted = predict_step(given, batch)
        assert predicted.dtype is logits.dtype
        assert torch.equal(predicted, logits)
        raw.train()
    assert not torch.is_autocast_enabled("cpu")


def test_the_backward_pass_is_outside_of_autocast():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    model = net()
    watched = ll.autocast(lambda model, batch: Watch.apply(loss_fn(model, batch)), torch.bfloat16)
    ll.make_grad_fn(model, watched)(ll.init_state(model), batches(1)[0])
    assert seen == [True, False]


def test_autocast_takes_half_precision_only():
    for wrong in (torch.float32, torch.float64, torch.int8):
        with pytest.raises(ValueError, match=rf"autocast to {wrong}: give torch.bfloat16 or torch.float16"):
            ll.autocast(loss_fn, wrong)
    with pytest.raises(ValueError, match=r"float32 is what there is without autocast: .* give enabled=False"):
        ll.autocast(loss_fn, torch.float32)
    ll.autocast(loss_fn, torch.bfloat16, enabled=False)


def normed_net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model.register_buffer("table", torch.tensor([[1, 300], [2, 70_000]]))
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [*HALF, torch.float64, torch.float32])
@pytest.mark.parametrize("bound", [True, False])
def test_a_cast_state_has_the_bits_of_a_module_that_was_cast(dtype, bound):
    model, data = normed_net(), batches(3)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.01)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer)
    state = ll.init_state(model, optimizer)
    if not bound:
        for batch in data:
            state, _ = train_step(state, batch)
    before = ll.copy_state(state)
    cast = ll.state.cast(state, dtype)
    raw = copy.deepcopy(model)
    raw.load_state_dict(ll.checkpoint.state_dict(model, state))
    raw.to(dtype)
    for name, tensor in raw.state_dict().items():
        ours = (cast.params | cast.buffers)[name]
        assert ours.dtype is tensor.dtype
        assert torch.equal(ours, tensor)
    assert {name: t.requires_grad for name, t in cast.params.items()} == {
        name: parameter.requires_grad for name, parameter in model.named_parameters()
    }
    assert all(tensor.is_leaf for tensor in cast.params.values())
    assert cast.opt_state is state.opt_state
    assert not ll.debug.differences(before, state)

    x = data[0][0].to(dtype)
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    with torch.no_grad():
        assert torch.equal(predict_step(cast, x), raw.eval()(x))
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


@WAYS
def test_a_cast_state_outlives_the_one_it_was_made_from(donate):
    model = normed_net()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.01)
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    halves = [ll.state.cast(state, dtype) for dtype in (torch.bfloat16, torch.float32)]
    kept = [{**half.params, **half.buffers} for half in halves]
    kept = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in kept]
    new, _ = train_step(state, batches(1)[0])
    for half, tensors in zip(halves, kept, strict=True):
        assert same_tensors({**half.params, **half.buffers}, tensors)
    if donate:
        with pytest.raises(ll.DonatedStateError):
            ll.state.cast(state, torch.bfloat16)
        with pytest.raises(ll.DonatedStateError):
            _ = halves[0].opt_state
    assert ll.state.cast(new, torch.bfloat16).step == 1


def test_a_cast_state_is_exported_in_its_dtype_and_trained_on_with_moments_of_its_own(tmp_path):
    from safetensors.torch import load_file

    model = net()
    state = ll.state.cast(ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=1e-3)), torch.bfloat16)
    ll.checkpoint.save_safetensors(model, state, tmp_path / "half.safetensors")
    written = load_file(tmp_path / "half.safetensors")
    assert not ll.debug.differences(written, dict(copy.deepcopy(model).bfloat16().state_dict()))

    def half_loss(model, batch):
        return F.cross_entropy(model(batch[0].bfloat16()), batch[1])

    optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    train_step = ll.make_train_step(ll.make_grad_fn(model, half_loss), optimizer)
    new, _ = train_step(state.replace(opt_state=optimizer.init(state.params)), batches(1)[0])
    raw = copy.deepcopy(model).bfloat16()
    expected, _ = ll.make_train_step(ll.make_grad_fn(raw, half_loss), optimizer)(
        ll.init_state(raw, optimizer), batches(1)[0]
    )
    assert not ll.debug.differences(new.params, expected.params)
    assert not ll.debug.differences(new.opt_state, expected.opt_state)
    plain_step = ll.make_train_step(ll.make_grad_fn(model, half_loss), ll.optimizer(torch.optim.AdamW, lr=1e-3))
    with pytest.raises(RuntimeError, match="BFloat16"):  # torch's own refusal of moments in float32
        plain_step(state, batches(1)[0])


def test_what_cannot_be_cast_is_named():
    model = net()
    for wrong in (torch.int8, torch.bool, torch.complex64, "bfloat16"):
        with pytest.raises(ValueError, match=f"cast to {wrong}: give a floating-point dtype"):
            ll.state.cast(ll.init_state(model), wrong)
    with pytest.raises(TypeError, match=r"cast got a Sequential; .*module.to\(dtype\)"):
        ll.state.cast(model, torch.bfloat16)


def mixed_net(dtype=torch.bfloat16):
    model = net().to(dtype)
    model[2].float()  # the LayerNorm, as many keep it
    return model


def mixed_loss(model, batch):
    x, y = batch
    hidden = model[1](model[0](x.to(model[0].weight.dtype)))
    hidden = model[2](hidden.to(model[2].weight.dtype)).to(model[3].weight.dtype)
    logits = model[3](hidden)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)


def raw_masters(cls, hyperparameters, data, model):
    """Float32 masters by hand: gradients widened, the masters updated, and rounded into the model."""
    named = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in named.items()}
    optimizer = cls(masters.values(), **hyperparameters)
    for batch in data:
        model.zero_grad()
        mixed_loss(model, batch).backward()
        for name, master in masters.items():
            master.grad = named[name].grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
    return masters


MODELS = ["bfloat16", "bfloat16 and float32", "float16 and float32"]
MASTERED = {
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}


@WAYS
@pytest.mark.parametrize("make", [lambda: net().bfloat16(), mixed_net, lambda: mixed_net(torch.float16)], ids=MODELS)
@pytest.mark.parametrize("name", MASTERED)
def test_master_weights_have_the_bits_of_a_loop_by_hand(name, make, donate):
    data = [(x.clamp(-9, 9), y) for x, y in batches(50)]
    cls, hyperparameters = MASTERED[name]

    masters = raw_masters(cls, {**hyperparameters, "fused": True}, data, raw := make())
    optimizer = ll.optim.master_weights(ll.optimizer(cls, **hyperparameters))
    train_step = ll.make_train_step(ll.make_grad_fn(model := make(), mixed_loss), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for batch in data:
        state, _ = train_step(state, batch)
    named = dict(raw.named_parameters())
    assert same_tensors(state.params, named)
    assert list(state.params) == list(named)
    narrow = {name for name, p in named.items() if p.dtype is not torch.float32}
    assert state.opt_state["master"].keys() == narrow
    assert all(torch.equal(state.opt_state["master"][name], masters[name]) for name in narrow)
    for name, tensor in state.params.items():
        assert tensor.dtype is named[name].dtype
        assert tensor.requires_grad
        assert not donate or tensor is model.get_parameter(name)


@WAYS
def test_an_update_too_small_for_bfloat16_moves_the_master_and_in_time_the_weight(donate):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    start = ll.copy_state(ll.init_state(model))
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).sum())  # a gradient of 1
    moved = {}
    for wrapper in (ll.optim.master_weights, lambda optimizer: optimizer):
        optimizer = wrapper(ll.optimizer(torch.optim.SGD, lr=2**-12))
        train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
        ll.bind(model, start)
        state = ll.init_state(model, optimizer)
        moved[wrapper] = []
        for _ in range(16):
            state, _ = train_step(state, torch.ones(1, 1).bfloat16())
            moved[wrapper].append(state.params["weight"].item())
            if wrapper is ll.optim.master_weights:
                assert state.opt_state["master"]["weight"].item() == 1 - state.step * 2**-12
    with_master, without = moved.values()
    # Below 1 there is 1 - 2**-8, and halfway to it goes back to 1, which is even.
    assert with_master == [1.0] * 8 + [1 - 2**-8] * 8
    assert without == [1.0] * 16


def test_master_weights_without_half_precision_are_refused():
    optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(
        ValueError, match=r"nothing to keep: the parameters are torch\.float32\. .*model\.bfloat16\(\)"
    ):
        ll.init_state(net(), optimizer)
    model = mixed_net().requires_grad_(False)
    model[2].requires_grad_(True)  # what is trained is float32
    with pytest.raises(ValueError, match="nothing to keep"):
        ll.init_state(model, optimizer)


@WAYS
def test_an_optimizer_that_evaluates_elsewhere_does_so_from_the_masters(donate):
    cls, hyperparameters = schedulefree.AdamWScheduleFree, {"lr": 0.01, "warmup_steps": 3, "foreach": False}
    raw = mixed_net()
    named = dict(raw.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in named.items()}
    by_hand = cls(masters.values(), **hyperparameters)
    by_hand.train()
    optimizer = ll.optim.master_weights(ll.optimizer(cls, **hyperparameters))
    train_step = ll.make_train_step(ll.make_grad_fn(model := mixed_net(), mixed_loss), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for x, y in batches(20):
        raw.zero_grad()
        mixed_loss(raw, (x, y)).backward()
        for name, master in masters.items():
            master.grad = named[name].grad.float()
        by_hand.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
        state, _ = train_step(state, (x, y))
    assert same_tensors(state.params, named)
    by_hand.eval()
    evaluated = ll.eval_state(optimizer, state).params
    assert same_tensors(evaluated, {name: master.to(named[name].dtype) for name, master in masters.items()})
    assert not same_tensors(evaluated, named)


@WAYS
@pytest.mark.parametrize("outermost", ["scale", "masters"])
def test_masters_and_a_loss_scale_together(outermost, donate):
    # The scale around the masters or within them; bfloat16 does not overflow, so a batch of infinities does it.
    wrappers = [lambda o: ll.optim.dynamic_loss_scale(o, 2.0**8, growth_interval=3), ll.optim.master_weights]
    data = [(x.clamp(-9, 9), y) for x, y in batches(20)]
    masters = raw_masters(
        torch.optim.AdamW, {"lr": 1e-3, "fused": True, "weight_decay": 0.01}, data, raw := mixed_net()
    )
    outer, inner = wrappers if outermost == "scale" else wrappers[::-1]
    optimizer = outer(inner(ll.optimizer(torch.optim.AdamW, lr=1e-3)))
    grad_fn = ll.grads.scale_loss(ll.make_grad_fn(model := mixed_net(), mixed_loss))
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for index, (x, y) in enumerate(data):
        if index % 7 == 3:
            before = ll.copy_state(state)
            state, _ = train_step(state, (x * torch.inf, y))
            assert state.skipped
            assert same_tensors(state.params, before.params)
        state, _ = train_step(state, (x, y))
    assert state.step == 20
    record = state.opt_state if outermost == "masters" else state.opt_state["inner_state"]
    # Powers of 2 scale bfloat16 and float32 without rounding.
    assert same_tensors(state.params, dict(raw.named_parameters()))
    assert all(torch.equal(record["master"][name], masters[name]) for name in record["master"])


@WAYS
def test_gradients_added_up_in_float32_go_to_the_masters(donate):
    data = [(x.clamp(-9, 9), y) for x, y in batches(10, size=16)]
    raw = net().bfloat16()
    named = dict(raw.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in named.items()}
    by_hand = torch.optim.AdamW(masters.values(), lr=1e-3, fused=True)
    for x, y in data:
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for piece in zip(x.chunk(4), y.chunk(4), strict=True):
            raw.zero_grad()
            mixed_loss(raw, piece).backward()
            for name, master in masters.items():
                master.grad += named[name].grad
        for master in masters.values():
            master.grad /= 4
        by_hand.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
    optimizer = ll.optim.master_weights(ll.optimizer(torch.optim.AdamW, lr=1e-3))
    grad_fn = ll.accumulate(ll.make_grad_fn(model := net().bfloat16(), mixed_loss), 4, dtype=torch.float32)
    train_step = ll.make_train_step(grad_fn, optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for batch in data:
        state, _ = train_step(state, batch)
    assert same_tensors(state.opt_state["master"], masters)
    assert same_tensors(state.params, named)


@pytest.mark.parametrize("clip", [ll.grads.clip_by_value, ll.clip_by_global_norm, ll.contrib.adaptive_grad_clip])
def test_no_clipping_hides_an_overflow(clip):
    raw, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    by_hand = torch.optim.SGD(raw.parameters(), lr=0.1)
    x, y = batches(23)[22]
    scaler.scale(in_float16(raw, (x, y))).backward()
    scaler.unscale_(by_hand)
    nn.utils.clip_grad_value_(raw.parameters(), 0.5)
    scaler.step(by_hand)
    assert same_tensors(dict(raw.named_parameters()), dict(net().named_parameters()))

    optimizer = ll.optim.dynamic_loss_scale(ll.optimizer(torch.optim.SGD, lr=0.1), 2.0**10)
    grad_fn = ll.grads.scale_loss(ll.make_grad_fn(model := net(), ll.autocast(loss_fn, torch.float16)))
    state, _ = ll.make_train_step(clip(grad_fn, 0.5), optimizer)(ll.init_state(model, optimizer), (x, y))
    assert state.skipped
    assert state.opt_state["loss_scale"] == 2.0**9


def test_gradients_in_float16_are_not_divided_there():
    model = nn.Linear(2, 1, bias=False).half()
    optimizer = ll.optim.dynamic_loss_scale(ll.optim.master_weights(ll.optimizer(torch.optim.SGD, lr=1.0)))
    state, x = ll.init_state(model, optimizer), torch.ones(1, 2).half()
    grad_fn = ll.make_grad_fn(model, lambda model, x: 1e-8 * model(x).float().sum())
    with pytest.raises(ValueError, match=r"gradients of weight are in float16.*accumulate\(grad_fn, \.\.\., dtype="):
        ll.grads.scale_loss(grad_fn)(state, x)
    scaler = torch.amp.GradScaler("cpu")
    by_hand = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(by_hand)
    wide = ll.grads.scale_loss(ll.accumulate(grad_fn, 1, dtype=torch.float32))
    torch.testing.assert_close(wide(state, x).grads["weight"], torch.full((1, 2), 1e-8), rtol=1e-3, atol=0)
    new, _ = ll.make_train_step(wide, optimizer)(state, x)
    assert new.step == 1


def test_masters_are_of_a_wider_dtype():
    sgd = ll.optimizer(torch.optim.SGD, lr=0.1)
    for wrong in (torch.bfloat16, torch.float16, torch.int64):
        with pytest.raises(ValueError, match=rf"masters in {wrong}: give torch\.float32 or torch\.float64"):
            ll.optim.master_weights(sgd, wrong)
    state = ll.init_state(mixed_net(), ll.optim.master_weights(sgd, torch.float64))
    assert {master.dtype for master in state.opt_state["master"].values()} == {torch.float64}
