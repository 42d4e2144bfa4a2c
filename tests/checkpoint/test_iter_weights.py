"""Weights one by one: names, values and memory against `save_pretrained`, peft's own merge and torch's `full_tensor`."""

import copy
import warnings
import weakref

import peft
import pytest
import safetensors.torch
import torch
import transformers
from problem import adamw
from ranks import launch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll


def made(kind, **settings):
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=31, **settings)
    return getattr(transformers, MODELS[kind])(config)


LLAMA = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mixtral": "MixtralForCausalLM",
    "NomicBert": "NomicBertModel", "T5": "T5ForConditionalGeneration", "Bert": "BertForPreTraining",
}  # fmt: skip
CASES = {
    "GPT2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},  # tied
    "Llama": LLAMA,  # not tied
    "Mixtral": {**LLAMA, "num_key_value_heads": 1, "num_local_experts": 3},  # experts, fused in memory alone
    "NomicBert": LLAMA,  # queries, keys and values, fused in the file alone
    "T5": {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},  # tied three times
    "Bert": LLAMA,  # tied biases
}


def unlike(model):
    """A state with values that the module does not have."""
    state = ll.copy_state(ll.init_state(model))
    with torch.no_grad():
        for tensor in state.params.values():
            tensor.add_(torch.rand(tensor.shape))
    return state


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert type(tensor) is torch.Tensor
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (
            expected[name].dtype,
            expected[name].shape,
            False,
        )
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.every_case
@pytest.mark.parametrize("kind", CASES)
def test_names_and_bits_are_those_that_transformers_saves(kind, tmp_path):
    model = made(kind, **CASES[kind])
    state = unlike(model)
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    pairs = list(ll.checkpoint.iter_weights(model, state))
    ll.checkpoint.save_pretrained(model, state, tmp_path)
    assert len(pairs) == len(dict(pairs))
    same(dict(pairs), safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()} == before


def test_names_and_bits_of_another_module_are_those_of_its_state_dict():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            pass

    model = torch.compile(Tied())
    state = unlike(model)
    expected = ll.checkpoint.state_dict(model, state)
    del expected["head.weight"], expected["_extra_state"]  # the second name of a tied tensor, and no tensor
    same(dict(ll.checkpoint.iter_weights(model, state)), expected)


# The version


def test_a_donated_step_in_the_middle_ends_the_iteration_and_a_pure_one_does_not():
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    state = ll.copy_state(ll.init_state(model, optimizer))
    pure, donated = (ll.make_train_step(grad_fn, optimizer, donate=donate) for donate in (False, True))
    weights = ll.checkpoint.iter_weights(model, state)
    name, tensor = next(weights)
    assert torch.equal(tensor, state.params[name])
    assert pure(state, torch.ones(3, 2))[0].step == 1
    expected = state.params["bias"].detach().clone()
    assert torch.equal(dict(weights)["bias"], expected)
    weights = ll.checkpoint.iter_weights(model, state)
    next(weights)
    donated(state, torch.ones(3, 2))
    with pytest.raises(ll.DonatedStateError):
        next(weights)
    with pytest.raises(ll.DonatedStateError):  # at the call, and not at the first weight
        ll.checkpoint.iter_weights(model, state)


# Adapters


def adapted(kind="Llama", *, targets=("q_proj", "down_proj"), settings=None, **of_lora):
    model = made(kind, **(CASES[kind] if settings is None else settings))
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=list(targets), **of_lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for an old name of transformers
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        return peft.get_peft_model(model, config)


