"""Teach a small language model to add, from a reward that code checks: group relative policy optimization (GRPO).

    python recipes/grpo_arithmetic.py              (or with other settings: --group 16 --seed 1)

A tiny transformer learns from 2,000 sums such as 12+34=46 (the warmup). Then it writes several answers to each of
7,000 others, and learns from a program that says which are right. Loss and advantages are those of TRL's GRPOTrainer
with loss_type="grpo". An update sees the probabilities of the draws, to the bit, so its first ratios are 1.0. Log and
checkpoints are in runs/grpo_arithmetic. Ctrl-C stops after the batch or the warmup (run it again to continue).

Reached with seeds 0 to 3, in 160 seconds on one slow core: 91.7%, 91.0%, 93.2% and 95.1% of 1,000 held-out sums right;
after the warmup 80.2%, 42.4%, 77.0% and 78.9%. (Processors differ as seeds do. Where answers are known, supervised
training is better: 60 epochs of the warmup alone reach 97.4% to 99.1% in 18 seconds.)
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import looplib as ll

CHARACTERS = "\n0123456789+="  # a line break, token 0, ends an answer
QUESTION, ANSWER = len("12+34="), len("123\n")


def main(
    epochs: int = 3,  # passes over the sums without answers
    questions: int = 64,  # sums in a batch
    group: int = 8,  # answers drawn for each sum
    iterations: int = 2,  # updates on a batch of answers
    lr: float = 2e-3,  # learning rate of GRPO at the start; it falls along a cosine
    epsilon: float = 0.2,  # a ratio of probabilities counts from 1 - epsilon to 1 + epsilon
    beta: float = 0.01,  # weight of the Kullback-Leibler divergence from the reference
    max_norm: float = 1.0,  # gradients are scaled down to this norm
    solved: int = 2000,  # sums with answers, for the supervised warmup
    warmup_epochs: int = 20,  # passes over them
    warmup_lr: float = 2e-3,  # learning rate of the warmup, at its peak
    width: int = 64,  # of the hidden states
    depth: int = 2,  # number of blocks
    seed: int = 0,  # of the weights, the order of the sums and the answers
    directory: str = "runs/grpo_arithmetic",  # folder for log and checkpoints
) -> dict[str, float]:
    assert group > 1, f"--group is {group}: an advantage compares the answers to one sum, so give at least 2"
    torch.set_num_threads(1)  # such a small network gains nothing from more threads
    torch.manual_seed(seed)
    solved_set, train_set, test_set = load_data(solved)
    model = Transformer(width, depth)
    loader = ll.make_loader(train_set, batch_size=questions, seed=seed, drop_last=True)
    schedule = ll.schedules.cosine(lr, total=epochs * len(loader) * iterations)
    adamw = ll.optimizer(torch.optim.AdamW, lr=schedule, weight_decay=0.0)
    optimizer = ll.chain(ll.clip_by_global_norm(max_norm), adamw)
    grad_fn = ll.make_grad_fn(model, partial(grpo_loss, epsilon=epsilon, beta=beta))
    first_step = ll.make_train_step(grad_fn, optimizer, donate=True)
    next_step = ll.make_train_step(grad_fn, optimizer, donate=True, same_batch=True)
    draw_step, score_step = ll.make_predict_step(model, draw), ll.make_predict_step(model, log_probabilities)
    eval_step = ll.make_eval_step(model, metric_fn)
    log = ll.tee(ll.jsonl(Path(directory) / "log.jsonl"), ll.console())
    ckpt = ll.checkpoint_io(Path(directory) / "checkpoints", keep_last=1)
    epoch_ends, finished = ll.every_n_epochs(1), ll.after_epochs(epochs)
    with ll.after_signal(signal.SIGINT, signal.SIGTERM) as stop_now:  # not between two updates on the same answers
        if not ckpt.steps():
            warm_up(model, solved_set, warmup_epochs, warmup_lr, seed)
        extra = {"reference": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
        state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader, extra=extra))
        if finished(state):
            print(f"already finished at step {state.step}; delete {directory} to start again")
        done, bar = finished | stop_now, ll.progress(loader, epochs=epochs)
        while not done(state):
            for asked in bar(state):
                drawn = [draw_step(ll.state.fold_in(state, i), asked) for i in range(group)]
                tokens, old = (torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True))
                rewards = torch.tensor([[reward(answer) for answer in answers] for answers in tokens])
                advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
                batch = {"tokens": tokens.flatten(0, 1), "advantages": advantages.flatten(), "old": old.flatten(0, 1)}
                batch["reference"] = score_step(state.replace(params=state.extra["reference"]), batch["tokens"])
                state, metrics = first_step(state, batch)
                first_ratio = ll.compute(metrics)["ratio"]  # 1.0, since the answers are the model's own
                for _ in range(iterations - 1):
                    state, metrics = next_step(state, batch)
                bar.show(metrics)
                if epoch_ends(state):
                    scores = ll.compute(metrics) | ll.evaluate(eval_step, state, [test_set])
                    log(state, {"reward": rewards.mean().item(), "first_ratio": first_ratio, **scores})
                    ckpt.save(state)
                if stop_now(state):
                    break
        bar.close()
        ckpt.save(state)
    if not finished(state):
        raise SystemExit(f"stopped at step {state.step}; run the same command to continue")
    scores = ll.evaluate(eval_step, state.replace(params=state.extra["reference"]), [test_set], prefix="warmup_")
    scores |= ll.evaluate(eval_step, state, [test_set])
    print("held-out sums added correctly:", ", ".join(f"{name} {score:.1%}" for name, score in scores.items()))
    return scores


def load_data(solved: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of all sums of two numbers below 100: some with their answers, most without, and 1,000 held out."""
    lines = [f"{a:02}+{b:02}={a + b}\n".ljust(QUESTION + ANSWER, "\n") for a in range(100) for b in range(100)]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[CHARACTERS.index(character) for character in line] for line in lines])[order]
    return tokens[:solved], tokens[solved:-1000, :QUESTION], tokens[-1000:, :QUESTION]


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        # "gelu" would let eval mode run fused layers, whose sums round differently from those of an update.
        settings: Any = {"batch_first": True, "norm_first": True, "activation": lambda x: nn.functional.gelu(x)}
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, **settings) for _ in range(depth)]
        self.characters, self.blocks = nn.Embedding(len(CHARACTERS), width), nn.ModuleList(blocks)
        self.positions = nn.Parameter(0.02 * torch.randn(QUESTION + ANSWER, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.characters(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def draw(model: Transformer, tokens: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """The questions with an answer drawn to each, and the log-probability of each token that was drawn."""
    tokens, logps = nn.functional.pad(tokens, (0, ANSWER)), []
    for k in range(QUESTION, QUESTION + ANSWER):
        logp = model(tokens[:, :-1])[:, k - 1].log_softmax(-1)  # as long as in an update, so that sums round alike
        tokens[:, k] = logp.argmax(1) if greedy else torch.multinomial(logp.exp(), 1).squeeze(1)
        logps.append(logp.gather(1, tokens[:, k, None]))
    return tokens, torch.cat(logps, dim=1)


def reward(tokens: Tensor) -> float:
    """1 for the right sum and a line break after it, whatever follows that; otherwise 0."""
    question, _, answer = "".join(CHARACTERS[token] for token in tokens.tolist()).partition("=")
    return float(answer.startswith(f"{sum(map(int, question.split('+')))}\n"))


def log_probabilities(model: Transformer, tokens: Tensor) -> Tensor:
    """Log-probability of each token of the answers: (n, ANSWER)."""
    logps: Tensor = model(tokens[:, :-1])[:, QUESTION - 1 :].log_softmax(-1)
    return logps.gather(-1, tokens[:, QUESTION:, None]).squeeze(-1)


def mean_per_answer(values: Tensor, tokens: Tensor) -> Tensor:
    """Average over the tokens of each answer, up to its line break: (n,)."""
    ends = (tokens[:, QUESTION:] == 0).long()
    counted = ends.cumsum(1) == ends  # none before it
    return (values * counted).sum(1) / counted.sum(1)


def grpo_loss(model: Transformer, batch: Any, epsilon: float, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of GRPO: a clipped ratio of probabilities times the advantage, and the divergence from the reference."""
    tokens, advantage = batch["tokens"], batch["advantages"][:, None]
    now = log_probabilities(model, tokens)
    ratio = (now - batch["old"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    change = batch["reference"] - now
    kl = change.exp() - change - 1  # an unbiased estimate that is never negative
    loss = mean_per_answer(beta * kl - gain, tokens).mean()
    means = {"kl": kl, "ratio": ratio, "clipped": gain != ratio * advantage}
    return loss, {name: mean_per_answer(values, tokens).mean() for name, values in means.items()}


def metric_fn(model: Transformer, asked: Tensor) -> dict[str, Tensor]:
    return {"accuracy": torch.tensor([reward(tokens) for tokens in draw(model, asked, greedy=True)[0]]).mean()}


def warm_up(model: Transformer, solved_set: Tensor, epochs: int, lr: float, seed: int) -> None:
    """Supervised training, so that the model writes answers at all."""

    def loss_fn(model: Transformer, tokens: Tensor) -> Tensor:
        return -mean_per_answer(log_probabilities(model, tokens), tokens).mean()

    loader = ll.make_loader(solved_set, batch_size=64, seed=seed)
    total = epochs * len(loader)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(lr, warmup=min(50, total // 2), total=total))
    train_step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True)
    state = ll.init_state(model, optimizer, seed=seed, loader=loader)
    while state.epoch < epochs:
        for tokens in loader(state):
            state, _ = train_step(state, tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    main(**vars(parser.parse_args()))
