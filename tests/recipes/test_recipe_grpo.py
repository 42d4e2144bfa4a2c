"""The recipe grpo_arithmetic beside a plain loop, with the loss and the advantages of TRL's GRPOTrainer."""

import math
import re
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from shared import one_report
from test_recipes import load

import looplib as ll

recipe = load("grpo_arithmetic")

SETTINGS = {"epochs": 1, "solved": 8800, "questions": 20, "group": 4, "iterations": 2, "width": 8, "depth": 1}
SETTINGS |= {"lr": 1e-2, "beta": 0.1, "max_norm": 0.5}  # 10 batches of the 200 sums without answers


def even(tokens):  # a network that has learned nothing hardly ever gets the reward of the recipe
    return float(tokens[6:].sum() % 2 == 0)


@pytest.mark.slow
def test_the_first_20_updates_are_those_of_a_raw_loop(float64, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "reward", even)
    monkeypatch.setattr(recipe, "warm_up", lambda *args: None)
    recipe.main(**SETTINGS, directory=str(tmp_path))
    (found,) = ll.checkpoint_io(tmp_path / "checkpoints").steps()
    tensors = load_file(found.path / "tensors.safetensors")

    torch.manual_seed(0)
    model, reference = recipe.Transformer(8, 1), recipe.Transformer(8, 1)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = ll.make_loader(recipe.load_data(8800)[1], batch_size=20, drop_last=True)
    updates, clipped = 0, 0

    def logps_of(network, tokens):
        return network(tokens).log_softmax(-1)[:, 5:-1].gather(2, tokens[:, 6:, None])[..., 0]

    for questions in loader(ll.TrainState(epoch_length=10)):
        drawn = []
        with torch.no_grad():
            for index in range(4):
                state = ll.state.fold_in(ll.TrainState(step=updates), index)
                torch.manual_seed(ll.debug.step_seed(state))
                tokens = questions
                for _ in range(4):
                    chances = model(tokens)[:, -1].softmax(-1)
                    tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
                drawn.append(tokens)
            tokens = torch.stack(drawn, 1).reshape(80, 10)
            old, ref = logps_of(model, tokens), logps_of(reference, tokens)
        rewards = torch.tensor([even(line) for line in tokens])
        means = rewards.view(-1, 4).mean(1).repeat_interleave(4)
        stds = rewards.view(-1, 4).std(1).repeat_interleave(4)
        advantages = ((rewards - means) / (stds + 1e-4)).unsqueeze(1)
        is_eos = tokens[:, 6:] == 0
        eos_idx = torch.where(is_eos.any(1), is_eos.int().argmax(1), 4)
        mask = (torch.arange(4).expand(80, 4) <= eos_idx[:, None]).int()
        for _ in range(2):
            logps = logps_of(model, tokens)
            coef = torch.exp(logps - old)
            kl = torch.exp(ref - logps) - (ref - logps) - 1
            clamped = torch.clamp(coef, 0.8, 1.2)
            loss = -torch.min(coef * advantages, clamped * advantages) + 0.1 * kl
            loss = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * updates / 20)) / 2
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            updates += 1
            clipped += int(((coef != clamped) * mask).sum())

    assert updates == 20
    assert clipped > 20
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensors[f"/params/{name}"], tensor.detach(), rtol=1e-9, atol=1e-10)
        first = dict(reference.named_parameters())[name].detach()
        assert torch.equal(tensors[f"/extra/reference/{name}"], first)


# No mismatch between the answers as they were drawn and as an update sees them


def drawn_answers(width=64, depth=2, seed=0):
    """A model, and answers that it has drawn in batches of 16, one draw after the other: tokens and log-probabilities."""
    torch.manual_seed(seed)
    model = recipe.Transformer(width, depth)
    draw_step, state = ll.make_predict_step(model, recipe.draw), ll.init_state(model)
    asked = recipe.load_data(2000)[1][:16]
    parts = [draw_step(ll.state.fold_in(state, index), asked) for index in range(4)]
    return model, state, *map(torch.cat, zip(*parts, strict=True))


def test_an_update_has_the_bits_with_which_answers_were_drawn_or_a_module_is_named():
    model, state, tokens, old = drawn_answers()
    try:
        score_step = ll.make_predict_step(model, recipe.log_probabilities)
        ll.testing.assert_samples_independent(score_step, state, tokens, tolerance=0)
    except AssertionError as error:  # a processor whose kernels round differently for another size of the batch
        assert re.search(r"The first module that does so is \w.*\(\w+\)", str(error)), error  # noqa: PT017
        return
    model.train()
    for size in (1, 2, 3, 7, 16, 63, 64):
        now = torch.cat([recipe.log_probabilities(model, microbatch) for microbatch in tokens.split(size)])
        assert now.requires_grad
        assert torch.equal(now, old), size


