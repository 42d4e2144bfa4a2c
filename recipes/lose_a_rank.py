"""Survive the loss of a process: replace a killed rank with the state of a living one, not with a checkpoint.

    python recipes/lose_a_rank.py --replicas 3 --kills 5        (three processes, of which five are killed at random)

Every rank holds the whole state (unlike with FSDP2), so any living rank can give it to a new one. If a process dies,
the sums over ranks fail on the others, before any weight has changed: a step reduces its gradients first and updates
afterwards. Each survivor then keeps its state, leaves the broken process group, and waits in the next one for the
process that replaces the dead one. The rank with the most steps sends its state to the others (a step may have finished
on some of them), and all continue at its batch. Batches, losses and weights are the bits of a run without kills.

Reached with --kills 50 --epochs 100 and seed 0: the checksum of an undisturbed run, in 267 seconds on two busy cores,
4.8 s from step to step around a kill. If all ranks die, or after Ctrl-C, the run continues from its last epoch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import random
import re
import signal
import sys
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import looplib as ll


def main(
    replicas: int = 2,  # processes, each with the whole model
    kills: int = 0,  # processes to kill at random moments of the run
    epochs: int = 30,  # passes over the digits
    batch_size: int = 96,  # samples in a step, of all processes together
    lr: float = 1e-3,  # learning rate
    engine: str = "reduce",  # reduce (ll.grads.reduce_gradients) or ddp (DistributedDataParallel)
    seed: int = 0,  # of weights, order and the moments of the kills
    directory: str = "runs/lose_a_rank",  # folder for checkpoints
) -> dict[str, Any]:
    """Start the processes, replace those that die, and return what the first rank reports at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["looplib", "sklearn.datasets", "torch.distributed"])
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("group", "0")
    print(f"starting {replicas} processes", flush=True)
    settings = (epochs, batch_size, lr, engine, seed, directory)
    processes: list[Any] = [None] * replicas
    chance, left, next_kill, killed_in = random.Random(seed), kills, 0.0, ""
    try:
        while not store.check(["result"]):
            time.sleep(0.005)
            group = store.get("group").decode()
            if left and group != killed_in and store.check([f"{group}/running"]):  # all ranks have the state
                next_kill = next_kill or time.monotonic() + chance.uniform(0, 0.3)
                if time.monotonic() > next_kill:
                    chance.choice(processes).kill()
                    left, killed_in, next_kill = left - 1, group, 0.0
            for rank, process in enumerate(processes):
                if process is None or process.exitcode == -9:  # not started yet, or killed
                    processes[rank] = context.Process(target=work, args=(rank, replicas, store.port, *settings))
                    processes[rank].start()
                elif process.exitcode is not None:  # an error of the program, which would come again
                    raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}; see its output")
    finally:
        for process in multiprocessing.active_children():
            process.kill()
    recoveries, milliseconds = (store.add(name, 0) for name in ("recoveries", "milliseconds"))
    result = {**json.loads(store.get("result")), "kills": kills - left, "recoveries": recoveries}
    print(f"{result}, each {milliseconds / 1000 / max(1, recoveries):.2f} s from one step to the next")
    return result