ADAPTERS = {
    "of linear layers": {},
    "with biases": {"lora_bias": True, "targets": ("c_attn",), "kind": "GPT2", "fan_in_fan_out": True},
    "by direction and length": {"use_dora": True},
    "with a saved module": {"modules_to_save": ["lm_head"]},
    "of embeddings": {"targets": ("embed_tokens", "v_proj"), "use_rslora": True},
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_are_merged_with_the_bits_of_peft(case, tmp_path):
    model = adapted(**ADAPTERS[case])
    state = unlike(model)
    before = ll.copy_state(state)
    found = dict(ll.checkpoint.iter_weights(model, state, merge_adapters=True))
    assert all(torch.equal(state.params[name], tensor) for name, tensor in before.params.items())
    reference = copy.deepcopy(model)
    reference.load_state_dict(ll.checkpoint.state_dict(model, state))
    merged = reference.merge_and_unload()
    merged.save_pretrained(tmp_path)
    same(found, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert not any("lora" in name for name in found)


def test_a_merged_weight_is_that_of_the_formula():
    model = adapted().double()
    state = unlike(model)
    found = dict(ll.checkpoint.iter_weights(model, state, merge_adapters=True))
    path = "base_model.model.model.layers.1.mlp.down_proj."
    base, a, b = (
        state.params[path + leaf].detach()
        for leaf in ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    )
    torch.testing.assert_close(found["model.layers.1.mlp.down_proj.weight"], base + 3 / 2 * b @ a, rtol=0, atol=1e-14)


def test_by_default_adapters_come_under_the_names_of_peft():
    model = adapted()
    state = unlike(model)
    same(dict(ll.checkpoint.iter_weights(model, state)), ll.checkpoint.state_dict(model, state))


def test_what_cannot_be_merged_or_saved_is_refused_at_the_call():
    model = made("Llama", **LLAMA)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no adapters .*get_peft_model"):
        ll.checkpoint.iter_weights(model, ll.init_state(model), merge_adapters=True)
    tied = adapted(targets=("embed_tokens",), settings={**LLAMA, "tie_word_embeddings": True})
    with (
        pytest.warns(match="tied_target_modules"),  # by peft
        pytest.raises(ValueError, match=r"model.embed_tokens.weight is adapted .* lm_head.weight"),
    ):
        ll.checkpoint.iter_weights(tied, ll.init_state(tied), merge_adapters=True)
    tokens = adapted(trainable_token_indices={"embed_tokens": [1, 2]})
    with pytest.raises(ValueError, match=r"embed_tokens.token_adapter of this model cannot be merged one by one"):
        ll.checkpoint.iter_weights(tokens, ll.init_state(tokens), merge_adapters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about its own options and its merge
        sparse = peft.get_peft_model(made("Llama", **LLAMA), peft.ShiraConfig(target_modules=["q_proj"], r=2))
        with pytest.raises(ValueError, match=r"peft's ShiraModel reads values to merge its adapters"):
            ll.checkpoint.iter_weights(sparse, ll.init_state(sparse), merge_adapters=True)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[
        0
    ].mlp.gate_proj.weight  # which the class does not know
    with pytest.raises(ValueError, match=r"gate_proj.weight, .*up_proj.weight are one tensor"):
        ll.checkpoint.iter_weights(model, ll.init_state(model))
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"quantized"):
        ll.checkpoint.iter_weights(model, ll.init_state(model))
    with pytest.raises(ValueError, match=r"the state's parameters are not those of this Linear"):
        ll.checkpoint.iter_weights(
            nn.Linear(2, 1), ll.init_state(nn.Linear(3, 1).requires_grad_(True)).replace(params={})
        )


# Memory on two ranks


class Live(TorchDispatchMode):
    """Count the bytes of all memory that torch's operators return while it is alive, except what there was before.

    Memory is counted once, by its storage, and until that is freed. gloo keeps copies of its own in C++, and lets go of a
    tensor a moment after the operator has returned, so the counter is read when its thread has done so. NCCL writes into
    the given tensor.
    """

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet(storage(tensor) for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and storage(leaf) not in self.seen:
                memory = storage(leaf)
                self.seen.add(memory)
                self.now += memory.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self.freed, memory.nbytes())
        return out

    def freed(self, size):
        self.now -= size


def storage(tensor):
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor).untyped_storage()


def on_two_ranks(folder):
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    settings = {**CASES["GPT2"], "n_embd": 64}
    with torch.device("cpu"):
        whole = made("GPT2", **settings)
        whole.resize_token_embeddings(2001)  # which two ranks do not divide
        whole.tie_weights()
    model = copy.deepcopy(whole)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x, labels=x).loss)
    optimizer = adamw(0.1)
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state, _ = step(ll.init_state(model, optimizer), torch.arange(8).view(2, 4))
    expected = ll.checkpoint.state_dict(model, state)
    del expected["lm_head.weight"]  # tied; transformers keeps the other name

    largest = 2001 * 64 * 4
    shards = [*state.params.values(), *state.buffers.values()]
    with Live(shards) as live:
        count = 0
        for name, tensor in ll.checkpoint.iter_weights(model, state):
            assert not isinstance(tensor, DTensor)
            assert torch.equal(tensor, expected[name]), name
            count += 1
            del tensor
    assert count == len(expected)
    assert largest <= live.peak <= 1.05 * largest, live.peak / largest
    assert state.step == 1

    # One that is saved whole holds it all, which shows that the counter sees it.
    with Live(shards) as live:
        kept = ll.checkpoint.state_dict(model, state)
    assert live.peak > 1.5 * largest
    del kept
    ll.checkpoint.save_pretrained(model, state, folder)
    same(dict(ll.checkpoint.iter_weights(model, state)), safetensors.torch.load_file(folder / "model.safetensors"))

    # Adapters
    model = adapted("GPT2", targets=("c_attn", "c_fc"), settings=settings, fan_in_fan_out=True)
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in [*whole.named_parameters()]:
            torch.manual_seed(len(name))
            parameter.add_(torch.rand(parameter.shape))
    model.load_state_dict(whole.state_dict())
    for block in model.base_model.model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = ll.init_state(model)
    found = dict(ll.checkpoint.iter_weights(model, state, merge_adapters=True))
    merged = whole.merge_and_unload().state_dict()
    del merged["lm_head.weight"]
    same(found, merged)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_gather_one_tensor_at_a_time(tmp_path):
    launch(2, on_two_ranks, tmp_path)
