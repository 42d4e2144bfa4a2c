"""Weights out and in, against torch's own `state_dict`, safetensors and transformers."""

import copy
import os

import peft
import pytest
import safetensors.torch
import torch
import transformers
from shared import equal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import looplib as ll


class Net(nn.Module):
    """Tied weights, a block in two places, a buffer that is not persistent or contiguous, extra state."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.again = self.block
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(6, 2)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)
        self.register_buffer("scale", torch.rand(2, 3).T)

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def unlike(model):
    """A state of this module that is not bound to it and has other values."""
    state = ll.copy_state(ll.init_state(model))
    for tensor in [*state.params.values(), *state.buffers.values()]:
        tensor.detach().copy_(torch.rand(tensor.shape) > 0.5 if tensor.dtype is torch.bool else tensor + 1)
    return state


def only_tensors(entries):
    return {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}


def tensors_of(state):
    return {**state.params, **state.buffers}


def own(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def watched(function):
    """The function, and a look at the module, which may not change."""

    def traces(model):
        tensors = [(id(t), t._version, t.sum().item()) for t in own(model).values()]
        return tensors, [module.training for module in model.modules()], torch.get_rng_state().tolist()

    def call(model, *args, **kwargs):
        before = traces(model)
        try:
            return function(model, *args, **kwargs)
        finally:
            assert traces(model) == before

    return call


state_dict, load_state_dict = watched(ll.checkpoint.state_dict), watched(ll.checkpoint.load_state_dict)
save_safetensors, save_pretrained = watched(ll.checkpoint.save_safetensors), watched(ll.checkpoint.save_pretrained)


def test_the_state_dict_of_a_bound_state_is_the_modules_own():
    model = net()
    expected, ours = model.state_dict(), state_dict(model, ll.init_state(model))
    assert list(ours) == list(expected)
    assert equal(only_tensors(ours), only_tensors(expected))
    assert ours._metadata == expected._metadata
    assert all(tensor.data_ptr() == expected[key].data_ptr() for key, tensor in only_tensors(ours).items())
    assert not any(tensor.requires_grad for tensor in only_tensors(ours).values())
    elsewhere = nn.Linear(2, 2, device="meta")
    assert ll.checkpoint.state_dict(elsewhere, ll.init_state(elsewhere))["bias"].is_meta  # not moved to the CPU


@pytest.mark.slow
def test_wrappers_leave_no_trace_in_names():
    for root in ([torch.compile, nn.DataParallel], [nn.DataParallel, torch.compile], []):
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
        assert list(found) == list(expected)
        assert equal(only_tensors(found), only_tensors(expected))
        plain.load_state_dict(found)
        for source, reference in ((expected, ours), (model.state_dict(), ll.init_state(model))):
            loaded, reference = (
                tensors_of(load_state_dict(model, ll.init_state(model), source)),
                tensors_of(reference),
            )
            assert all(torch.equal(loaded[name], reference[name]) for name in loaded if name != "mask")


def test_a_state_dict_comes_back_with_dtypes_strides_and_gradients_of_the_state():
    model, other = net(), net(1)
    model.double().last.bias.requires_grad_(False)
    state = ll.init_state(model).replace(step=7, extra={"kept": True})
    loaded = load_state_dict(model, state, other.state_dict())
    assert list(loaded.params) == list(state.params)
    for name, tensor in tensors_of(loaded).items():
        like = tensors_of(state)[name]
        assert [tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.is_leaf] == [
            like.dtype, like.stride(), like.requires_grad, True
        ]  # fmt: skip
        assert torch.equal(tensor, own(other)[name].to(like.dtype))
    assert loaded.step == 7
    assert loaded.extra is state.extra
    assert loaded.buffers["mask"] is state.buffers["mask"]
    bound = ll.bind(model, loaded)
    assert torch.equal(model.embed.weight, other.embed.weight.double())
    assert bound.params["embed.weight"] is model.embed.weight


def test_exactly_the_chosen_names_are_loaded():
    model, other, chosen = net(), net(1), {"last.bias", "head.weight", "again.0.bias", "scale"}
    state = ll.init_state(model)
    source = other.state_dict()
    loaded = load_state_dict(model, state, {**{key: source[key] for key in chosen}, "strange": 1}, strict=False)
    for name, tensor in tensors_of(loaded).items():
        if name in {"last.bias", "embed.weight", "block.0.bias", "scale"}:  # the first names of tied ones
            assert torch.equal(tensor, own(other)[name])
            assert tensor is not own(other)[name]
        else:
            assert tensor is tensors_of(state)[name]


def test_one_name_of_tied_weights_is_enough_and_two_must_agree():
    model, state = net(), ll.init_state(net())
    source = net(1).state_dict()
    for gone in ("embed.weight", "head.weight"):
        less = {key: value for key, value in source.items() if key != gone}
        assert torch.equal(load_state_dict(model, state, less).params["embed.weight"], source["embed.weight"])
    with pytest.raises(ValueError, match=r"head.weight has other values"):
        load_state_dict(model, state, {**source, "head.weight": source["head.weight"] + 1})
    nan = dict.fromkeys(("embed.weight", "head.weight"), source["embed.weight"] * torch.nan)
    assert load_state_dict(model, state, source | nan).params["embed.weight"].isnan().all()


def test_all_that_does_not_fit_is_named_at_once():
    model = net()
    state = ll.init_state(model)
    wrong = {"last.weight": torch.ones(3, 6), "scale": torch.ones(3, 2) * 1j, "block.0.bias": [1.0]}
    source = {**model.state_dict(), **wrong, "strange": torch.ones(1)}
    del source["last.bias"]
    with pytest.raises(ValueError) as caught:
        load_state_dict(model, state, source)
    for part in (
        "Net", "missing last.bias;", "unexpected strange;", "last.weight is a float32 tensor of shape (3, 6)", "(2, 6)",
        "scale is a complex64", "block.0.bias is a list", "strict=False",
    ):  # fmt: skip
        assert part in str(caught.value)
    for source, options, words in (
        ({"last.weight": torch.ones(3, 6)}, {"strict": False}, r"Net: last.weight is .*\(3, 6\)"),
        ({f"module.{key}": value for key, value in model.state_dict().items()}, {}, "missing .*; unexpected module"),
        ({0: torch.ones(1)}, {"strict": False}, "missing .*; unexpected 0"),
    ):
        with pytest.raises(ValueError, match=words):
            load_state_dict(model, state, source, **options)
    for source in (model, "model.pt"):
        with pytest.raises(TypeError, match=r"source is .*load_file"):
            load_state_dict(model, state, source)
    for call in (state_dict, lambda *args: save_safetensors(*args, "new"), lambda *args: load_state_dict(*args, {})):
        with pytest.raises(ValueError, match="the state's parameters are not those of this Net"):
            call(model, ll.init_state(nn.Linear(2, 1)))


# Files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_safetensors_files_are_those_of_safetensors(dtype, tmp_path):
    class Plain(Net):  # without what safetensors cannot hold
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def __init__(self):
            super().__init__()
            self.again = None

    model, plain = Plain().to(dtype), Plain().to(dtype)
    state = unlike(model)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    save_safetensors(model, state, ours)
    assert safetensors.torch.load_model(plain, ours) == (set(), [])
    assert equal(plain.state_dict(), state_dict(model, state))
    safetensors.torch.save_model(plain, theirs)
    with safetensors.safe_open(ours, "pt") as one, safetensors.safe_open(theirs, "pt") as other:
        assert {*one.keys()} == {*other.keys()}
        assert one.metadata()["format"] == "pt"
        assert one.metadata()["head.weight"] == "embed.weight"
    for path in (ours, theirs):
        loaded = load_state_dict(model, ll.init_state(model), safetensors.torch.load_file(path))
        assert all(torch.equal(loaded.params[name], tensor) for name, tensor in state.params.items())
        assert loaded.params["embed.weight"].dtype is dtype


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
    assert os.listdir(tmp_path) == ["model.safetensors"]


TOKENS = torch.arange(12).view(2, 6)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("wrap", ["plain", "compiled", "parallel"])
def test_a_saved_folder_loads_in_plain_transformers_with_the_same_outputs(wrap, tmp_path):
    model = gpt2()
    state = unlike(model)
    expected = ll.make_predict_step(model, lambda model, batch: model(input_ids=batch).logits)(state, TOKENS)
    wrapped = {"compiled": torch.compile, "parallel": nn.DataParallel}.get(wrap, lambda model: model)(model)
    save_pretrained(wrapped, state, tmp_path, max_shard_size="4KB" if wrap == "compiled" else "1GB")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is type(gpt2())
    with torch.no_grad():
        assert torch.equal(plain(input_ids=TOKENS).logits, expected)
    assert equal(tensors_of(ll.init_state(plain)), tensors_of(state))


def test_a_saved_folder_tells_the_dtype_of_the_state(tmp_path):
    model = gpt2()
    state = ll.copy_state(ll.init_state(model))
    with torch.no_grad():
        state = state.replace(params={name: tensor.bfloat16() for name, tensor in state.params.items()})
    save_pretrained(model, state, tmp_path / "new")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert plain.dtype is plain.config.dtype is torch.bfloat16
    assert equal(dict(plain.named_parameters()), state.params)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(NotADirectoryError, match="file is a file"):
        save_pretrained(model, state, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # read by peft
def test_a_saved_folder_of_an_adapter_is_the_model_of_the_state(tmp_path):
    gpt2().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    state = ll.copy_state(ll.init_state(model))
    with torch.no_grad():
        for name in [name for name in state.params if "lora" in name]:
            state.params[name].normal_()
    save_pretrained(model, state, tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    found, before = loaded(TOKENS).logits, model.eval()(TOKENS).logits
    ll.bind(model, state)
    assert torch.equal(found, model(TOKENS).logits)
    assert not torch.allclose(found, before)
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < 2_000
