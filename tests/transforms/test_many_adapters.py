"""Many adapters on one frozen base in one step: against loops of torch and peft, one for each, and the bytes of one base."""

import copy
import json
import os
import warnings

import peft
import pytest
import safetensors.torch
import torch
import transformers
from files import DATA, damage, forged, forged_header, same
from ranks import launch
from shared import equal
from torch import nn

import looplib as ll
from looplib.transforms import compute_members, per_member, stack_states, unstack_states

RATES = [1e-3, 1e-2, 3e-2, 1e-1]


class Adapted(nn.Module):
    """Frozen layers, with low-rank updates that are trained, and a buffer that moves."""

    def __init__(self, width=32, rank=2):
        super().__init__()
        self.first, self.last = (nn.Linear(width, width).requires_grad_(False) for _ in range(2))
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.norm(self.last(x) + self.b(self.a(x)))


def made(seed=0):
    torch.manual_seed(seed)
    return Adapted().double()


def mean_square(model, batch):
    return (model(batch) - batch.roll(1)).square().mean()


def batch_of(step):
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(step)).double()


def adamw(lr):
    return ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.1)


def step_and_stack(model, rates=RATES, compiled=False, **options):
    """The step of all members, and their stack, each with adapters of its own."""
    step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, mean_square), adamw(per_member(rates)), **options))
    return ll.compile_step(step) if compiled else step, stack_states(members_of(model, rates))


def members_of(model, rates=RATES):
    states = []
    for number in range(len(rates)):
        state = ll.init_state(model, adamw(per_member(rates)), seed=number)
        states.append(state.replace(params={**state.params, **adapter(model, number)}))
    return states


def adapter(model, number):
    torch.manual_seed(100 + number)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_() for name, p in trained.items()}


def raw_loop(model, number, lr, steps):
    """The same run in plain torch: the module, and its losses."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in adapter(model, number).items():
            model.get_parameter(name).copy_(value)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model, batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def held(state):
    """Bytes of the memory behind a state's tensors, each storage once."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def size(tree):
    return sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def base_and_members(model):
    """Bytes of one base and of everything else of each member, from the state of a single run."""
    state = ll.init_state(model, adamw(0.1))
    frozen = size({name: tensor for name, tensor in state.params.items() if not tensor.requires_grad})
    return frozen + len(RATES) * (size(state) - frozen)


WAYS = {"pure": {}, "donated": {"donate": True}, "compiled": {"donate": True, "compiled": True}}
CASES = [pytest.param("pure", 20, marks=pytest.mark.slow), ("donated", 20)] + [
    pytest.param(way, 50, marks=pytest.mark.slow) for way in WAYS
]


@pytest.mark.every_case
@pytest.mark.parametrize(("way", "steps"), CASES)
def test_each_member_follows_its_own_run_in_the_memory_of_one_base(way, steps, tmp_path):
    model = made()
    step, stack = step_and_stack(model, **WAYS[way])
    expected = base_and_members(model)
    assert held(stack) == expected < 0.5 * size(stack)
    ckpt, losses = ll.checkpoint_io(tmp_path), []
    for number in range(steps):
        if number == 2 * steps // 5:
            ckpt.save(stack)
            assert expected < ckpt.latest().bytes < 1.2 * expected
            stack = ckpt.restore(step_and_stack(model)[1])
        if number == 3 * steps // 5:
            stack = ll.copy_state(stack)
        if number == 4 * steps // 5:
            stack = stack_states(unstack_states(stack))
        stack, metrics = step(stack, batch_of(number))
        losses.append([values["loss"] for values in compute_members(metrics)])
        assert held(stack) == expected
    assert step.compiler.compilations == 1
    for number, (member, lr) in enumerate(zip(unstack_states(stack), RATES, strict=True)):
        alone, of_one = raw_loop(model, number, lr, steps)
        torch.testing.assert_close([row[number] for row in losses], of_one, rtol=0, atol=1e-12)
        for name, tensor in {**dict(alone.named_parameters()), **dict(alone.named_buffers())}.items():
            found = {**member.params, **member.buffers}[name]
            torch.testing.assert_close(found.detach(), tensor.detach(), rtol=0, atol=1e-12)
            assert found.requires_grad == tensor.requires_grad
        frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
        assert equal({name: member.params[name] for name in frozen}, frozen)


