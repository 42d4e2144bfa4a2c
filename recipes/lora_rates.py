"""Try eight learning rates for LoRA at once: eight adapters on one frozen language model, trained in one step.

    pip install transformers peft
    python recipes/lora_rates.py                   (or with other settings: --members 16 --steps 600)

A small Llama first learns Python's help topics byte by byte (`pydoc_data.topics`). Then it is frozen, and each member of a
stack trains a LoRA adapter of its own, with its own rate, on the source code of a package of the standard library. The
stack holds the base model once, and its members see the same batches. The table shows the bits per byte of each member
on held-out code. The best adapter is saved in peft's format, read back by peft, and must give the same answers.
Ctrl-C stops, rerunning continues (delete the folder to start over).

Reached with seeds 0 and 1, in 51 seconds on one core: 3.41 and 3.37 bits per byte of held-out code without an adapter, 3.22
and 3.19 with the best rate, 0.012 both times; 3.31 and 3.26 with 0.001, and 4.60 and 4.40 with 0.3, which is worse than no
adapter. The stack takes 0.6 MiB, and eight states with a base of their own 3.7 MiB. peft's answers are the same.
A step of eight adapters on four layers of width 128 takes 0.37 of a raw loop over them, and 0.17 if it is compiled
(tests/benchmarks/adapters.py).
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import pydoc_data.topics
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import looplib as ll

hf: Any = transformers  # which is typed in parts


def main(
    members: int = 8,  # learning rates
    lowest: float = 1e-3,  # learning rate
    highest: float = 0.3,  # learning rate
    steps: int = 150,  # updates of the adapters
    base_steps: int = 400,  # updates of the base model
    batch_size: int = 8,  # windows in a batch
    length: int = 64,  # bytes in a window
    width: int = 64,  # of the base model
    depth: int = 2,  # number of blocks
    rank: int = 4,  # of the matrices that LoRA adds
    package: str = "email",  # package of the standard library to adapt to
    seed: int = 0,  # of the weights and the order
    directory: str = "runs/lora_rates",  # folder for checkpoints and the adapter
) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder = Path(directory)
    topics = pydoc_data.topics.topics
    sources = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"))
    prose, _ = windows("\n\n".join(topics[name] for name in sorted(topics)), length)
    code, test_set = windows("\n\n".join(path.read_text() for path in sources), length)

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    config = hf.LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=length, **sizes)
    base: Any = hf.LlamaForCausalLM(config)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(3e-3, warmup=50, total=max(base_steps, 51)))
    base_loader = ll.make_loader(prose, batch_size=2 * batch_size, seed=seed, drop_last=True)
    train_step = ll.make_train_step(ll.make_grad_fn(base, loss_fn), optimizer, donate=True)
    state = ll.init_state(base, optimizer, seed=seed, loader=base_loader)
    state = fit(train_step, state, base_loader, base_steps, folder / "base")
    ll.bind(base, state)
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"])
    model: Any = peft.get_peft_model(copy.deepcopy(base), lora)
    rates = [lowest * (highest / lowest) ** (member / max(1, members - 1)) for member in range(members)]
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.transforms.per_member(rates), weight_decay=0.0)
    loader = ll.make_loader(code, batch_size=batch_size, seed=seed, drop_last=True)
    train_step = ll.vmap_step(ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=True))
    eval_step = ll.vmap_step(ll.make_eval_step(model, lambda model, batch: {"loss": loss_fn(model, batch)}))
    test_batches = DataLoader(test_set, batch_size=32)
    state = ll.init_state(model, optimizer, seed=seed, loader=loader)
    stack = ll.transforms.stack_states([state] * members, same_seeds=True)

    def bits(stack: ll.TrainState) -> list[float]:
        records = ll.evaluation.evaluate_records(eval_step, stack, test_batches)
        return [scores["loss"] / math.log(2) for scores in ll.transforms.compute_members(records)]

    before = bits(stack)[0]
    held, apart = memory(stack), members * memory(state)
    print(
        f"{members} adapters on one base: {held / 2**20:.1f} MiB; a base for each would take {apart / 2**20:.1f} MiB"
    )
    began, first = time.perf_counter(), stack.step
    stack = fit(train_step, stack, loader, steps, folder / "adapters")
    seconds = time.perf_counter() - began
    after = bits(stack)
    best = min(range(members), key=lambda member: after[member] if after[member] == after[member] else math.inf)
    print(f"{before:.3f} bits per byte of {package} before; after {stack.step} steps:")
    for member, (rate, value) in enumerate(zip(rates, after, strict=True)):
        print(f"    lr {rate:8.5f}   {value:6.3f}{'   <- best' * (member == best)}")

    winner = ll.transforms.unstack_states(stack)[best]
    ll.checkpoint.save_pretrained(model, winner, folder / "best")
    served = peft.PeftModel.from_pretrained(base, str(folder / "best")).eval()
    (tokens,) = next(iter(test_batches))
    expected = ll.make_predict_step(model, lambda model, tokens: model(tokens).logits)(winner, tokens)
    difference = (served(tokens).logits - expected).abs().max().item()
    print(f"the best adapter is in {folder / 'best'}; peft's answers differ by {difference:.1g} at most")
    return {
        "before": before,
        "best": after[best],
        "best_lr": rates[best],
        "share_of_memory": held / apart,
        "difference": difference,
        "seconds": seconds if stack.step > first else 0.0,
    }


def fit(
    train_step: ll.types.TrainStep, state: ll.TrainState, loader: ll.data.Loader, steps: int, folder: Path
) -> ll.TrainState:
    """Train a state or a stack to this step, from the folder's checkpoint."""
    ckpt, done = ll.checkpoint_io(folder, keep_last=1), ll.after_steps(steps)
    bar = ll.progress(loader, leave=False, disable=None)
    state = ckpt.restore(state)
    print(f"{folder.name}: step {state.step} of {steps}", flush=True)
    try:
        while not done(state):
            for batch in bar(state):
                state, metrics = train_step(state, batch)
                bar.show(metrics)
                if done(state):
                    break
    finally:  # at the end, and at Ctrl-C
        ckpt.save(state)
    return state


def loss_fn(model: Any, batch: tuple[Tensor]) -> ll.Mean:
    (tokens,) = batch
    return ll.next_token_loss(model(tokens).logits, tokens)


def windows(text: str, length: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows (n, length) of bytes, int64, of the first nine tenths of a text and of the rest."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    train, test = (part[: len(part) // length * length].view(-1, length) for part in (data[:cut], data[cut:]))
    return TensorDataset(train), TensorDataset(test)


def memory(state: ll.TrainState) -> int:
    """Bytes behind the tensors of a state, in which members of a stack may share some."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue")
        sys.exit(130)