def work(rank: int, ranks: int, port: int, *settings: Any) -> None:
    epochs, batch_size, lr, engine, seed, directory = settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor too, which ends its processes
    torch.set_num_threads(1)
    store = TCPStore("localhost", port, is_master=False)
    torch.manual_seed(seed)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
    images = images.float() / 16
    loader = ll.make_loader(TensorDataset(images, labels), batch_size=batch_size, seed=seed)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(lr, warmup=20, total=2000))
    ckpt = ll.checkpoint_io(f"{directory}/checkpoints", keep_last=1)
    state = ckpt.restore(ll.init_state(model, optimizer, seed=seed, loader=loader), quiet=True)
    done, save_now, log = ll.after_epochs(epochs), ll.at_epoch_end(), ll.console()
    if rank == 0 and state.step and not store.check(["0/running"]):
        what = "already finished at" if done(state) else "continuing from"
        print(f"{what} step {state.step}; delete {directory} to start again", flush=True)
    last_step, failures = None, 0  # when the last step ended; failures since then
    while not done(state):
        group = join(store, rank, ranks)
        try:
            state, gave = newest(state)
            train_step = step_of(model, optimizer, engine)
            while not done(state):
                for batch in loader(state):
                    state, metrics = train_step(state, batch)
                    if gave:  # the first step of a group
                        store.set(f"{group}/running", "")
                        store.add("recoveries", int(last_step is not None))
                        store.add("milliseconds", round(1000 * (time.monotonic() - (last_step or time.monotonic()))))
                    gave, last_step, failures = False, time.monotonic(), 0
                    if save_now(state):
                        ckpt.save(state)
                        log(state, ll.compute(metrics))  # of the first rank's part of the batch
        except RuntimeError as error:  # of gloo: a peer is gone. The state is that of the last finished step
            if (failures := failures + 1) > 5:
                raise
            print(f"rank {rank}: lost group {group} at step {state.step}; {str(error).splitlines()[0]}", flush=True)
            store.compare_set("group", str(group), str(group + 1))
        train_step = None  # DistributedDataParallel holds on to the group, whose connections must close
        distributed.destroy_process_group()
        ll.distributed.set_data_parallel_group(None)
    if rank == 0:
        loss = F.cross_entropy(model.eval()(images), labels).item()
        checksum = zlib.crc32(str(ll.debug.fingerprint(state)).encode())
        store.set("result", json.dumps({"loss": loss, "steps": state.step, "checksum": f"{checksum:08x}"}))
    time.sleep(3600)  # until the supervisor has the result


def join(store: Any, rank: int, ranks: int) -> int:
    """Join the current process group once all ranks are there, and return its number."""
    while True:
        group = int(store.get("group"))
        if store.add(f"{group}/here/{rank}", 1) > 1:  # a process of this rank was here, and has died
            store.compare_set("group", str(group), str(group + 1))
            continue
        # Twice, so that those who came first say that they are still alive when the last one has come.
        if not all(all_are(store, group, what, rank, ranks) for what in ("here", "ready")):
            continue
        try:
            options: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=10)}
            distributed.init_process_group("gloo", store=PrefixStore(f"group-{group}", store), **options)
            return group
        except RuntimeError:  # one has died in the last milliseconds
            store.compare_set("group", str(group), str(group + 1))


def all_are(store: Any, group: int, what: str, rank: int, ranks: int) -> bool:
    """Say so of this rank and wait for all of them, or return False if there is a newer group instead."""
    store.set(f"{group}/{what}/{rank}", "1")
    while not (complete := store.check([f"{group}/{what}/{other}" for other in range(ranks)])):
        time.sleep(0.005)
        if int(store.get("group")) != group:
            break
    return bool(complete)


def newest(state: ll.TrainState) -> tuple[ll.TrainState, bool]:
    """The state of the rank that has finished the most steps, on all ranks, and True on that rank."""
    steps: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(steps, state.step)
    giver, rank = steps.index(max(steps)), distributed.get_rank()
    leaves, counts = pytree.tree_leaves(state), [state.replace(params={}, buffers={}, opt_state=None)]
    distributed.broadcast_object_list(counts, giver)
    with torch.no_grad():  # into copies first, since the giver may die before it has sent all
        received = [leaf if rank == giver else torch.empty_like(leaf) for leaf in leaves]
        for tensor in received:
            distributed.broadcast(tensor, giver)
        for leaf, tensor in zip(leaves, received, strict=True):
            leaf.copy_(tensor)  # into the memory of the model and of the moments
    return counts[0].replace(params=state.params, buffers=state.buffers, opt_state=state.opt_state), rank == giver


def step_of(model: nn.Module, optimizer: Any, engine: str) -> Any:
    if engine == "ddp":  # without find_unused_parameters, DDP changes the order of its sums after the first step
        grad_fn = ll.make_grad_fn(DistributedDataParallel(model, find_unused_parameters=True), loss_fn)
    else:
        grad_fn = ll.grads.reduce_gradients(ll.make_grad_fn(model, loss_fn))
    return ll.make_train_step(grad_fn, optimizer, donate=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, about in re.findall(r"^    (\w+): .*?,  # (.*)", inspect.getsource(main), re.MULTILINE):
        default = inspect.signature(main).parameters[name].default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default!r})")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue from the last epoch")
        sys.exit(130)
