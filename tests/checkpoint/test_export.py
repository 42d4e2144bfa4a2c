"""Ways out and in against torch's own `state_dict`, safetensors, transformers, and raw torch loops."""

import copy
import inspect
import io
import os
import pickle
import re
import sys

import pytest
import safetensors.torch
import schedulefree
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import looplib as ll
from looplib.checkpoint import interop as export


class Net(nn.Module):
    """Tied weights, a block in two places, a buffer that is not persistent, extra state."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.again = self.block
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(6, 2)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}

    def forward(self, x):
        return self.last(self.head(self.again(self.block(x))) * self.mask * self.scale) + self.embed(x).sum()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def unlike(model):
    """A state of this module that is not bound to it and has other values."""
    state = ll.copy_state(ll.init_state(model))
    for tensor in [*state.params.values(), *state.buffers.values()]:
        tensor.detach().copy_(torch.rand(tensor.shape) > 0.5 if tensor.dtype is torch.bool else tensor + 1)
    return state


def equal(one, other):
    plain = [{key: value for key, value in d.items() if isinstance(value, torch.Tensor)} for d in (one, other)]
    return list(plain[0]) == list(plain[1]) and all(torch.equal(plain[0][key], plain[1][key]) for key in plain[0])


def tensors_of(state):
    return {**state.params, **state.buffers}


def watched(function):
    """The function, and a look at the module, which may not change."""

    def traces(model):
        tensors = [(id(t), t._version, t.sum().item()) for t in (*model.parameters(), *model.buffers())]
        return tensors, [module.training for module in model.modules()]

    def call(model, *args, **kwargs):
        before, stream = traces(model), torch.get_rng_state()
        try:
            return function(model, *args, **kwargs)
        finally:
            assert traces(model) == before
            assert torch.equal(stream, torch.get_rng_state())

    return call


state_dict, load_state_dict = watched(export.state_dict), watched(export.load_state_dict)
save_safetensors, save_pretrained = watched(export.save_safetensors), watched(export.save_pretrained)
optimizer_state_dict = watched(export.optimizer_state_dict)
load_optimizer_state_dict = watched(export.load_optimizer_state_dict)


# --- state_dict ---


def test_the_state_dict_of_a_bound_state_is_the_modules_own():
    model = net()
    own, ours = model.state_dict(), state_dict(model, ll.init_state(model))
    assert list(ours) == list(own)
    assert equal(ours, own)
    assert ours._metadata == own._metadata
    assert all(ours[key].data_ptr() == own[key].data_ptr() for key in own if isinstance(own[key], torch.Tensor))
    assert not any(tensor.requires_grad for tensor in ours.values() if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("root", [[torch.compile, nn.DataParallel], [nn.DataParallel, torch.compile], []])
def test_wrappers_leave_no_trace_in_names(root):
    plain = net()
    ours = unlike(plain)
    expected = state_dict(plain, ours)
    model = copy.deepcopy(plain)
    model.block = checkpoint_wrapper(torch.compile(model.block))
    model.again = nn.DataParallel(model.again)
    model.last = checkpoint_wrapper(nn.DataParallel(model.last))
    for wrapper in root:
        model = wrapper(model)
    found = state_dict(model, ours)
    assert equal(found, expected)
    assert set(expected._metadata) <= set(found._metadata)
    plain.load_state_dict(found)
    for source, reference in ((expected, ours), (model.state_dict(), ll.init_state(model))):
        loaded, reference = tensors_of(load_state_dict(model, ll.init_state(model), source)), tensors_of(reference)
        assert all(torch.equal(loaded[name], reference[name]) for name in loaded if name != "mask")


# --- load_state_dict ---


def by_torch(weights, path):
    torch.save(weights, path)


def by_old_torch(weights, path):
    torch.save(weights, path, _use_new_zipfile_serialization=False)


def by_safetensors(weights, path):
    tensors = {key: value.clone() for key, value in weights.items() if isinstance(value, torch.Tensor)}
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize("write", [None, by_torch, by_old_torch, by_safetensors])
def test_a_state_dict_comes_back_from_a_mapping_and_from_files(write, tmp_path):
    model, other = net(), net(1)
    source = other.state_dict()
    if write:
        write(source, tmp_path / "weights")
        source = tmp_path / "weights"
    state = ll.init_state(model).replace(step=7, extra={"kept": True})
    loaded = load_state_dict(model, state, source)
    assert all(torch.equal(loaded.params[name], p) for name, p in other.named_parameters())
    assert all(torch.equal(loaded.buffers[name], b) for name, b in other.named_buffers())
    assert list(loaded.params) == list(state.params)
    assert loaded.step == 7
    assert loaded.extra is state.extra
    assert loaded.buffers["mask"] is state.buffers["mask"]
    assert all(state.params[name] is p for name, p in model.named_parameters())
    bound = ll.bind(model, loaded)
    assert torch.equal(model.embed.weight, other.embed.weight)
    assert bound.params["embed.weight"] is model.embed.weight


def test_dtypes_strides_and_gradients_are_the_states():
    model = nn.Conv2d(3, 4, 3).to(torch.float64, memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    state = ll.init_state(model)
    other = nn.Conv2d(3, 4, 3).bfloat16()
    loaded = load_state_dict(model, state, other.state_dict())
    for name, tensor in loaded.params.items():
        like = state.params[name]
        assert (tensor.dtype, tensor.stride(), tensor.requires_grad) == (
            like.dtype,
            like.stride(),
            like.requires_grad,
        )
        assert torch.equal(tensor, dict(other.named_parameters())[name].double())
        assert tensor.is_leaf


@pytest.mark.parametrize("strict", [True, False])
def test_exactly_the_chosen_names_are_loaded(strict):
    model, other, chosen = net(), net(1), {"last.bias", "head.weight", "again.0.bias", "scale"}
    other.scale.fill_(3)
    state = ll.init_state(model)
    source = {**other.state_dict(), "block.9.strange": torch.ones(3)}
    if strict:
        loaded = load_state_dict(model, state, source, names=lambda name: name in chosen)
    else:
        loaded = load_state_dict(model, state, {key: source[key] for key in chosen}, strict=False)
    theirs = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name, tensor in tensors_of(loaded).items():
        if name in {"last.bias", "embed.weight", "block.0.bias", "scale"}:  # the first names of tied ones
            assert torch.equal(tensor, theirs[name])
            assert tensor is not theirs[name]
        else:
            assert tensor is tensors_of(state)[name]


def test_one_name_of_tied_weights_is_enough_and_two_must_agree():
    model, state = net(), ll.init_state(net())
    source = net(1).state_dict()
    for gone in ("embed.weight", "head.weight"):
        less = {key: value for key, value in source.items() if key != gone}
        assert torch.equal(load_state_dict(model, state, less).params["embed.weight"], source["embed.weight"])
    with pytest.raises(ValueError, match=r"head.weight has other values than another name of the same tied weight"):
        load_state_dict(model, state, {**source, "head.weight": source["head.weight"] + 1})
    nan = {
        key: value * torch.nan if key in ("embed.weight", "head.weight") else value for key, value in source.items()
    }
    assert load_state_dict(model, state, nan).params["embed.weight"].isnan().all()


def test_all_that_does_not_fit_is_named_at_once():
    model = net()
    state = ll.init_state(model)
    source = model.state_dict()
    del source["last.bias"]
    source["last.weight"] = torch.ones(3, 6)
    source["strange"] = torch.ones(1)
    source["scale"] = torch.ones((), dtype=torch.complex64)
    source["block.0.bias"] = [1.0]
    with pytest.raises(ValueError) as caught:
        load_state_dict(model, state, source)
    message = str(caught.value)
    for part in (
        "the mapping does not fit the state of this Net",
        "missing last.bias;",
        "unexpected strange;",
        "last.weight has shape (3, 6), the state's has (2, 6). To load",
        "scale is of torch.complex64, which does not go into the state's torch.float32",
        "block.0.bias is a list, not a tensor",
        "names=",
        "strict=False",
    ):
        assert part in message
    with pytest.raises(ValueError, match=re.escape("last.weight has shape (3, 6)")) as caught:
        load_state_dict(model, state, {"last.weight": torch.ones(3, 6), "strange": torch.ones(1)}, strict=False)
    assert "missing" not in str(caught.value)
    assert "unexpected" not in str(caught.value)
    load_state_dict(model, state, {"last.bias": torch.ones(2), "strange": 1}, strict=False)


def test_usual_misfits_are_explained():
    model = net()
    state = ll.init_state(model)
    prefixed = {f"module.{key}": value for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape('they fit without "module."')):
        load_state_dict(model, state, prefixed)
    load_state_dict(nn.DataParallel(model), state, prefixed)
    load_state_dict(model, state, {f"_orig_mod.{key}": value for key, value in model.state_dict().items()})
    with pytest.raises(ValueError, match=r"unexpected model, step \(model is a dict: if the weights are in it"):
        load_state_dict(model, state, {"model": model.state_dict(), "step": 3})
    with pytest.raises(ValueError, match=r"missing .* unexpected 0, 1"):
        load_state_dict(model, state, {0: torch.ones(1), 1: torch.ones(1)})
    with pytest.raises(TypeError, match="source is a Net; give a state_dict, or the path"):
        load_state_dict(model, state, model)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-pickle-ran",)


def test_files_that_are_no_state_dict_are_refused_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = net()
    state = ll.init_state(model)
    whole = io.BytesIO()
    torch.save(model.state_dict(), whole)
    kept = tmp_path / "kept.safetensors"
    save_safetensors(nn.Linear(2, 1), ll.init_state(nn.Linear(2, 1)), kept)
    files = {
        "hostile": pickle.dumps({"weight": Hostile()}, protocol=2),
        "empty": b"",
        "cut": whole.getvalue()[: len(whole.getvalue()) // 2],
        "cut.safetensors": kept.read_bytes()[:-1],
        "noise": b"12345678{" + bytes(range(256)),
    }
    torch.save({"weight": Hostile()}, tmp_path / "hostile-in-torch")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in [*files, "hostile-in-torch"]:
        with pytest.raises(ValueError, match=f"{name} is damaged, or holds more than tensors"):
            load_state_dict(model, state, tmp_path / name)
    assert not (tmp_path / "hostile-pickle-ran").exists()
    torch.save([1, 2], tmp_path / "list")
    with pytest.raises(ValueError, match="list holds a list, not a state_dict"):
        load_state_dict(model, state, str(tmp_path / "list"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_state_dict(model, state, tmp_path / "nowhere")


# --- safetensors ---


class Tied(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=dtype)
        self.second = nn.Linear(3, 3, dtype=dtype)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(6.0, dtype=dtype).view(2, 3).T)  # not contiguous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_safetensors_files_are_those_of_safetensors(dtype, tmp_path):
    model = Tied(dtype)
    state = unlike(model)
    save_safetensors(model, state, tmp_path / "ours.safetensors")
    plain = Tied(dtype)
    assert safetensors.torch.load_model(plain, tmp_path / "ours.safetensors") == (set(), [])
    assert equal(plain.state_dict(), state_dict(model, state))
    safetensors.torch.save_model(plain, tmp_path / "theirs.safetensors")
    ours, theirs = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "second.weight": "first.weight"}
    for name in ("ours", "theirs"):
        loaded = load_state_dict(model, ll.init_state(model), tmp_path / f"{name}.safetensors")
        assert equal(tensors_of(loaded), tensors_of(state))
        assert loaded.params["first.weight"].dtype is dtype


def test_a_safetensors_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    path = tmp_path / "model.safetensors"
    save_safetensors(model, ll.init_state(model), path)
    before = path.read_bytes()

    def full_disk(tensors, file, metadata):
        file.write_bytes(before[:20])
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_safetensors(model, unlike(model), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    save_safetensors(model, unlike(model), path)
    assert path.read_bytes() != before


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    path = tmp_path / "model.safetensors"
    save_safetensors(model, ll.init_state(model), path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (
        lambda: save_safetensors(model, ll.init_state(model), path),
        lambda: load_state_dict(model, ll.init_state(model), path),
    ):
        with pytest.raises(ImportError, match=re.escape("pip install safetensors")):
            call()


# --- transformers ---

TINY = {"vocab_size": 23, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}


def gpt2(**changes):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, **changes
    )
    return transformers.GPT2LMHeadModel(config), transformers.AutoModelForCausalLM


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**TINY, intermediate_size=8, max_position_embeddings=16, num_labels=3)
    return transformers.BertForMaskedLM(config), transformers.AutoModelForMaskedLM


TOKENS = torch.arange(12).view(2, 6)


def logits(model, state):
    return ll.make_predict_step(model, lambda model, batch: model(input_ids=batch).logits)(state, TOKENS)


@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("wrap", ["plain", "compiled", "parallel", "inner"])
def test_a_saved_folder_loads_in_plain_transformers_with_the_same_outputs(make, wrap, tmp_path):
    model, auto = make()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: model(input_ids=batch).logits.square().mean())
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), TOKENS)
    expected = logits(model, state)
    wrapped = model
    if wrap == "inner":
        name = model.base_model_prefix
        setattr(model, name, torch.compile(getattr(model, name)))
    elif wrap != "plain":
        wrapped = {"compiled": torch.compile, "parallel": nn.DataParallel}[wrap](model)
    save_pretrained(wrapped, state, tmp_path, max_shard_size="4KB" if wrap == "compiled" else "1GB")
    plain = auto.from_pretrained(tmp_path)
    assert type(plain) is type(make()[0])
    with torch.no_grad():
        assert torch.equal(plain(input_ids=TOKENS).logits, expected)
    again = ll.init_state(plain)
    assert equal(tensors_of(again), tensors_of(state))
    assert torch.equal(logits(plain, again), expected)
    if wrap == "plain":
        fresh = make()[0]
        loaded = load_state_dict(fresh, ll.init_state(fresh), tmp_path / "model.safetensors")
        assert torch.equal(logits(fresh, loaded), expected)


def test_a_saved_folder_tells_the_dtype_of_the_state(tmp_path):
    model, auto = gpt2()
    state = ll.copy_state(ll.init_state(model))
    state = state.replace(params={name: tensor.bfloat16() for name, tensor in state.params.items()})
    save_pretrained(model, state, tmp_path)
    plain = auto.from_pretrained(tmp_path)
    assert plain.dtype is plain.config.dtype is torch.bfloat16
    assert equal(dict(plain.named_parameters()), state.params)


def test_save_pretrained_refuses_other_models_and_files(tmp_path):
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"Linear has no save_pretrained.*save_safetensors"):
        save_pretrained(model, ll.init_state(model), tmp_path)
    model, _ = gpt2()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(NotADirectoryError, match="file is a file; save_pretrained needs a folder"):
        save_pretrained(model, ll.init_state(model), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


# --- torch optimizers ---


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def batch(step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def raw_steps(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_fn(model, batch(step)).backward()
        optimizer.step()


def pure_steps(model, state, optimizer, begin, end, donate):
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    for at in range(begin, end):
        state, _ = step(state, batch(at))
    return state


def is_vector(name, tensor):
    return tensor.ndim < 2


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}, {"weight_decay": 0.0}),
    "half momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"momentum": 0.0}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}, {"momentum_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5}, {"centered": True, "momentum": 0.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, {"weight_decay": 0.1}),
}


def both(cls, defaults, overrides, model, reverse):
    """looplib's optimizer and torch's own, with groups in another order where order is free."""
    fused = {"fused": True} if "fused" in inspect.signature(cls).parameters else {}
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": vectors, **overrides}, {"params": matrices[::-1] if reverse else matrices}]
    raw = cls(groups[::-1] if reverse else groups, **defaults, **fused)
    return ll.optimizer(cls, **defaults, groups=[(is_vector, overrides)]), raw


def agrees(state, model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return all(torch.equal(tensor, tensors[name]) for name, tensor in tensors_of(state).items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(
    here=st.integers(0, 3),
    there=st.integers(0, 3),
    back=st.integers(1, 2),
    reverse=st.booleans(),
    donate=st.booleans(),
    bound=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_a_run_leaves_for_a_raw_loop_and_comes_back_with_the_same_bits(
    kind, here, there, back, reverse, donate, bound
):
    total = here + there + back
    reference = mlp()
    optimizer, raw = both(*OPTIMIZERS[kind], reference, reverse)
    raw_steps(reference, raw, 0, total)

    model = mlp()
    state = pure_steps(model, ll.init_state(model, optimizer), optimizer, 0, here, donate)
    if bound:
        state = ll.bind(model, state)
    else:
        weights, model = state_dict(model, state), mlp()
        model.load_state_dict(weights)
    before = ll.copy_state(state)
    _, raw = both(*OPTIMIZERS[kind], model, reverse)
    raw.load_state_dict(optimizer_state_dict(model, state, raw))
    raw_steps(model, raw, here, here + there)
    assert equal_trees(state.opt_state, before.opt_state)  # the raw loop writes into nothing of it

    given = ll.init_state(model, optimizer, seed=3).replace(step=here + there, batch=here + there)
    if here + there:
        state = load_optimizer_state_dict(model, given, raw)
        assert (state.step, state.seed) == (here + there, 3)
        kept = copy.deepcopy(raw.state_dict()["state"])
    else:
        state = given
    state = pure_steps(model, state, optimizer, here + there, total, donate)
    assert agrees(state, reference)
    if here + there:
        assert equal_trees(kept, raw.state_dict()["state"])  # nor looplib into the raw optimizer's


def equal_trees(one, other):
    leaves, structure = torch.utils._pytree.tree_flatten(one)
    others, other_structure = torch.utils._pytree.tree_flatten(other)
    return structure == other_structure and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "apply_if_finite"])
def test_what_is_filled_is_torchs_own_state_dict(wrapped):
    model, reference = mlp(), mlp()
    optimizer, raw = both(*OPTIMIZERS["AdamW"], reference, True)
    raw_steps(reference, raw, 0, 3)
    if wrapped:
        optimizer = ll.optim.apply_if_finite(optimizer, 2)
    state = pure_steps(model, ll.init_state(model, optimizer), optimizer, 0, 3, False)
    _, empty = both(*OPTIMIZERS["AdamW"], model, True)
    filled = optimizer_state_dict(nn.DataParallel(model), state, empty)
    assert empty.state_dict()["state"] == {}
    assert list(filled["state"]) == list(raw.state_dict()["state"])
    assert equal_trees(filled, raw.state_dict())
    empty.load_state_dict(filled)
    fresh = ll.init_state(model, optimizer).replace(step=3)
    assert equal_trees(load_optimizer_state_dict(model, fresh, empty).opt_state, state.opt_state)


def test_what_is_kept_takes_the_dtype_of_its_new_place():
    model = mlp()
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.05)
    raw = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    raw_steps(model, raw, 0, 2)
    double = ll.init_state(copy.deepcopy(model).double(), optimizer).replace(step=2)
    state = load_optimizer_state_dict(model, double, raw)
    for name, p in model.named_parameters():
        kept = state.opt_state["state"][name]
        assert (kept["exp_avg"].dtype, kept["step"].dtype) == (torch.float64, torch.float32)
        assert torch.equal(kept["exp_avg"], raw.state[p]["exp_avg"].double())
    single = ll.init_state(model, optimizer).replace(step=2, opt_state=state.opt_state)
    assert equal_trees(optimizer_state_dict(model, single, raw)["state"], raw.state_dict()["state"])


def test_a_parameter_that_never_had_a_gradient_keeps_what_the_state_has():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)
    model["used"](torch.ones(1, 2)).sum().backward()
    raw.step()
    state = load_optimizer_state_dict(model, ll.init_state(model, optimizer).replace(step=1), raw)
    kept = state.opt_state["state"]
    assert torch.equal(kept["used.weight"]["exp_avg"], raw.state[model["used"].weight]["exp_avg"])
    assert kept["unused.weight"]["step"].item() == 0
    assert not kept["unused.weight"]["exp_avg"].any()


class Late(torch.optim.Optimizer):
    """Momentum that begins with a parameter's own first gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                if not self.state[p]:
                    self.state[p]["momentum"] = p.grad.clone()
                p.sub_(self.state[p]["momentum"].mul_(0.9).add_(p.grad), alpha=group["lr"])


