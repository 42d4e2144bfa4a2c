"""The recipe grpo_arithmetic beside a plain loop, with the loss and the advantages of TRL's GRPOTrainer."""

import math

import pytest
import torch
from safetensors.torch import load_file
from test_recipes import load

import looplib as ll

recipe = load("grpo_arithmetic")

SETTINGS = {"epochs": 1, "solved": 8800, "questions": 20, "group": 4, "iterations": 2, "width": 8, "depth": 1}
SETTINGS |= {"lr": 1e-2, "beta": 0.1, "max_norm": 0.5}  # 10 batches of the 200 sums without answers


def test_the_first_20_updates_are_those_of_a_raw_loop(float64, tmp_path, monkeypatch):
    def even(tokens):  # a network that has learned nothing hardly ever gets the reward of the recipe
        return float(tokens[6:].sum() % 2 == 0)

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


@pytest.mark.every_case
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