# Checkpoints of a base that is larger than everything else


def mostly_base(model, members=8, lr=0.1):
    """A stack whose base, once for each member, is larger than its checkpoint."""
    start = ll.init_state(model, adamw(lr))
    stack = stack_states([ll.state.fold_in(start, number) for number in range(members)])
    random = {n: torch.randn_like(t).requires_grad_() for n, t in stack.params.items() if t.requires_grad}
    return stack.replace(params={**stack.params, **random}, step=1)


def wide(seed=0):
    torch.manual_seed(seed)
    return Adapted(width=96)


def only_trained(name, tensor):
    return tensor.requires_grad


@pytest.mark.every_case
@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True}, {"select": only_trained}], ids=["", "async", "select"]
)
@pytest.mark.parametrize("members", [2, 3, 16])
def test_a_stack_comes_back_from_a_file_smaller_than_its_base_for_each_member(tmp_path, members, options):
    model = wide()
    stack, ckpt = mostly_base(model, members), ll.checkpoint_io(tmp_path, **options)
    ckpt.save(stack)
    ckpt.wait()
    assert members < 3 or size(stack.params["first.weight"]) > ckpt.latest().bytes
    base = copy.deepcopy(model)
    if "select" not in options:  # which takes the base from the state
        base = wide(seed=1)
        base.a, base.b = model.a, model.b
    found = ckpt.restore(mostly_base(base, members))
    assert same(found, stack)
    assert held(found) == held(stack)


def test_safetensors_reads_the_shared_base_as_one(tmp_path):
    stack = mostly_base(wide())
    path = ll.checkpoint_io(tmp_path).save(stack)
    found = safetensors.torch.load_file(path / DATA)
    for name, tensor in stack.params.items():
        expected = tensor if tensor.requires_grad else tensor[:1]
        assert torch.equal(found[f"/params/{name}"], expected.detach())


def of_shape(*shape):
    return lambda path: forged(path, lambda m: m["tensors"]["/params/first.weight"].update(shape=shape))


def in_header(box, shape):
    def change(header):
        header["__metadata__"]["/params/first.weight"] = json.dumps(box)
        header["/params/first.weight"]["shape"] = shape

    return lambda path: forged_header(path / DATA, change)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda path: os.truncate(path / DATA, (path / DATA).stat().st_size - 4),
        of_shape(8, 2**20, 2**20),
        of_shape(2**40, 96, 96),
        of_shape(9, 96, 96),
        of_shape(),
        in_header([[0, 1], [0, 95], [0, 96]], [1, 95, 96]),
        in_header([[1, 2], [0, 96], [0, 96]], [1, 96, 96]),
        lambda path: forged(path, lambda m: m.update(shared=["/params/none"])),
        lambda path: forged(path, lambda m: m.update(shared=5)),
    ],
)
def test_damage_of_a_shared_base_is_found(tmp_path, harm):
    ckpt, stack = ll.checkpoint_io(tmp_path), mostly_base(wide())
    ckpt.save(stack)
    harm(ckpt.save(stack.replace(step=2)))
    with pytest.warns(UserWarning, match=r"step-00000002.* (damaged|do not have all of /params/first.weight)"):
        found = ll.checkpoint_io(tmp_path).restore(mostly_base(wide()))
    assert found.step == 1
    assert equal(found.params, stack.params)


def test_a_shared_base_of_another_shape_stays_shared(tmp_path):
    ckpt, stack = ll.checkpoint_io(tmp_path), mostly_base(wide())
    ckpt.save(stack)
    found = ckpt.restore(mostly_base(Adapted(width=80)), resized=("params.*", "buffers.*"))
    assert equal(found.params, stack.params)
    assert held(found.params) == held(stack.params)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"select": only_trained}], ids=["all", "select"])