def test_a_parameter_without_an_update_has_no_entry_where_the_class_makes_it_in_the_first():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    optimizer = ll.optimizer(Late, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model["used"](x).sum(), allow_unused=True)
    step = ll.make_train_step(grad_fn, optimizer)
    state, _ = step(ll.init_state(model, optimizer), torch.ones(1, 2))
    assert optimizer_state_dict(model, state, Late(model.parameters(), lr=0.1))["state"].keys() == {0, 1}


def test_optimizers_that_do_not_match_are_refused():
    model = mlp()
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.05)
    state = pure_steps(model, ll.init_state(model, adamw), adamw, 0, 2, False)
    params = list(model.parameters())

    def refused(match, raw, given=state, error=ValueError):
        for function in (optimizer_state_dict, load_optimizer_state_dict):
            with pytest.raises(error, match=match):
                function(model, given, raw)

    refused("train different parameters: missing 3.bias, unexpected none", torch.optim.AdamW(params[:-1]))
    refused(
        "AdamW has parameters that are not this Sequential's own, of shapes", torch.optim.AdamW(mlp().parameters())
    )
    refused("torch_optimizer is an Optimizer; give an instance", adamw, error=TypeError)
    refused("not what an ll.optimizer keeps", torch.optim.AdamW(params), ll.init_state(model), TypeError)
    part = ll.init_state(model, adamw, trainable=is_vector)
    refused("missing none, unexpected 0.weight, 3.weight", torch.optim.AdamW(params), part)
    for p in params:
        p.requires_grad_(p.ndim < 2)
    part = ll.init_state(model, adamw)
    raw = torch.optim.AdamW(params)  # frozen ones stand in it as they do in most loops
    assert len(optimizer_state_dict(model, part, raw)["state"]) == len(part.opt_state["state"]) == 4
    for p in params:
        p.requires_grad_()

    with pytest.raises(ValueError, match=r"and AdamW keeps \['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step'\]"):
        optimizer_state_dict(model, state, torch.optim.AdamW(params, amsgrad=True))
    sgd = torch.optim.SGD(params, momentum=0.9)
    with pytest.raises(ValueError, match="this SGD keeps nothing for any parameter: it has made no step"):
        load_optimizer_state_dict(model, state, sgd)
    ll.bind(model, state)  # which is no longer the module of a pure run, then
    raw_steps(model, sgd, 0, 1)
    with pytest.raises(ValueError, match=r"for 0.weight, this SGD keeps \['momentum_buffer'\], and the state keeps"):
        load_optimizer_state_dict(model, state, sgd)
    momentum = ll.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    with pytest.raises(ValueError, match=r"the state is at step 0.*state.replace\(step="):
        load_optimizer_state_dict(model, ll.init_state(model, momentum), sgd)

    free = ll.optimizer(schedulefree.AdamWScheduleFree, lr=0.05, groups=[(is_vector, {"lr": 0.01})])
    refused("keeps values in its groups", schedulefree.AdamWScheduleFree(params), ll.init_state(model, free))
