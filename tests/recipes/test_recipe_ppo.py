"""The recipe ppo_cartpole: its updates are those of CleanRL's ppo.py, its environment is gymnasium's CartPole-v1."""

import itertools
import math

import torch
from safetensors.torch import load_file
from test_recipes import load

import looplib as ll

recipe = load("ppo_cartpole")

SMALL = {"iterations": 4, "environments": 4, "steps": 32, "passes": 4, "minibatches": 2, "lr": 1e-2, "width": 16}


def advantages_of(rollout):
    """Generalized advantages as the sum that defines them: discounted surprises up to the end of the episode."""
    after = torch.cat([rollout["values"][1:], rollout["last_values"][None]])
    going_on = 1.0 - rollout["ended"].double()
    surprises = rollout["rewards"] + 0.99 * after * going_on - rollout["values"]
    advantages = []
    for t in range(len(surprises)):
        weight, total = torch.ones(surprises.shape[1]), torch.zeros(surprises.shape[1])
        for later in range(t, len(surprises)):
            total = total + weight * surprises[later]
            weight = weight * 0.99 * 0.95 * going_on[later]
        advantages.append(total)
    return torch.stack(advantages)


def update(model, adam, rollout, batch, orders):
    """Train on a rollout as ppo.py does, in its order of operations: the number of updates."""
    observations, actions = rollout["observations"].reshape(-1, 4), rollout["actions"].reshape(-1)
    log_probs, old = rollout["log_probs"].reshape(-1), rollout["values"].reshape(-1)
    returns, updates = batch["advantages"] + old, 0
    for order in orders:
        for chosen in order.view(2, -1):
            policy = torch.distributions.Categorical(logits=model.actor(observations[chosen]))
            new = model.critic(observations[chosen]).view(-1)
            change = policy.log_prob(actions[chosen]) - log_probs[chosen]
            advantages = batch["advantages"][chosen]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            losses = torch.maximum(-advantages * change.exp(), -advantages * torch.clamp(change.exp(), 0.8, 1.2))
            bounded = old[chosen] + torch.clamp(new - old[chosen], -0.2, 0.2)
            errors = torch.maximum((new - returns[chosen]) ** 2, (bounded - returns[chosen]) ** 2)
            loss = losses.mean() - 0.01 * policy.entropy().mean() + 0.5 * (0.5 * errors.mean())
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            updates += 1
        if (change.exp() - 1 - change).mean() > 0.01:
            break
    return updates


def recorded(monkeypatch, recipe, name):
    """Results of a function of the recipe, from now on."""
    function, results = getattr(recipe, name), []

    def record(*args, **options):
        results.append(function(*args, **options))
        return results[-1]

    monkeypatch.setattr(recipe, name, record)
    return results


def test_its_updates_are_those_of_cleanrl(float64, tmp_path, monkeypatch):
    played, batches = (recorded(monkeypatch, recipe, name) for name in ("collect", "with_advantages"))
    recipe.main(**SMALL, target_kl=0.01, directory=str(tmp_path))
    (found,) = ll.checkpoint_io(tmp_path / "checkpoints").steps()
    tensors = load_file(found.path / "tensors.safetensors")

    torch.manual_seed(0)
    model = recipe.ActorCritic(16)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5, fused=True)  # the kernel that ll.optimizer takes
    envs, counts = recipe.start(4), []
    for iteration, ((after, rollout, orders), batch) in enumerate(zip(played, batches, strict=True)):
        # Played by the model as it is now, in the environments as they were left; each pass has an order of its own.
        assert torch.equal(rollout["observations"][0], envs["observations"])
        later = recipe.move(rollout["observations"].flatten(0, 1), rollout["actions"].flatten()).view(32, 4, 4)[:-1]
        ended = rollout["ended"][:-1]
        torch.testing.assert_close(rollout["observations"][1:][~ended], later[~ended])
        policy, values = model(rollout["observations"])
        torch.testing.assert_close(rollout["log_probs"], policy.log_prob(rollout["actions"]).detach())
        torch.testing.assert_close(rollout["values"], values.detach())
        torch.testing.assert_close(rollout["last_values"], model(after["observations"])[1].detach())
        torch.testing.assert_close(batch["advantages"], advantages_of(rollout).flatten())
        assert {tuple(order.sort().values.tolist()) for order in orders} == {tuple(range(128))}
        assert len(orders.unique(dim=0)) == 4
        adam.param_groups[0]["lr"] = (1.0 - iteration / 4) * 1e-2
        counts.append(update(model, adam, rollout, batch, orders))
        envs = after
    assert found.step == sum(counts) >= 20
    assert min(counts) < 8  # a stop at target_kl
    assert any(rollout["ended"].any() for _, rollout, _ in played)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensors[f"/params/{name}"], tensor.detach())
    for name, tensor in envs.items():
        assert torch.equal(tensors[f"/extra/{name}"], tensor)


def gymnasiums(x, x_dot, theta, theta_dot, action):
    """The equations of CartPole-v1, for one environment: the next state, and whether the episode is terminated."""
    gravity, masscart, masspole, length, force_mag, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    force = force_mag if action == 1 else -force_mag
    temp = (force + masspole * length * theta_dot**2 * math.sin(theta)) / (masspole + masscart)
    thetaacc = (gravity * math.sin(theta) - math.cos(theta) * temp) / (
        length * (4.0 / 3.0 - masspole * math.cos(theta) ** 2 / (masspole + masscart))
    )
    xacc = temp - masspole * length * thetaacc * math.cos(theta) / (masspole + masscart)
    after = x + tau * x_dot, x_dot + tau * xacc, theta + tau * theta_dot, theta_dot + tau * thetaacc
    return after, abs(after[0]) > 2.4 or abs(after[2]) > 12 * 2 * math.pi / 360


def test_a_step_of_the_environment_is_that_of_gymnasium(float64):
    states = [
        *itertools.product((-2.41, 0.3, 2.39), (-1.5, 0.49, 0.51), (-0.2, 0.01, 0.209), (-2.0, -0.03, 0.1), (0, 1)),
        (0.0, 0.0, 0.0, 0.0, 1),
    ]
    observations = torch.tensor([state[:4] for state in states])
    actions = torch.tensor([state[4] for state in states])
    expected, terminated = zip(*(gymnasiums(*state) for state in states), strict=True)
    expected = torch.tensor(expected)
    torch.testing.assert_close(recipe.move(observations, actions), expected, rtol=1e-13, atol=1e-13)

    lengths = torch.where(torch.arange(len(states)) % 3 == 0, 499, 20)  # the longest episode has 500 steps
    envs = {"observations": observations, "lengths": lengths, "returns": torch.full_like(lengths, 7)}
    after, ended = recipe.advance(envs, actions)
    assert ended.tolist() == [
        fallen or length == 499 for fallen, length in zip(terminated, lengths.tolist(), strict=True)
    ]
    assert 0 < sum(terminated) < len(states) // 2
    torch.testing.assert_close(after["observations"][~ended], expected[~ended], rtol=1e-13, atol=1e-13)
    assert after["observations"][ended].abs().max() <= 0.05
    assert after["observations"][ended].unique().numel() == 4 * ended.sum()
    assert torch.equal(after["lengths"], torch.where(ended, 0, lengths + 1))
    assert torch.equal(after["returns"], torch.where(ended, lengths + 1, 7))