def test_another_number_of_members_is_named(tmp_path, options):
    model = wide()
    state = ll.init_state(model, adamw(0.1)).replace(step=1)
    saved = {"a stack of 2 members": mostly_base(model, 2), "no stack": state}
    for title, tree in saved.items():
        ckpt = ll.checkpoint_io(tmp_path / title, **options)
        ckpt.save(tree)
        others = {"a stack of 3 members": mostly_base(model, 3), **{key: saved[key] for key in saved if key != title}}
        for other, template in others.items():
            with pytest.raises(ValueError, match=f"was saved from {title}, and the state to restore into is {other}"):
                ckpt.restore(template)


def on_ranks(folder):
    torch.distributed.init_process_group("gloo")
    stack, ckpt = mostly_base(wide()), ll.checkpoint_io(folder)
    ckpt.save(stack)
    found = ckpt.restore(mostly_base(wide()))
    assert equal(found.params, stack.params)
    assert held(found) == held(stack)


@pytest.mark.slow
def test_two_ranks_save_and_restore_one_stack_that_one_process_reads(tmp_path):
    launch(2, on_ranks, tmp_path)
    assert same(ll.checkpoint_io(tmp_path).restore(mostly_base(wide(seed=1))), mostly_base(wide()))


# What is shared, and what is not


def test_members_with_different_bases_keep_their_own_and_a_checkpoint_of_one_kind_restores_into_the_other(tmp_path):
    model = made()
    _, shared = step_and_stack(model)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items() if name.startswith("first")}
    states = members_of(model)
    states[2] = states[2].replace(params={**states[2].params, **other})
    own = stack_states(states)
    assert held(own) == held(shared) + (len(RATES) - 1) * size(other)
    assert torch.equal(own.params["first.weight"][2], other["first.weight"])
    assert torch.equal(own.params["first.weight"][1], model.first.weight)
    for number, (saved, template) in enumerate([(shared, own), (own, shared)]):
        ckpt = ll.checkpoint_io(tmp_path / str(number))
        ckpt.save(saved.replace(step=1))
        found = ckpt.restore(template)
        assert equal(found.params, saved.params)
        assert held(found) == held(saved)
        # Unfrozen in the meantime, each member has its own to train.
        thawed = {n: t.detach().clone().requires_grad_() for n, t in template.params.items()}
        found = ckpt.restore(template.replace(params=thawed))
        assert equal(found.params, saved.params)
        assert all(tensor.stride(0) for tensor in found.params.values())


def test_copies_of_members_do_not_share_memory_with_the_stack_or_the_module():
    model = made()
    _, stack = step_and_stack(model)
    states = [stack, ll.copy_state(stack), unstack_states(stack)[0], ll.init_state(model)]
    places = [{tensor.untyped_storage().data_ptr() for tensor in state.params.values()} for state in states]
    assert len(set.union(*places)) == sum(map(len, places))
    one, other = unstack_states(stack)[:2]
    assert one.params["first.weight"] is other.params["first.weight"]
    assert one.params["a.weight"] is not other.params["a.weight"]


def test_a_base_that_is_not_frozen_is_copied_for_each_member():
    model = made()
    model.first.requires_grad_(True)
    stack = stack_states([ll.init_state(model, seed=seed) for seed in range(3)])
    assert stack.params["first.weight"].stride(0) > 0
    assert stack.params["last.weight"].stride(0) == 0
    alone = stack_states([ll.init_state(model)])
    assert held(alone) == size(alone)


