"""Each block of the cookbook runs after the lines at its top, and does what its heading says."""

import copy
import importlib
import math
import random
import re
import signal
import statistics
import sys
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
import schedulefree
import torch
from cookbook import BLOCK, INDEX, PAGES, SECTIONS, SETUP, texts
from public import ROOT
from shared import bits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchao.optim import AdamW8bit

import looplib as ll

TASKS = {
    f"{heading} {number}": block
    for heading, text in SECTIONS.items()
    for number, block in enumerate(BLOCK.findall(text), 1)
}
CONTINUES = {  # the run that a block continues
    "Resume with another learning rate 1": "Resume a run 1",
    "Push to the Hugging Face Hub 2": "Push to the Hugging Face Hub 1",
}
TEACHER = "Train against a momentum teacher (DINO, BYOL, distillation) 1"
TARGET, OF_CRITIC = (f"Train against a target network (DQN, TD3, SAC) {number}" for number in (1, 2))
TRIALS = "Find a learning rate 2"
MEMBERS = "Copy a state to several members (federated learning, population-based training)"
CLIENTS = f"{MEMBERS} 1"
SLOW, NOISE = "Average with slow weights (Lookahead) 1", "Estimate a useful batch size (gradient noise scale) 1"
TWO = "Train two networks with two optimizers (a GAN, an actor-critic)"
INTERRUPT = "Interrupt and continue (Ctrl-C, the stop button)"
SWA = "Average the last weights (SWA) of a model with BatchNorm"
PRIORITY = "Sample by priority (prioritized replay)"
GRADIENTS_OF = "Take gradients of hyperparameters"
RETRY = "Retry a batch in smaller microbatches 1"
HISTOGRAMS = "Log histograms of the gradients 1"
SPIKES, SELDOM = "Skip spikes of the gradient norm 1", "Update some parameters less often (Adam beside Muon) 1"
GOLDEN = "Guard a golden run in CI 1"
HANDED_OVER = "Continue in a raw loop 1"
BITS, ONE_PASS = "Keep the optimizer's state in 8 bits", "Update two networks from one forward pass"
RATES = ["lr/generator", "lr/critic"]
EXPECTED_WARNINGS = {"Resume with another learning rate 1": ["lr was 0.01, is 0.0001"]}


def run(task, directory, monkeypatch):
    """The names after the setup, and those after the block."""
    monkeypatch.chdir(directory)
    names = {}
    exec(compile(SETUP, "the lines at the top", "exec"), names)
    before = {name: tensor.detach().clone() for name, tensor in names["model"].named_parameters()}
    if task in CONTINUES:
        exec(TASKS[CONTINUES[task]], dict(names))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated|Use 'content=<...>' to upload raw")
        exec(compile(TASKS[task], task, "exec"), names)
    names["before"], names["warnings"] = before, [str(warning.message) for warning in caught]
    return names


def moved(names):
    return {name for name, tensor in names["state"].params.items() if not torch.equal(tensor, names["before"][name])}


@pytest.fixture
def task(request):
    """A task, with a stand-in for the Hub or for Comet if it needs one."""
    if "Hub" in request.param:
        request.getfixturevalue("the_hub")
    if request.param == "Log to any other tracker 2":
        comet = mock.MagicMock()
        comet.start.return_value.get_key.return_value = "a-key"
        request.getfixturevalue("monkeypatch").setitem(sys.modules, "comet_ml", comet)
    # torchao would compile its update.
    with torch.compiler.set_stance("force_eager") if BITS in request.param else nullcontext():
        yield request.param


def comet_calls():
    experiment = mock.call.start()
    return [
        experiment.log_metrics({"train/loss": 0.5}, step=100),
        experiment.log_text("note: warm", step=100),
        experiment.end(),
    ]


