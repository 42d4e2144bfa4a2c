"""Host reads per training step: `python tests/far/reads.py` writes recipes/HOST_READS.md from the rows here.

A test counts the reads of each row on the far device, in pure and in donated steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "recipes/HOST_READS.md"
INTRODUCTION = """\
# Host reads

An accelerator runs behind the Python program, which only queues work for it. A read by the host (`loss.item()`, `if
tensor:`, `tensor.cpu()`) waits until the queue is empty, and the device then idles until the next work arrives. This page
says how many reads a training step makes with each part of looplib. Your loss function may add its own.

A conditional update reads once, because `state.step` counts completed updates and so the host must know whether there
was one. The flags of all parts of an update are combined on the device and read together. A skipped update may read
more, to say why it was skipped. So may the first steps of a run, which look at what later ones rely on.

Metrics stay on the device until `ll.compute`, which reads once for all of them. Call it every few hundred steps: the
progress bar reads when it is redrawn, and `ll.Window` adds up without reading.

A test counts these reads on a stand-in for an accelerator. The page is made from its rows by `python tests/far/reads.py`.
"""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        code: an expression over `grad_fn`, `optimizer`, `loss_fn`, `model`, `state` and `batch`. It replaces the variable
            that it is made from, and the step is built from what results.
        reads: reads by the host in each step.
        note: when there are more.
    """

    code: str
    reads: int
    note: str = ""


def of_class(name: str, reads: int = 0, note: str = "", more: str = "") -> Row:
    return Row(f"ll.optimizer(torch.optim.{name}, lr=1e-3{more})", reads, note)


TABLES = {
    "Steps": [
        Row("ll.make_train_step(grad_fn, optimizer)", 0),
        Row("ll.make_train_step(grad_fn, optimizer, donate=True)", 0),
        Row("ll.vmap_step(ll.make_train_step(grad_fn, optimizer))", 0),
        Row(
            "ll.make_eval_step(model, metric_fn)",
            0,
            "The first call reads, to see that the model changes no parameter.",
        ),
        Row("ll.make_predict_step(model, predict_fn)", 0, "As above. `ll.predict` copies each output to the CPU."),
    ],
    "Losses": [
        Row("ll.autocast(loss_fn, torch.bfloat16)", 0),
        Row(
            "ll.losses.offload(loss_fn, torch.nn.Linear)",
            0,
            "Copies to pinned memory and back, for which nobody waits.",
        ),
        Row("ll.losses.recompute(loss_fn, torch.nn.Linear)", 0),
        Row('ll.contrib.neftune(loss_fn, "0")', 0),
    ],
    "Gradients": [
        Row(
            "ll.accumulate(grad_fn, microbatches=2)",
            0,
            "The 1st, 2nd, 4th, 8th, ... call looks at labels and class weights.",
        ),
        Row("ll.grads.map_batch(grad_fn, lambda state, batch: batch)", 0),
        Row("ll.grads.reduce_gradients(grad_fn)", 0),
        Row("ll.contrib.sam(grad_fn)", 0),
        Row("ll.contrib.add_noise(ll.contrib.clip_per_sample(per_sample, 1.0), 1.0, noise_multiplier=1.1)", 0),
    ],
    "Optimizers": [
        *(
            of_class(name)
            for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")
        ),
        of_class("Rprop"),
        of_class("AdamW", more=", foreach=True"),
        of_class("AdamW", more=", fused=True"),
        of_class("ASGD", 6, "torch's own: one for each of the 6 parameters."),
        of_class("Adafactor", 12, "torch's own: two for each of the 6 parameters."),
        Row("ll.optimizer(torch.optim.AdamW, lr=ll.warmup_cosine(1e-3, warmup=100, total=2000))", 0),
        Row("ll.optimizer(torch.optim.AdamW, lr=ll.optim.inject(1e-3))", 0),
        Row("ll.chain(ll.clip_by_global_norm(1.0), optimizer)", 0),
        Row("ll.chain(ll.optim.clip_by_norm(0.1), optimizer)", 0),
        Row("ll.chain(ll.optim.clip_by_value(0.1), optimizer)", 0),
        Row("ll.chain(optimizer, ll.ema(0.999))", 0),
        Row("ll.chain(optimizer, ll.optim.swa(start=100))", 0),
        Row("ll.optim.own_steps(optimizer)", 0),
        Row("ll.optim.offload_state(optimizer)", 1, "The host waits until the last moments are back."),
        Row("ll.optim.every(optimizer, 2)", 0),
        Row('ll.optim.partition({"1": optimizer, "2": optimizer}, lambda name, tensor: str(tensor.ndim))', 0),
    ],
    "Conditional updates": [
        Row("ll.chain(ll.skip_nonfinite(max_consecutive=5), optimizer)", 1),
        Row("ll.chain(ll.optim.dynamic_loss_scale(), optimizer)", 1),
        Row("ll.chain(ll.optim.dynamic_loss_scale(), ll.skip_nonfinite(), optimizer, ll.ema(0.999))", 1),
        Row('ll.chain(ll.skip_nonfinite(), ll.optim.partition({"1": optimizer, "2": optimizer}, label))', 1),
        Row(
            'll.optim.partition({"1": ll.chain(ll.skip_nonfinite(), optimizer), "2": optimizer}, label)',
            1,
            "Each label decides for itself; all flags are read together.",
        ),
    ],
}


def page() -> str:
    parts = [INTRODUCTION]
    for heading, rows in TABLES.items():
        lines = [f"| `{row.code}` | {row.reads} | {row.note} |" for row in rows]
        parts += [f"## {heading}", "\n".join(["| code | reads per step | |", "| --- | --- | --- |", *lines])]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
