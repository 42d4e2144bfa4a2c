"""The table of host reads is what the far device counts."""

import inspect
import itertools

import pytest
import torch
from public import public_names

import looplib as ll
from far import cases
from far.device import far, host_reads
from far.reads import PAGE, TABLES, page

WARM = 4  # steps before the count: the first ones look at what later ones rely on


def counted(row, device, donate):
    """Reads in each of two steps, and where they were made."""
    make = cases.plain if "per_sample" in row.code else cases.classifier
    model = cases.language_model(device) if "neftune" in row.code else make(device)
    loss_fn = cases.loss_fn if "neftune" not in row.code else lambda model, x: ll.next_token_loss(model(x), x)
    batch = cases.tokens(device) if "neftune" in row.code else cases.data(device)
    names = {
        "ll": ll,
        "torch": torch,
        "model": model,
        "loss_fn": loss_fn,
        "metric_fn": cases.metric_fn,
        "predict_fn": cases.predict_fn,
        "label": lambda name, tensor: str(tensor.ndim),
    }
    names["optimizer"] = ll.optimizer(torch.optim.AdamW, lr=1e-3)
    if "loss_fn," in row.code:
        names["loss_fn"] = eval(row.code, names)
    names["grad_fn"] = ll.make_grad_fn(model, names["loss_fn"])
    if "per_sample" in row.code:
        names["per_sample"] = ll.contrib.make_per_sample_grad_fn(model, loss_fn)
    made = eval(row.code, names)
    step = None
    if isinstance(made, ll.types.Optimizer):
        names["optimizer"] = made
    elif "_step(" in row.code:
        step = made
    elif "loss_fn," not in row.code:
        names["grad_fn"] = made
    step = step or ll.make_train_step(names["grad_fn"], names["optimizer"], donate=donate)
    state = ll.init_state(model, names["optimizer"])
    if "vmap" in row.code:
        state = ll.transforms.stack_states([state, ll.copy_state(state)], same_seeds=True)
    reads = []
    for number in range(WARM + 2):
        with host_reads() as made_now:
            out = step(state, batch)
        state = out[0] if isinstance(out, tuple) else state
        reads += [made_now] if number >= WARM else []
    return reads


@pytest.mark.slow
def test_each_row_makes_as_many_reads_as_the_table_says(capfd):
    with far() as device:
        for row, donate in itertools.product(itertools.chain(*TABLES.values()), (False, True)):
            if donate and "_step(" in row.code:
                continue  # it makes its step itself, donated or not
            reads = counted(row, device, donate)
            assert [len(one) for one in reads] == [row.reads] * 2, (row.code, donate, reads)
    assert "performance drop" not in capfd.readouterr().err  # members are mapped, and not taken one by one


def test_compute_reads_once_and_a_window_not_at_all():
    with far() as device:
        model, state = cases.started(device)
        metrics = ll.make_eval_step(model, cases.metric_fn)(state, cases.data(device))
        assert len({metrics["loss"].total.dtype, metrics["accuracy"].total.dtype}) == 2
        with host_reads() as reads:
            window = ll.Window().add(metrics).add(metrics)
        assert reads == []
        with host_reads() as reads:
            ll.compute(window.metrics())
        assert len(reads) == 1


WITHOUT_ROW = {
    "contrib.find_lr": "a run of its own, which reads the loss of each step",
    "grads.backward": "no wrapper: a call of a gradient function",
    "optim.average": "no part of a step",
    "optim.eval_state": "no part of a step",
    "optim.take_rows": "no part of a step",
    "optim.hyperparameters": "no part of a step",
    "optim.part": "parts of the user's own",
}


def test_each_wrapper_and_each_part_of_an_update_has_a_row():
    def of_a_step(function):
        if not inspect.isfunction(function):
            return False
        signature = inspect.signature(function)
        return [*signature.parameters][:1] in WRAPPED or signature.return_annotation == "Optimizer"

    names = {name for name, function in public_names().items() if name.startswith(ROOMS) and of_a_step(function)}
    codes = "".join(row.code for rows in TABLES.values() for row in rows)
    found = {name for name in names if f".{name.partition('.')[2]}(" not in codes}
    assert found == WITHOUT_ROW.keys(), "add a row to tests/far/reads.py and run it, or a reason to WITHOUT_ROW"


WRAPPED = [["grad_fn"], ["optimizer"], ["loss_fn"], ["function"]]  # names of what is wrapped
ROOMS = "contrib.", "grads.", "losses.", "optim."


def test_the_page_is_made_from_the_rows():
    assert PAGE.read_text() == page(), "recipes/HOST_READS.md is out of date: run python tests/far/reads.py"