def test_a_constant_is_held_once_as_a_frozen_parameter_and_for_each_member_as_a_buffer():
    model, mask = nn.Linear(2, 2), torch.ones(64, 64, dtype=torch.int64).tril()
    before = held(stack_states([ll.init_state(model, seed=seed) for seed in range(8)]))
    model.register_buffer("mask", mask)
    as_buffer = held(stack_states([ll.init_state(model, seed=seed) for seed in range(8)]))
    del model.mask
    model.mask = nn.Parameter(mask, requires_grad=False)
    as_parameter = held(stack_states([ll.init_state(model, seed=seed) for seed in range(8)]))
    assert (as_buffer - before, as_parameter - before) == (8 * mask.nbytes, mask.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_a_frozen_parameter_that_thaws_gets_memory_for_each_member(donate):
    model = made().requires_grad_(False)
    model.first.bias.requires_grad_(True)
    start = ll.init_state(model, adamw(0.1))
    model.first.bias.requires_grad_(False)
    start = ll.copy_state(start)  # in which it requires no gradient
    model.first.bias.requires_grad_(True)

    def step_of(lr, **options):
        return ll.make_train_step(ll.make_grad_fn(model, mean_square), adamw(lr), **options)

    step, one_by_one = ll.vmap_step(step_of(per_member(RATES), donate=donate)), [step_of(lr) for lr in RATES]
    stack, states = stack_states([start] * len(RATES), same_seeds=True), [start] * len(RATES)
    assert stack.params["first.bias"].stride(0) == 0
    for number in range(3):
        stack, _ = step(stack, batch_of(number))
        states = [one_by_one[k](state, batch_of(number))[0] for k, state in enumerate(states)]
        assert stack.params["first.bias"].stride(0) > 0
        assert stack.params["first.weight"].stride(0) == 0
    for member, state in zip(unstack_states(stack), states, strict=True):
        assert not torch.equal(state.params["first.bias"], start.params["first.bias"])
        for name, tensor in state.params.items():
            torch.testing.assert_close(member.params[name], tensor, rtol=0, atol=1e-12)


def test_evaluation_and_prediction_take_shared_parameters():
    model = made()
    _, stack = step_and_stack(model)
    model.eval()
    predict_step = ll.vmap_step(ll.make_predict_step(model, lambda model, x: model(x)))
    eval_step = ll.vmap_step(ll.make_eval_step(model, lambda model, x: {"loss": mean_square(model, x)}))
    found, losses = predict_step(stack, batch_of(0)), compute_members(eval_step(stack, batch_of(0)))
    for number in range(len(RATES)):
        alone, _ = raw_loop(model, number, 0.1, 0)
        torch.testing.assert_close(found[number], alone(batch_of(0)).detach(), rtol=0, atol=1e-12)
        assert losses[number]["loss"] == pytest.approx(mean_square(alone, batch_of(0)).item(), abs=1e-12)


# peft


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for an old name of transformers
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    return model.double()


def tokens(step):
    return torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(step))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [12, 50])
def test_members_of_peft_follow_their_own_runs_and_go_out_as_adapters_that_peft_loads(tmp_path, steps):
    model = language_model()
    optimizer = adamw(per_member(RATES))
    step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, ll.losses.model_loss), optimizer, donate=True))
    start = ll.init_state(model, optimizer)
    stack = stack_states([ll.state.fold_in(start, number) for number in range(len(RATES))])
    assert held(stack) == base_and_members(model)
    for number in range(steps):
        stack, _ = step(stack, {"input_ids": tokens(number), "labels": tokens(number)})
    assert held(stack) == base_and_members(model)
    for number, (member, lr) in enumerate(zip(unstack_states(stack), RATES, strict=True)):
        alone = copy.deepcopy(model)
        raw = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)
        for at in range(steps):
            raw.zero_grad()
            alone(input_ids=tokens(at), labels=tokens(at)).loss.backward()
            raw.step()
        alone.save_pretrained(tmp_path / f"peft{number}")
        ll.checkpoint.save_pretrained(model, member, tmp_path / f"ours{number}")
        expected, found = (peft.utils.load_peft_weights(tmp_path / f"{of}{number}") for of in ("peft", "ours"))
        assert found.keys() == expected.keys()
        assert any(tensor.any() for name, tensor in found.items() if "lora_B" in name)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