@pytest.mark.every_case
@pytest.mark.parametrize("microbatches", [1, 2, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_the_ratio_of_the_first_update_is_one_for_any_microbatches(microbatches):
    model, state, tokens, old = drawn_answers()
    batch = {"tokens": tokens, "old": old, "reference": old - 0.1, "advantages": torch.linspace(-1, 1, 64)}
    loss_fn = partial(recipe.grpo_loss, epsilon=0.2, beta=0.1)
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches)
    found = ll.compute(grad_fn(state, batch).metrics)
    # Of fewer rows, a CPU may take another kernel, whose last bit differs.
    assert found["ratio"] == (1.0 if microbatches == 1 else pytest.approx(1.0, abs=1e-7))
    assert found["clipped"] == 0


@pytest.mark.slow
def test_the_run_prints_a_first_ratio_of_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "reward", even)
    recipe.main(**SETTINGS | {"width": 16}, warmup_epochs=1, directory=str(tmp_path))
    (row,) = ll.log.read_jsonl(tmp_path / "log.jsonl")
    assert row["first_ratio"] == 1.0
    assert row["ratio"] != 1.0  # of the second update on the same answers
    assert re.search(r"first_ratio 1\s", capsys.readouterr().out)


def loss_by_formula(logps, old, reference, advantages, mask, epsilon, beta):
    """The loss of GRPOTrainer with loss_type="grpo" and importance_sampling_level="token"."""
    importance = torch.exp(logps - old)
    kept = torch.clamp(importance, 1 - epsilon, 1 + epsilon)
    losses = -torch.min(importance * advantages.unsqueeze(1), kept * advantages.unsqueeze(1))
    losses = losses + beta * (torch.exp(reference - logps) - (reference - logps) - 1)
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def loss_of_trl(logps, old, reference, advantages, mask, epsilon, beta):
    """The loss that TRL's own GRPOTrainer computes from the same log-probabilities."""
    from trl import GRPOTrainer  # takes ten seconds

    trainer = GRPOTrainer.__new__(GRPOTrainer)  # without a tokenizer and a pretrained model
    trainer.__dict__ |= {
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=None),
        "accelerator": SimpleNamespace(gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logps, torch.zeros_like(logps), None),
    }
    settings = {"loss_type": "grpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "beta": beta}
    settings |= {"epsilon_low": epsilon, "epsilon_high": epsilon, "off_policy_mask_threshold": None}
    settings |= {"use_vllm": False, "aux_loss_enabled": False, "_entropy_bonus_enabled": False}
    trainer.__dict__ |= settings
    tokens = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": tokens[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": tokens,
        "completion_mask": mask,
    }
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference}
    return trainer._compute_loss(None, inputs)


@pytest.mark.parametrize("loss_of", [loss_by_formula, pytest.param(loss_of_trl, marks=pytest.mark.slow)])
def test_losses_of_5_updates_on_fixed_answers_are_those_of_trl(loss_of):
    model, state, tokens, old = drawn_answers()
    raw = recipe.Transformer(64, 2)
    raw.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    reference = old + 0.2 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(64, generator=generator)
    ends = tokens[:, 6:] == 0
    first_end = torch.where(ends.any(1), ends.int().argmax(1), 4)
    mask = (torch.arange(4)[None] <= first_end[:, None]).int()
    batch = {"tokens": tokens, "old": old, "reference": reference, "advantages": advantages}
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.0, fused=False)
    loss_fn = partial(recipe.grpo_loss, epsilon=0.2, beta=0.1)
    train_step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, loss_fn), 3), optimizer)
    adamw = torch.optim.AdamW(raw.parameters(), lr=1e-2, weight_decay=0.0, fused=False)
    state = ll.init_state(model, optimizer)
    clipped = 0
    for _ in range(5):
        state, metrics = train_step(state, batch)
        logps = raw(tokens[:, :-1]).log_softmax(-1)[:, 5:].gather(2, tokens[:, 6:, None])[..., 0]
        loss = loss_of(logps, old, reference, advantages, mask, 0.2, 0.1)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        assert ll.compute(metrics)["loss"] == pytest.approx(loss.item(), abs=1e-6)
        clipped += ll.compute(metrics)["clipped"]
    assert clipped > 0.1
    assert (mask.sum(1) < 4).any()


@one_report
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12+34=46\n\n", 1),
        ("12+34=46\n7", 1),
        ("99+01=100\n", 1),
        ("03+04=7\n\n\n", 1),
        ("12+34=45\n\n", 0),
        ("12+34=460\n", 0),
        ("12+34=046\n", 0),
        ("12+34=4600", 0),
        ("12+34=\n46\n", 0),
    ],
)
def test_the_reward_is_for_the_right_sum_alone(text, right):
    tokens = torch.tensor([recipe.CHARACTERS.index(character) for character in text])
    assert recipe.reward(tokens) == right


def test_every_sum_is_in_one_part_and_only_the_solved_ones_have_answers():
    solved, train, test = recipe.load_data(2000)
    assert [part.shape for part in (solved, train, test)] == [(2000, 10), (7000, 6), (1000, 6)]
    assert len(torch.cat([solved[:, :6], train, test]).unique(dim=0)) == 10_000
    assert all(recipe.reward(line) == 1 for line in solved)