GRADIENTS = [f"gradients/{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]


def histograms():
    """Steps of each histogram that TensorBoard reads."""
    events = EventAccumulator("runs/digits/gradients", {"histograms": 0}).Reload()
    return {name: [event.step for event in events.Histograms(name)] for name in events.Tags()["histograms"]}


def operations(model, samples):
    """Multiply-adds count as two; no gradient goes back to the data."""
    numbers = [layer.weight.numel() for layer in model if hasattr(layer, "weight")]
    return 6 * samples * sum(numbers) - 2 * samples * numbers[0]


def counts(names, *networks):
    """Updates, epochs and samples of each network's state."""
    states = [names[f"{network}_state"] for network in networks]
    return [(state.step, state.epoch, state.samples) for state in states]


def at_the_start(task, until):
    """The names of a block before a line of it."""
    names = {}
    exec(SETUP + TASKS[task].partition(until)[0], names)
    return names


def carried(names):
    """The recurrent network and its hidden state after a raw loop that detaches by hand."""
    start = at_the_start("Carry a hidden state 1", "optimizer = ")
    model = start["rnn"]
    raw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        hidden = names["start"]
        for inputs, targets in names["pieces"]:
            raw.zero_grad()
            loss, aux = start["next_value_loss"](model, (inputs, targets, hidden))
            loss.backward()
            raw.step()
            hidden = aux["hidden"].tensor.detach()
    return {**dict(model.named_parameters()), "hidden": hidden}


def taught(names):
    """The student after a raw loop whose teacher is an average by `lerp_`."""
    student = at_the_start(TEACHER, "optimizer = ")["model"]
    teacher = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    raw, state = torch.optim.SGD(student.parameters(), lr=0.1), ll.init_state(student, epoch_length=8)
    for step in range(16):
        at = state.replace(step=step, epoch=step // 8, batch=step % 8)
        torch.manual_seed(ll.debug.step_seed(at))
        raw.zero_grad()
        names["teacher_loss"](student, (next(iter(names["loader"](at))), teacher)).backward()
        raw.step()
        for name, parameter in student.named_parameters():
            teacher[name].lerp_(parameter.detach(), 1 - 0.9)
    return dict(student.named_parameters())


def bootstrapped(names):
    """The network after a raw loop whose target follows it by `lerp_`."""
    q, target = (at_the_start(TARGET, "optimizer = ")["q"] for _ in range(2))
    raw, state = torch.optim.Adam(q.parameters(), lr=1e-3, fused=True), ll.init_state(q, epoch_length=10)
    for step in range(10):
        batch = next(iter(names["transitions"](state.replace(batch=step))))
        raw.zero_grad()
        names["temporal_difference"](q, (batch, dict(target.named_parameters()))).backward()
        raw.step()
        for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
            slow.data.lerp_(fast.detach(), 1 - 0.995)
    return dict(q.named_parameters())


def of_actor_and_critic(names):
    """Both networks, and the critic's target, after a raw loop that moves it after each update of the critic."""
    networks, follower = (at_the_start(OF_CRITIC, "adam = ")["networks"] for _ in range(2))
    target, of_target = follower["critic"], dict(follower["critic"].named_parameters(prefix="critic"))
    of_actor, of_critic = (torch.optim.Adam(networks[name].parameters(), lr=1e-3, fused=True) for name in networks)
    state = ll.init_state(networks, epoch_length=10)
    for step in range(10):
        batch = next(iter(names["transitions"](state.replace(batch=step))))
        networks.zero_grad()
        names["critic_loss"](networks, (*batch, of_target)).backward()
        of_critic.step()
        for slow, fast in zip(target.parameters(), networks["critic"].parameters(), strict=True):
            slow.data.lerp_(fast.detach(), 1 - 0.995)
        if step % 2:
            networks.zero_grad()
            names["actor_loss"](networks, batch).backward()
            of_actor.step()
    return {**dict(networks.named_parameters()), **{f"target {k}": v for k, v in of_target.items()}}


def with_its_target(names):
    *_, target = names["with_target"](names["state"], ())
    return {**names["state"].params, **{f"target {name}": tensor for name, tensor in target.items()}}


def averaged_clients(names):
    """The server's weights after a raw loop over clients with masks of their own."""
    net, client_masks = at_the_start(CLIENTS, "optimizer = ")["net"], set()
    start = ll.init_state(net, epoch_length=4)
    average = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    for epoch in range(2):
        trained = []
        for number, client in enumerate(names["clients"]):
            net.load_state_dict(average)
            raw = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in range(4):
                # A client's number is folded into the seed of the server's state.
                at = ll.state.fold_in(start, number).replace(step=4 * epoch + batch, epoch=epoch, batch=batch)
                torch.manual_seed(ll.debug.step_seed(at))
                raw.zero_grad()
                names["loss_fn"](net, next(iter(client(at)))).backward()
                raw.step()
                client_masks.add((epoch, batch, ll.debug.step_seed(at)))
            trained.append({name: tensor.detach().clone() for name, tensor in net.named_parameters()})
        average = {name: torch.stack([weights[name] for weights in trained]).mean(0) for name in average}
    assert len(client_masks) == 2 * 4 * 4
    return average


def rows_stay(names):
    """The rows that are not trained have their bits, and the others those of a raw loop with the gradient masked."""
    before, after, mask = names["rows_before"].params, names["state"].params, names["trained_rows"]
    start = ll.copy_state(names["rows_before"])
    raw = nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(32, 12))
    raw.load_state_dict(start.params)
    kept = torch.optim.AdamW(
        [{"params": [raw[0].weight], "weight_decay": 0.0}, {"params": raw[2].parameters()}],
        lr=1e-2,
        weight_decay=0.1,
        fused=True,
    )
    for _ in range(10):
        kept.zero_grad()
        names["next_word_loss"](raw, names["tokens"]).backward()
        raw[0].weight.grad *= mask
        kept.step()
    assert torch.equal(after["0.weight"][:10], before["0.weight"][:10])
    assert not torch.equal(after["0.weight"][10:], before["0.weight"][10:])
    return close(after, dict(raw.named_parameters()))


def logged_without_overflows():
    rows = ll.log.read_jsonl("runs/log.jsonl")
    return all(row["train/grad_norm"] < float("inf") and row["train/loss"] < 3 for row in rows) and len(rows)


def searched_alone(names):
    """Losses of trials in raw loops that each begin with the first weights."""
    found = {}
    for lr in names["losses"]:
        model = at_the_start(TRIALS, "optimizer = ")["model"]
        raw, start = torch.optim.SGD(model.parameters(), lr=lr), ll.init_state(model, epoch_length=8)
        for step in range(8):
            raw.zero_grad()
            names["loss_fn"](model, next(iter(names["loader"](start.replace(batch=step))))).backward()
            raw.step()
        with torch.no_grad():
            x, y = names["test_set"].tensors
            found[lr] = cross_entropy(model(x), y).item()
    return found


def looked_ahead(names):
    """The slow weights after a raw loop that moves them by half every three steps."""
    model = at_the_start(SLOW, "def lookahead")["model"]
    raw, state = raw_adamw(model), ll.init_state(model, epoch_length=8)
    slow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for step in range(8):
        raw.zero_grad()
        names["loss_fn"](model, next(iter(names["loader"](state.replace(batch=step))))).backward()
        raw.step()
        if step in (2, 5):
            for name, tensor in model.named_parameters():
                slow[name] += (tensor.detach() - slow[name]) / 2
                tensor.data.copy_(slow[name])
    return slow, dict(model.named_parameters())


def without_spikes(names):
    """True if a raw loop that skips spikes and NaN ends with the same weights and window, and both did occur."""
    start = at_the_start(SPIKES, "def skip_spikes")
    model, x, state = start["model"], start["x"], ll.init_state(start["model"], epoch_length=8)
    x[17], x[33] = 1000.0, float("nan")
    raw, norms, spikes, infinite = raw_adamw(model), [], 0, 0
    for step in range(32):
        raw.zero_grad()
        batch = next(iter(names["loader"](state.replace(epoch=step // 8, batch=step % 8))))
        start["loss_fn"](model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        usual = statistics.median_low(norms[-8:] + [float("inf")] * (8 - len(norms)))
        if norm < 3 * usual:
            raw.step()
            norms.append(norm)
        elif norm < float("inf"):
            spikes += 1
        else:
            infinite += 1
    assert spikes > 0
    assert infinite > 0
    assert names["state"].step == len(norms) == 32 - spikes - infinite
    window = names["state"].opt_state["skip_spikes"]["norms"].tolist()
    return window == pytest.approx(norms[-8:], rel=1e-5) and close(
        names["state"].params, dict(model.named_parameters())
    )


def logged_in_front_of_clipping():
    """True if the logged histogram is that of a raw loop's gradients before clipping."""
    start = at_the_start(HISTOGRAMS, "def logged")
    model, state = start["model"], ll.init_state(start["model"], epoch_length=8)
    raw = raw_adamw(model)
    for step in range(13):
        raw.zero_grad()
        batch = next(iter(start["loader"](state.replace(epoch=step // 8, batch=step % 8))))
        start["loss_fn"](model, batch).backward()
        if step in (4, 8, 12):
            events = (
                EventAccumulator("runs/digits/gradients", {"histograms": 0}).Reload().Histograms("gradients/0.weight")
            )
            [found] = [event.histogram_value for event in events if event.step == step]
            grad = model[0].weight.grad
            assert (found.min, found.max) == pytest.approx((grad.min().item(), grad.max().item()), rel=1e-4)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        raw.step()
    return True


def guarded(names):
    """True if the guard fails for a run with another learning rate, or with other steps, and names the first step."""
    golden = ll.debug.read_fingerprints("golden.jsonl")
    changed = ll.debug.first_difference(golden, names["golden_run"]("changed.jsonl", lr=2e-2))
    for run in ({step: golden[step] for step in (4, 8)}, {**golden, 20: golden[16]}):
        names["golden_run"] = lambda path, run=run: run
        with pytest.raises(AssertionError):
            names["test_the_golden_run"](Path())
    return sorted(golden) == [4, 8, 12, 16] and (changed.equal, changed.different) == (None, 4)


def noise_scale(names):
    """McCandlish et al., A.1, from the squared norms of gradients over 1 sample and over 32, one by one."""
    model, state, found = names["model"], names["state"], []
    for x, y in names["loader"](state):
        each = [
            torch.autograd.grad(cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model.parameters())
            for i in range(32)
        ]
        flat = torch.stack([torch.cat([grad.flatten() for grad in grads]) for grads in each])
        small, big = flat.square().sum(1).mean(), flat.mean(0).square().sum()
        found.append(((small - big) / (1 - 1 / 32), (32 * big - small) / 31))
    traces, squares = map(sum, zip(*found, strict=True))
    return traces / squares


def beside(task, names, *classes):
    """True if the block's run has the bits of a raw loop with these optimizers, each over some of the parameters."""
    start = at_the_start(task, "state = ")
    model, state = start["model"], ll.init_state(start["model"], epoch_length=8)
    raw = [make(model) for make in classes]
    for step in range(16):
        start["loss_fn"](
            model, next(iter(start["loader"](state.replace(epoch=step // 8, batch=step % 8))))
        ).backward()
        for each in raw:
            each.step()
            each.zero_grad()
    return all(torch.equal(names["state"].params[name], tensor) for name, tensor in model.named_parameters())


def raw_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def raw_muon(model):
    return torch.optim.Muon([model[0].weight], lr=0.02)


def raw_rest(model):
    return torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=1e-2, fused=True)


def raw_few_bits(model):
    return AdamW8bit(model.parameters(), lr=1e-2)


class EachClipped(torch.optim.AdamW):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            torch.nn.utils.clip_grad_norm_(parameter, 0.1)
        super().step()


def raw_clipped(model):
    return EachClipped(model.parameters(), lr=1e-2, fused=True)


class AllClipped(torch.optim.AdamW):
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


def raw_all_clipped(model):
    return AllClipped(model.parameters(), lr=1e-2, fused=True)


class EverySecond(torch.optim.AdamW):
    """AdamW that updates in every second step, with the mean of both gradients."""

    def step(self):
        params = self.param_groups[0]["params"]
        if not getattr(self, "earlier", None):
            self.earlier = [parameter.grad.clone() for parameter in params]
            return
        for parameter, earlier in zip(params, self.earlier, strict=True):
            parameter.grad = (earlier + parameter.grad) / 2
        super().step()
        self.earlier = None


def raw_every_second(model):
    return EverySecond([model[0].bias, *model[2].parameters()], lr=1e-2, fused=True)


def clipped_after_microbatches():
    """The network after a raw loop that adds up four microbatches and clips their sum."""
    start = at_the_start("Accumulate gradients 1", "accumulated = ")
    model, state = start["model"], ll.init_state(start["model"], epoch_length=8)
    raw = raw_all_clipped(model)
    for step in range(16):
        raw.zero_grad()
        batch = next(iter(start["loader"](state.replace(epoch=step // 8, batch=step % 8))))
        for microbatch in zip(*(column.split(8) for column in batch), strict=True):
            (start["loss_fn"](model, microbatch) / 4).backward()
        raw.step()
    return dict(model.named_parameters())


def raw_schedule_free(model):
    raw = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    raw.train()
    return raw


class Averaging(torch.optim.AdamW):
    """AdamW that trains with the average of diffusers' EMAModel beside it, from the first weights on."""

    def step(self):
        super().step()
        self.count = getattr(self, "count", 0) + 1
        for average, parameter in zip(self.averages, self.param_groups[0]["params"], strict=True):
            average.lerp_(parameter.detach(), 1 - min(0.9999, 1 - (1 + self.count) ** -0.75))


def averaged(names):
    """True if the averages are those of a raw loop."""
    made = []

    def averaging(model):
        made.append(Averaging(model.parameters(), lr=1e-2, fused=True))
        made[0].averages = [parameter.detach().clone() for parameter in model.parameters()]
        return made[0]

    same = beside("Keep a moving average of the weights (EMA) 2", names, averaging)
    found = ll.eval_state(names["optimizer"], names["state"]).params.values()
    return same and close(dict(enumerate(found)), dict(enumerate(made[0].averages)))


def averaged_generator(names):
    """The averages of the generator by torch's class, and the trained weights of the critic."""
    start = at_the_start("Average the weights of one network (a GAN's generator) 1", "train_step = ")
    networks, loader, adam = start["networks"], start["loader"], start["adam"]
    step = ll.make_train_step(ll.make_grad_fn(networks, start["both_losses"]), adam, donate=True)
    generator, state = networks["generator"], ll.init_state(networks, adam, loader=loader)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(generator)  # the first average is a copy
    for batch in loader(state):
        state, _ = step(state, batch)
        average.update_parameters(generator)
    expected = {f"generator.{name}": tensor for name, tensor in average.module.named_parameters()}
    expected |= {name: tensor for name, tensor in state.params.items() if name.startswith("critic")}
    return close(names["averaged"].params, expected)


def mean_of_batches(names):
    loader = ll.make_loader(names["test_set"], batch_size=50)
    losses = []
    for x, y in loader(ll.TrainState()):
        probabilities, targets = names["model"](x).detach().softmax(1), torch.eye(3)[y]
        losses.append((1 - 2 * (probabilities * targets).sum() / (2 * len(x))).item())
    assert len(losses) == 2
    return sum(losses) / 2


def at_their_old_weights(task):
    """The networks after updates by two forward passes, each for one network."""
    start = at_the_start(task, "optimizer = ")
    networks, state = start["networks"], ll.init_state(start["networks"], epoch_length=8)
    generator, critic = networks.values()
    raw = torch.optim.Adam(networks.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    for step, (real, _) in enumerate(start["loader"](state)):
        torch.manual_seed(ll.debug.step_seed(state.replace(step=step)))
        noise = torch.randn(len(real), 4)
        raw.zero_grad()
        (-critic(generator(noise)).mean()).backward(inputs=[*generator.parameters()])
        (critic(generator(noise)).mean() - critic(real).mean()).backward(inputs=[*critic.parameters()])
        raw.step()
    return dict(networks.named_parameters())


ORIGINS, TWO_LOSSES, ROLLOUT, CONFLICT, FEDERATED = (
    f"{heading} 1"
    for heading in (
        "Apply gradients of your own",
        "Clip two losses differently",
        "Update a policy after a rollout",
        "Project conflicting gradients (PCGrad)",
        "Average the updates of clients (federated learning)",
    )
)


def by_backward(names):
    """The network after an epoch of a raw loop."""
    start = at_the_start(ORIGINS, "def loss_of")
    model, raw = start["model"], raw_adamw(start["model"])
    for batch in start["loader"](ll.init_state(model, epoch_length=8)):
        raw.zero_grad()
        start["loss_fn"](model, batch).backward()
        raw.step()
    return dict(model.named_parameters())


def clipped_apart(names):
    """The network after a raw loop over the batches of the run that adds two gradients, each clipped by torch."""
    start = at_the_start(TWO_LOSSES, "state = ")
    model, state = start["model"], ll.init_state(start["model"], epoch_length=8)
    raw = raw_adamw(model)
    for step, batch in enumerate(start["loader"](state)):
        total = dict.fromkeys(model.parameters(), 0)
        for loss_fn, max_norm in ((start["loss_fn"], 1.0), (start["consistency"], 0.1)):
            torch.manual_seed(ll.debug.step_seed(state.replace(step=step)))
            raw.zero_grad()
            loss_fn(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            total = {parameter: sum_so_far + parameter.grad for parameter, sum_so_far in total.items()}
        for parameter, grad in total.items():
            parameter.grad = grad
        raw.step()
    return dict(model.named_parameters())


def after_rollouts(names):
    """The policy after a raw loop over the rollouts of the run."""
    policy = at_the_start(ROLLOUT, "def policy_loss")["policy"]
    raw = torch.optim.Adam(policy.parameters(), lr=1e-2, fused=True)
    for rollout in names["rollouts"]:
        for observations, actions, advantages in zip(*(tensor.split(16) for tensor in rollout), strict=True):
            raw.zero_grad()
            chosen = policy(observations).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            (-(chosen * advantages).mean()).backward()
            raw.step()
    return dict(policy.named_parameters())


def projected_by_hand(names):
    """The network after a raw loop that projects flat gradients (Yu et al., 2020, algorithm 1)."""
    start = at_the_start(CONFLICT, "state = ")
    model, state = start["model"], ll.init_state(start["model"], epoch_length=8)
    raw, conflicts = raw_adamw(model), 0
    for batch in start["loader"](state):
        flat = []
        for loss_fn in (start["loss_fn"], start["margin_loss"]):
            grads = torch.autograd.grad(loss_fn(model, batch), [*model.parameters()])
            flat.append(torch.cat([grad.flatten() for grad in grads]))
        one, other = flat
        dot = one @ other
        total = one + other
        if dot < 0:
            total = total - dot / (other @ other) * other - dot / (one @ one) * one
            conflicts += 1
        nn.utils.vector_to_parameters(total, grads := [torch.empty_like(each) for each in model.parameters()])
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        raw.step()
    assert conflicts, "the tasks do not conflict"
    return dict(model.named_parameters())


def of_all_clients(names):
    """The mean of three networks that raw loops train, four times."""
    model = at_the_start(FEDERATED, "server, client")["model"]
    for number in range(4):
        trained = []
        for shard in names["shards"]:
            local = copy.deepcopy(model)
            raw = torch.optim.SGD(local.parameters(), lr=0.1, fused=True)
            for x, y in shard(ll.TrainState(epoch=number)):
                raw.zero_grad()
                cross_entropy(local(x), y).backward()
                raw.step()
            trained.append(dict(local.named_parameters()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.stack([each[name] for each in trained]).mean(0))
    return dict(model.named_parameters())


def handed_over(names):
    """True if weights and moments have the bits of a raw loop over both epochs."""
    start = at_the_start(HANDED_OVER, "optimizer = ")
    model = start["model"]
    raw = raw_adamw(model)
    for epoch in range(2):
        for batch in start["loader"](ll.TrainState(epoch=epoch)):
            raw.zero_grad()
            start["loss_fn"](model, batch).backward()
            raw.step()
    expected, reached = (
        [net.state_dict(), adamw.state_dict()["state"]]
        for net, adamw in ((model, raw), (names["model"], names["adamw"]))
    )
    return bits(reached) == bits(expected)


def walked_on(names):
    """True if the checkpoint has the object and the stream as they were when it was saved."""
    walk, (saved,) = names["walk"], names["ckpt"].steps()
    ahead = walk.position, random.random()
    ll.checkpoint.reinstate(names["ckpt"].restore(names["state"]).extra, walk=(again := type(walk)()))
    return saved.step == 8 and ahead == (again.position, random.random())


def resumed_own_optimizer(names):
    """True if new objects that continue from the checkpoint of step 20 have the bits of the run that went to step 40."""
    unbroken = names["run"]
    block = TASKS["Resume my own torch optimizer 1"].replace("ckpt.restore(", "ckpt.restore(which=20, state=")
    block = block.replace("ckpt.save(run)", "pass")
    assert [each.step for each in names["ckpt"].steps()] == [20, 30, 40]
    again = dict(names)
    exec(block, again)
    states = [[run[name].state_dict() for name in ("model", "optimizer")] for run in (unbroken, again["run"])]
    return (
        again["run"] is not unbroken
        and again["run"]["losses"] == unbroken["losses"]
        and bits(states[0]) == bits(states[1])
    )


def converted(names):
    """True if the quantized model computes what the trained one did, from weights of few bits."""
    layers = names["model"][0], names["model"][2]
    quantized = all(type(layer.weight).__name__ == "IntxUnpackedToInt8Tensor" for layer in layers)
    return quantized and torch.equal(names["model"](names["x"]), names["trained"])


def close(found, expected):
    torch.testing.assert_close(dict(found), dict(expected))
    return True


def without_class_2(names):
    """Gradients of the mean loss over the samples that the mask keeps."""
    model, kept = names["model"], names["y"] != 2
    loss = cross_entropy(model(names["x"][kept]), names["y"][kept])
    return dict(zip(names["state"].params, torch.autograd.grad(loss, model.parameters()), strict=True))


def in_float64(heading):
    """The function and the settings of a block that runs in float64, for a comparison with finite differences."""
    torch.set_default_dtype(torch.float64)
    try:
        names = {}
        exec(SETUP + TASKS[f"{heading} 1"], names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names["validation_loss"], names["settings"]


def are_nanogpts(names):
    """True if the batches of an epoch are nanoGPT's `get_batch` of the windows' numbers."""
    data, loader = names["tokens"], names["loader"]
    for k, (inputs, targets) in enumerate(loader(ll.TrainState())):
        ix = loader.indices(ll.TrainState(batch=k))
        x = torch.stack([torch.from_numpy(data[i : i + 16].astype("int64")) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + 16].astype("int64")) for i in ix])
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
    return k == 19


def mixed(names):
    """True if the first set comes alone for four epochs, then as three to one, and both are read in whole passes."""
    loader, times = names["loader"], torch.zeros(256)
    for epoch in range(10):
        rows = torch.cat([x for x, _ in loader(ll.TrainState(epoch=epoch))])
        read = (rows[:, None] == names["x"][:256]).all(2).sum(0)
        assert read[200:].sum() == (16 if epoch >= 4 else 0)
        times += read
    return (times[:200].unique().tolist(), times[200:].unique().tolist()) == ([2, 3], [1, 2])


def reduced_as_by_torch(names):
    """True if the rate fell as often as torch's scheduler lowers it over the same evaluations."""
    start, scores = at_the_start("Reduce the learning rate on a plateau 1", "optimizer = "), []
    adamw = torch.optim.AdamW(start["model"].parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        adamw, factor=0.5, patience=1, threshold=0.05, cooldown=1, min_lr=1e-5
    )
    for epoch in range(20):
        for x, y in start["loader"](ll.TrainState(epoch=epoch)):
            adamw.zero_grad()
            cross_entropy(start["model"](x), y).backward()
            adamw.step()
        with torch.no_grad():
            x, y = start["test_set"].tensors
            scores.append(cross_entropy(start["model"](x), y).item())
        scheduler.step(scores[-1])
    rates = [ll.optim.hyperparameters(names["optimizer"], names["state"])["lr"], adamw.param_groups[0]["lr"]]
    return rates[0] == rates[1] < 1e-2


def with_statistics_of_the_average(names):
    """True if torch's averaged model has these weights and, after update_bn, these statistics."""
    start = at_the_start(f"{SWA} 1", "sgd = ")
    net = start["model"]
    raw = torch.optim.SGD(net.parameters(), lr=0.5, fused=True)
    average = torch.optim.swa_utils.AveragedModel(net)
    for epoch in range(4):
        for number, (x, y) in enumerate(start["loader"](ll.TrainState(epoch=epoch)), 1):
            step = 8 * epoch + number
            raw.param_groups[0]["lr"] = 0.1 if step > 8 else 0.1 + 0.2 * (1 + math.cos(math.pi * (step - 1) / 8))
            raw.zero_grad()
            cross_entropy(net(x), y).backward()
            raw.step()
            if step >= 8 and step % 2 == 0:
                average.update_parameters(net)
    torch.optim.swa_utils.update_bn(start["loader"](ll.TrainState()), average)
    expected = {name.removeprefix("module."): tensor for name, tensor in average.state_dict().items()}
    expected.pop("n_averaged")
    found = names["averaged"]
    return close({**found.params, **found.buffers}, expected)


def replayed_by_priority(names):
    """True if a raw loop has the weights and priorities, and if a run that continues at step 40 has their bits."""
    start = at_the_start(f"{PRIORITY} 1", "def draw")
    q, columns, priorities = start["q"], start["replay"], torch.ones(320)
    adam = torch.optim.Adam(q.parameters(), lr=1e-3, fused=True)
    for step in range(50):
        generator = torch.Generator().manual_seed(ll.state.fold_in(ll.TrainState(), step).seed)
        probabilities = priorities**0.6 / (priorities**0.6).sum()
        index = torch.multinomial(probabilities, 32, replacement=True, generator=generator)
        weights = (320 * probabilities[index]) ** -0.4
        s, a, r, following, done = [column[index] for column in columns]
        with torch.no_grad():
            target = r + 0.99 * q(following).max(1).values * (1 - done.float())
        errors = target - q(s)[torch.arange(32), a]
        adam.zero_grad()
        (weights / weights.max() * errors**2).mean().backward()
        adam.step()
        for i in index.unique():
            priorities[i] = errors.detach().abs()[index == i].max() + 1e-6
    state = names["state"]
    again = {}
    exec(SETUP + TASKS[f"{PRIORITY} 1"].replace("after_steps(50)", "after_steps(40)"), again)  # restored as it was
    assert again["state"].step == 40
    exec(SETUP + TASKS[f"{PRIORITY} 1"], again)
    expected = {**dict(q.named_parameters()), "priorities": priorities}
    resumed, whole = [{**run.params, **run.extra} for run in (again["state"], state)]
    return close(whole, expected) and all(torch.equal(resumed[name], whole[name]) for name in whole)


def agrees_with_the_count(names):
    """True if the utilization is that of the operations that are counted, within 3%, and the batches are of three lengths."""
    costs, batches = names["costs"], names["batches"][1:]
    assert len({batch.shape for batch in batches}) == 3
    counts = [ll.log.count_flops(names["grad_fn"], names["state"], batch) for batch in batches]
    timed = costs["mfu"] * 1e11 * costs["step_seconds"] * len(batches)
    return timed == pytest.approx(sum(counts), rel=0.03)


@pytest.mark.slow
def test_the_utilization_of_a_compiled_step_agrees_with_the_count(monkeypatch, tmp_path):
    task, plain = "Measure model FLOPs utilization (MFU) 1", "ll.make_train_step(grad_fn, optimizer, donate=True)"
    assert TASKS[task].count(plain) == 1
    compiled = TASKS[task].replace(plain, f'll.compile_step({plain}, backend="eager")')
    monkeypatch.setitem(TASKS, task, compiled)
    names = run(task, tmp_path, monkeypatch)
    assert names["costs"]["train_step_seconds"] > 0
    assert agrees_with_the_count(names)


SIDE_BY_SIDE = "Train on two loaders side by side (FixMatch, domain adaptation, several tasks) 1"


def side_by_side(names):
    """True if the network is that of a raw loop over each loader's epochs, which stand where the page's table says."""
    start = at_the_start(SIDE_BY_SIDE, "grad_fn = ")
    raw = torch.optim.AdamW(start["model"].parameters(), lr=3e-3, fused=True)
    positions = [ll.TrainState(), ll.TrainState()]
    lengths, stood = (2, 12), {}
    for step in range(100):
        stood[step] = [(at.epoch, at.batch) for at in positions]
        batch = [next(iter(start[name](at))) for name, at in zip(("labelled", "unlabelled"), positions, strict=True)]
        torch.manual_seed(ll.debug.step_seed(ll.TrainState(step=step)))
        raw.zero_grad()
        start["fixmatch_loss"](start["model"], batch).backward()
        raw.step()
        for k, (at, length) in enumerate(zip(positions, lengths, strict=True)):
            ends = at.batch + 1 == length
            positions[k] = ll.TrainState(epoch=at.epoch + ends, batch=0 if ends else at.batch + 1)
    table = {row: stood[row] for row in (1, 2, 12, 99)}
    assert table == {1: [(0, 1), (0, 1)], 2: [(1, 0), (0, 2)], 12: [(6, 0), (1, 0)], 99: [(49, 1), (8, 3)]}
    return close(names["state"].params, dict(start["model"].named_parameters()))


INFLUENCE = "Find which samples made a loss (data attribution, influence) 1"


def influences(names):
    """True if the page's table has the gradients, and the changes of runs without a sample."""
    text = SECTIONS[INFLUENCE.rpartition(" ")[0]]
    rows = re.findall(r"^\| (\d+) \| (wrong|right) \| (\S+) \| (\S+) \|$", text, re.M)
    step, loss = names["train_step"], names["validation_loss"]

    def after(weights):
        state = names["start"]
        while state.step < 40:
            for batch in names["loader"](state):
                state, _ = step(state, (batch, weights[names["loader"].indices(state)]))
        return loss(state).item()

    before, worst_first = loss(names["state"]).item(), names["worst_first"].tolist()
    assert after(torch.ones(256)) == pytest.approx(before, abs=1e-5)
    assert [int(sample) for sample, *_ in rows] == worst_first[:3] + worst_first[-3:]
    for sample, label, gradient, change in rows:
        without = torch.ones(256).index_fill(0, torch.tensor(int(sample)), 0)
        assert -names["gradients"][int(sample)].item() == pytest.approx(float(gradient), abs=2e-4)
        assert after(without) - before == pytest.approx(float(change), abs=2e-4)
        assert (label == "wrong") == (int(sample) in names["wrong"].tolist())
    return len(rows) == 6


# What a task leaves, beyond a trained state.
HOLDS = {
    INFLUENCE: influences,
    SIDE_BY_SIDE: side_by_side,
    SPIKES: without_spikes,
    SELDOM: lambda n: beside(SELDOM, n, raw_muon, raw_every_second),
    "Clip gradients 1": lambda n: beside("Clip gradients 1", n, raw_all_clipped),
    "Accumulate gradients 1": lambda n: close(n["state"].params, clipped_after_microbatches()),
    "Freeze layers 1": lambda n: moved(n) == {"2.weight", "2.bias"},
    "Freeze layers 2": lambda n: moved(n) == {"0.weight", "0.bias", "2.weight", "2.bias"},
    f"{TWO} 1": lambda n: counts(n, "critic", "generator") == [(8, 1, 256), (8, 0, 0)],
    f"{TWO} 2": lambda n: counts(n, "critic", "actor") == [(8, 1, 256), (8, 0, 0)],
    "Set the learning rate by hand, or by the epoch 1": lambda n: (
        ll.optim.hyperparameters(n["optimizer"], n["state"]) == {"lr": 1e-2 * 0.5**3}
    ),
    "Reduce the learning rate on a plateau 1": reduced_as_by_torch,
    "Keep a moving average of the weights (EMA) 2": averaged,
    f"{SWA} 1": with_statistics_of_the_average,
    "Train without a schedule (schedule-free) 1": lambda n: beside(
        "Train without a schedule (schedule-free) 1", n, raw_schedule_free
    ),
    f"{BITS} 1": lambda n: beside(f"{BITS} 1", n, raw_few_bits),
    "Keep activations on the host 1": lambda n: beside("Keep activations on the host 1", n, raw_adamw),
    "Clip gradients 2": lambda n: beside("Clip gradients 2", n, raw_clipped),
    f"{ONE_PASS} 1": lambda n: close(n["state"].params, at_their_old_weights(f"{ONE_PASS} 1")),
    "Give each network a schedule of its own 1": lambda n: (
        ll.optim.hyperparameters(n["optimizer"], n["state"]) == pytest.approx(dict.fromkeys(RATES, 5e-4))
    ),
    "Resume my own torch optimizer 1": resumed_own_optimizer,
    HANDED_OVER: handed_over,
    "Resume draws and objects of your own 1": walked_on,
    "Use the model between steps 1": lambda n: len({tuple(each.tolist()) for each in n["rollouts"]}) == 4,
    "Carry a hidden state 1": lambda n: close({**n["state"].params, **n["state"].extra}, carried(n)),
    "Let a loss depend on the step 1": lambda n: n["with_smoothing"](n["state"], ())[-1] == 0.2 - 16 / 100,
    TEACHER: lambda n: close(n["state"].params, taught(n)),
    TARGET: lambda n: close(n["state"].params, bootstrapped(n)),
    CLIENTS: lambda n: close(n["server"].params, averaged_clients(n)),
    f"{MEMBERS} 2": lambda n: len({state.seed for state in n["members"]}) == 3,
    "Train only some rows of an embedding 1": rows_stay,
    "Use mixed precision on a GPU 2": lambda n: logged_without_overflows(),
    TRIALS: lambda n: n["losses"] == pytest.approx(searched_alone(n), rel=1e-4),
    f"{PRIORITY} 1": replayed_by_priority,
    OF_CRITIC: lambda n: close(with_its_target(n), of_actor_and_critic(n)),
    "Change the model in the middle of a run 1": lambda n: (
        (n["state"].step, n["state"].epoch, n["grafted"].dropped) == (16, 2, [])
        and {name.removeprefix("params.") for name in n["grafted"].fresh if "params" in name}
        == {"third.weight", "third.bias"}
    ),
    "Add and prune rows (Gaussian splats) 1": lambda n: (
        len(n["state"].extra["counts"]) == n["state"].step // 4
        and n["means"].weight.shape == n["state"].opt_state["Adam"]["state"]["weight"]["exp_avg"].shape
    ),
    "Log the mean loss since the last line 2": lambda n: len(n["state"].extra["window"]) == 0,
    "Start from saved weights 2": lambda n: (n["state"].step, n["state"].epoch) == (8, 1),
    "Train matrices with Muon 1": lambda n: beside("Train matrices with Muon 1", n, raw_muon, raw_rest),
    "Train in float8 1": lambda n: (
        beside("Train in float8 1", n, raw_adamw) and type(n["model"][0]).__name__ == "Float8Linear"
    ),
    "Train for quantized weights (QAT) 1": lambda n: (
        converted(n) and beside("Train for quantized weights (QAT) 1", n, raw_adamw)
    ),
    "Resume a run 1": lambda n: n["state"].step == 16 and n["ckpt"].latest().step == 15,
    "Resume with another learning rate 1": lambda n: n["state"].step == 16,
    "Keep the best checkpoint 1": lambda n: n["state"].step == n["ckpt"].best().step,
    "Stop early 1": lambda n: n["state"].epoch < 50,
    "Evaluate a checkpoint in another process 1": lambda n: (
        n["trained"] == ll.evaluate(n["eval_step"], n["weights"], n["test_batches"]) != n["averaged"]
    ),
    "Save the model 1": lambda n: torch.equal(torch.load("model.pt")["0.bias"], n["state"].params["0.bias"]),
    "Save the model 2": lambda n: torch.equal(torch.load("model.pt")["0.bias"], n["state"].params["0.bias"]),
    "Log to any other tracker 1": lambda n: n["mine"] == [{"step": 100, "train/loss": 0.5}],
    "Log to any other tracker 2": lambda n: n["comet_ml"].mock_calls[-3:] == comet_calls(),
    HISTOGRAMS: lambda n: histograms() == {name: [4, 8, 12] for name in GRADIENTS} and logged_in_front_of_clipping(),
    "Profile a step 1": lambda n: len(list(Path("runs/profile").glob("*.pt.trace.json"))) == 1,
    "Find who is slow 1": lambda n: n["slow"] == {"slow_rank": 0, "slow_part": "data", "slow_seconds": 0.0},
    "Count parameters and operations 1": lambda n: n["flops"] == operations(n["model"], 32),
    "Measure model FLOPs utilization (MFU) 1": agrees_with_the_count,
    "Make predictions 1": lambda n: n["probabilities"].shape == (64, 3),
    "Debug a NaN 1": lambda n: n["worst"].index == 17,
    "Cross-validate (k-fold) 1": lambda n: len(n["accuracies"]) == 4,
    "Train a language model on one long file of tokens 1": are_nanogpts,
    SLOW: lambda n: all(
        torch.allclose(found[name], tensor, atol=1e-6)
        for found, expected in zip(
            (ll.eval_state(n["optimizer"], n["state"]).params, n["state"].params), looked_ahead(n), strict=True
        )
        for name, tensor in expected.items()
    ),
    NOISE: lambda n: torch.isclose(n["noise_scale"], noise_scale(n), rtol=1e-4),
    f"{INTERRUPT} 1": lambda n: n["state"].epoch == 3,
    f"{INTERRUPT} 2": lambda n: n["scores"].keys() == {"loss", "accuracy"},
    "Work in a notebook (continue, fork, run n more steps) 1": lambda n: (
        (n["state"].step, n["fork"].step) == (16, 26)
    ),
    "Freeze BatchNorm 1": lambda n: n["state"].buffers["1.num_batches_tracked"] == 0,
    "Average over batches, and not over samples 1": lambda n: (
        n["scores"]["loss"] == pytest.approx(mean_of_batches(n))
    ),
    "Average the weights of one network (a GAN's generator) 1": averaged_generator,
    "Average a loss over tokens, or under a mask 1": lambda n: close(
        n["accumulated"](n["state"], (n["x"], n["y"])).grads, without_class_2(n)
    ),
    f"{GRADIENTS_OF} 1": lambda n: torch.autograd.gradcheck(*in_float64(GRADIENTS_OF)),
    "Apply gradients of your own 2": lambda n: close(dict(n["model"].named_parameters()), by_backward(n)),
    ORIGINS: lambda n: close(n["state"].params, by_backward(n)) and n["state"].epoch == 1,
    TWO_LOSSES: lambda n: close(n["state"].params, clipped_apart(n)),
    ROLLOUT: lambda n: close(n["state"].params, after_rollouts(n)) and n["state"].step == 12,
    CONFLICT: lambda n: close(n["state"].params, projected_by_hand(n)),
    FEDERATED: lambda n: close(n["state"].params, of_all_clients(n)) and n["state"].step == 4,
    "Mix datasets 1": mixed,
    # 13 batches of 8 and 10 of 16 are an epoch with the rest of 8; the second has 9 of 16 and 2 of 64
    "Grow the batch size during a run 1": lambda n: (
        (n["state"].step, n["state"].samples) == (13 + 10 + 9 + 2 + 4, 768)
    ),
    "Change the batch size in the middle of an epoch 1": lambda n: (
        (n["state"].step, n["state"].epoch, n["state"].samples, n["state"].epoch_length) == (14 + 6, 2, 512, 7)
    ),
    GOLDEN: guarded,
    # The last update is after 504 of 512 samples, by the formula of a cosine from sample 64 on.
    "Continue with another number of processes 1": lambda n: (
        n["state"].step == 64
        and math.isclose(
            ll.optim.hyperparameters(n["optimizer"], n["state"])["lr"],
            1e-2 * (1 + math.cos(math.pi * (504 - 64) / (512 - 64))) / 2,
            rel_tol=1e-5,
        )
    ),
    "Shuffle files that are read forward 1": lambda n: n["state"].samples == 512 and n["state"].epoch == 2,
    "Replay a step 1": lambda n: n["again"].state.step == 12,
    "Train many adapters on one frozen model 1": lambda n: (
        n["stack"].params["base_model.model.0.base_layer.weight"].stride(0) == 0
        and len(set(n["losses"])) == 8
        and n["stack"].step == 8
    ),
    "Send the weights to an inference engine 1": lambda n: (
        bits(dict(n["engine"].named_parameters())) == bits(n["state"].params) and n["version"] == 16
    ),
    "Push to the Hugging Face Hub 2": lambda n: n["state"].step == n["pulled"].latest().step == 24,
}


TAKE_SECONDS = {  # so the full suite alone runs them
    "Compile the step 1",
    "Find which samples made a loss (data attribution, influence) 1",
    "Plot members of a sweep, colored by their learning rate 1",
    "Take gradients of hyperparameters 1",
    "Train many adapters on one frozen model 1",
    "Train several seeds in one step 1",
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=[pytest.mark.slow] if task in TAKE_SECONDS else []) for task in TASKS],
    indirect=True,
)
def test_the_block_does_its_task(task, tmp_path, monkeypatch):
    names = run(task, tmp_path, monkeypatch)
    expected = EXPECTED_WARNINGS.get(task, [])
    assert len(names["warnings"]) == len(expected), names["warnings"]
    assert all(part in text for part, text in zip(expected, names["warnings"], strict=True))
    if task in HOLDS:
        assert HOLDS[task](names)
    if "state" in names and not task.startswith(("Overfit", "Find", "Estimate")):
        assert names["state"].step > 0


@pytest.mark.parametrize("eps", [1e-3, 1.0])
def test_adaptive_clipping_is_the_formula_unit_by_unit(eps):
    clip_by_weights = at_the_start("Clip gradients 3", "state = ")["clip_by_weights"]
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)).double()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    grad_fn = ll.make_grad_fn(model, lambda model, x: (model.scale * model(x) - 9).square().mean())
    clipped = clip_by_weights(0.2, eps)
    state = ll.init_state(model)
    grads, cut = grad_fn(state, x).grads, 0
    found = clipped.transform(grads, {}, state.params, 0).grads
    for name, weights in model.named_parameters():
        units = [(weights, grads[name])] if weights.ndim < 2 else list(zip(weights, grads[name], strict=True))
        for unit, grad in units:
            most, norm = 0.2 * max(float(unit.detach().square().sum()) ** 0.5, eps), float(grad.square().sum()) ** 0.5
            grad.mul_(min(1, most / norm))
            cut += norm > most
    assert cut > 3
    torch.testing.assert_close(found, grads, rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="accumulate got"):  # each microbatch would be clipped alone
        ll.accumulate(clipped, 2)


class Refusing(nn.Module):
    """Runs out of memory with more samples than fit, when BatchNorm has written its statistics, or in the backward pass."""

    def __init__(self, fitting, in_backward):
        super().__init__()
        self.fitting, self.in_backward, self.calls = fitting, in_backward, []
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        self.calls.append(len(x))
        out = self.norm(self.first(x))
        if len(x) > self.fitting:
            out.register_hook(self.refuse) if self.in_backward else self.refuse()
        return self.last(out)

    def refuse(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_batch_that_does_not_fit_is_retried_and_nothing_of_the_failed_pass_is_left(in_backward):
    names = {}
    exec(SETUP, names)
    model, raw = Refusing(8, in_backward), Refusing(32, in_backward)
    raw.load_state_dict(model.state_dict())
    names |= {"grad_fn": ll.make_grad_fn(model, names["loss_fn"]), "model": model}
    exec(TASKS[RETRY].partition("state = ")[0], names)
    state, batches = ll.init_state(model, names["optimizer"]), [(names["x"][:n], names["y"][:n]) for n in (32, 20)]
    optimizer = raw_adamw(raw)
    for batch in batches:
        state, _ = names["train_step"](state, batch)
        for x, y in zip(*(rows.tensor_split(4) for rows in batch), strict=True):
            (cross_entropy(raw(x), y) * (len(x) / len(batch[0]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.calls == [32, 16] + [8] * 4 + [5] * 4  # what fits is remembered
    close({**state.params, **state.buffers}, {**dict(raw.named_parameters()), **dict(raw.named_buffers())})
    model.fitting = 0
    with pytest.raises(torch.OutOfMemoryError):
        names["train_step"](state, batches[0])
    assert state.params["last.weight"].isfinite().all()  # it is valid


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulate_has_the_bits_that_the_page_gives(weighted):
    def loss_fn(model, batch):
        x, y = batch
        losses = cross_entropy(model(x), y, reduction="none")
        return ll.Mean(losses[y != 2].sum(), (y != 2).sum()) if weighted else losses.mean()

    names = {}
    exec(SETUP, names)
    model, batch = names["model"], (names["x"][:29], names["y"][:29])
    found = ll.accumulate(ll.make_grad_fn(model, loss_fn), 4)(ll.init_state(model), batch).grads
    parts = list(zip(*[tensor.tensor_split(4) for tensor in batch], strict=True))
    losses = [loss_fn(model, part) for part in parts]
    for loss, (x, _) in zip(losses, parts, strict=True):
        (loss.total / losses[0].weight if weighted else loss * (len(x) / 29)).backward()
    scale = losses[0].weight.item() / sum(loss.weight.item() for loss in losses) if weighted else 1
    assert all(torch.equal(found[name], weight.grad * scale) for name, weight in model.named_parameters())


# Where signals arrive: while a batch is stepped, or an epoch is evaluated. `early_stopping` has waited once by step 232.
PLACES = {"Stop early 1": {"epoch": 235, "evaluation": 232}, f"{INTERRUPT} 1": {"epoch": 11, "evaluation": 16}}
REQUESTS = [("Stop early 1", signal.SIGTERM, place) for place in ("epoch", "evaluation")]
CTRL_CS = [(task, signal.SIGINT, place) for task in PLACES for place in ("epoch", "evaluation")]
OTHER_PLACES = REQUESTS[1], CTRL_CS[0]  # the other place of each signal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "number", "place"),
    [
        pytest.param(*case, marks=[] if case in OTHER_PLACES else [pytest.mark.hardest])
        for case in [*REQUESTS, *CTRL_CS]
    ],
)
def test_a_run_that_is_stopped_and_rerun_ends_like_an_unbroken_one(task, number, place, tmp_path, monkeypatch):
    step = PLACES[task][place]
    stepped = "state, metrics = train_step(state, batch)"
    assert TASKS[task].count(stepped) == 1
    block = compile(TASKS[task].replace(stepped, f"{stepped}; struck(state, 'epoch')"), task, "exec")

    def outcome(folder, armed):
        def struck(state, at):
            nonlocal armed
            if armed and (state.step, at) == (step, place):
                armed = False
                signal.raise_signal(number)

        def eval_step(state, batch):
            struck(state, "evaluation")
            return names["whole_eval_step"](state, batch)

        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        names = {"struck": struck}
        exec(SETUP, names)
        names |= {"whole_eval_step": names["eval_step"], "eval_step": eval_step}
        with suppress(KeyboardInterrupt):
            exec(block, names)
        if "stop_now" in names:
            names["stop_now"].close()
        assert armed is False
        saved = [(each.step, each.metrics) for each in names["ckpt"].steps()]
        return names["state"], saved, names["ckpt"].best().step

    whole, *kept_by_whole = outcome(tmp_path / "whole", False)
    stopped, *_ = outcome(tmp_path / "stopped", True)
    assert stopped.step == step
    state, *kept = outcome(tmp_path / "stopped", False)
    assert not ll.debug.differences(state, whole)
    assert kept == kept_by_whole


@pytest.mark.slow  # two processes that import torch
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_blocks_test_of_two_ranks_fails_if_nothing_averages_their_gradients(wrapped, tmp_path, monkeypatch):
    text = SETUP + TASKS["Test that two ranks train as one 1"]
    if not wrapped:
        text = text.replace("if ll.distributed.launched() else net", "if False else net")
    (tmp_path / f"ranks_{wrapped}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"ranks_{wrapped}")
    with nullcontext() if wrapped else pytest.raises(Exception, match="reduce_gradients"):
        module.test_ranks_train_alike()


def test_each_task_that_is_checked_is_on_the_page():
    assert {*HOLDS, *CONTINUES, *EXPECTED_WARNINGS} <= TASKS.keys()


def test_the_lists_of_tasks_have_every_heading_of_every_page():
    """`python tests/cookbook.py` writes them."""
    assert sorted([*PAGES, INDEX]) == sorted((ROOT / "recipes").glob("COOKBOOK*.md"))
    for page, text in texts().items():
        assert page.read_text() == text, f"{page.name}: run python tests/cookbook.py"
    text = "".join(page.read_text() for page in PAGES)
    headings = re.findall(r"^### (.*)", text, re.M)
    assert list(SECTIONS) == headings  # no heading twice
    assert re.findall(r"\[([^\]]*)\]\(COOKBOOK_\w+\.md#", INDEX.read_text()) == headings
    assert sum(len(BLOCK.findall(section)) for section in SECTIONS.values()) == len(BLOCK.findall(text)) == len(TASKS)


def test_the_cheat_sheet_has_every_everyday_name_once_and_every_room():
    tables = "\n".join(re.findall(r"^\| `.*", (ROOT / "recipes/CHEAT_SHEET.md").read_text(), re.M))
    calls = re.findall(r"`ll\.(\w+)", "\n".join(line.split(" | ")[0] for line in tables.splitlines()))
    assert sorted(calls) == sorted(set(ll.__all__))


def test_every_name_of_these_pages_exists():
    for page in (ROOT / "recipes/CHEAT_SHEET.md", INDEX, *PAGES):
        for path in re.findall(r"\bll\.(\w+(?:\.\w+)?)", page.read_text()):
            value = ll
            for name in path.split("."):
                value = getattr(value, name)
