"""The figures in the cookbook's tables are those of its blocks."""

import re

import pytest
import torch
from cookbook import BLOCK, SECTIONS, SETUP

import looplib as ll


def rows(heading, first):
    """Rows of the table of a section whose first header is this one: lists of cells."""
    begin = re.escape(f"| {first} |" if first else "| |")
    table = re.search(rf"^{begin}.*\n\| ---.*\n((?:\|.*\n?)+)", SECTIONS[heading], re.M)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def header(heading, first):
    return re.search(rf"^\| {re.escape(first)} \|(.*)\|$", SECTIONS[heading], re.M)[1]


def numbers(cells):
    return [float(cell.replace(",", "")) for cell in cells]


def run(heading, number=1, changes=(), folder=None, monkeypatch=None):
    """The names after a block, with some of its text changed."""
    if folder:
        monkeypatch.chdir(folder)
    block = BLOCK.findall(SECTIONS[heading])[number - 1]
    for old, new in changes:
        assert old in block
        block = block.replace(old, new)
    names = {}
    exec(SETUP + block, names)
    return names


def test_a_run_on_two_three_and_one_processes():
    names = {}
    exec(SETUP, names)
    optimizer, data = ll.optimizer(torch.optim.AdamW, lr=1e-2), names["train_set"]
    step = ll.make_train_step(names["grad_fn"], optimizer)
    state, seen, parts = None, [], []
    for processes, last in ((2, 5), (3, 9), (1, 20)):
        loader = ll.make_loader(data, batch_size=8 * processes)
        state = loader.resume(state) if state else ll.init_state(names["model"], optimizer, loader=loader)
        begin, before = state.step, len(seen)
        for batch in loader(state):
            seen += [int(index) for index in loader.indices(state)]
            state, _ = step(state, batch)
            if state.step == last:
                break
        steps, samples = f"{begin + 1} to {last}", f"{before} to {len(seen)}"
        parts.append([str(processes), str(8 * processes), steps, samples, str(len(seen) - before)])
    assert parts == rows("Continue with another number of processes", "processes")
    assert sorted(seen) == list(range(256))
    assert state.epoch == 1


@pytest.mark.slow
def test_the_samples_that_a_resumed_run_reads():
    for buffer, *expected in rows("Shuffle files that are read forward", "`buffer`"):
        buffer, read = int(buffer.replace(",", "")), []

        def samples(shard, start, read=read):
            for index in range(start, 200_000):
                read.append(index)
                yield index

        counts = {}
        for batch in range(1_500, 1_516):
            dataset = ll.data.shards(samples, lengths=[200_000], buffer=buffer)  # as in a new process
            loader = ll.make_loader(dataset, batch_size=64, order=ll.data.shuffled_blocks(buffer))
            read.clear()
            next(iter(loader(ll.TrainState(batch=batch))))
            offset = 64 * batch % buffer
            place = 0 if offset == 0 else 1 if offset + 64 <= buffer else 2
            counts.setdefault(place, set()).add(len(read))
        assert [counts[place] for place in range(3)] == [{int(cell.replace(",", ""))} for cell in expected]


def bytes_of(*states):
    """Bytes of the parameters and of the optimizers' states, each memory once."""
    leaves = torch.utils._pytree.tree_leaves([(state.params, state.opt_state) for state in states])
    tensors = {leaf.untyped_storage().data_ptr(): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


@pytest.mark.slow
def test_many_adapters(tmp_path, monkeypatch):
    heading = "Train many adapters on one frozen model"
    names = run(heading, folder=tmp_path, monkeypatch=monkeypatch)
    [stack, apart] = re.search(r"takes ([\d,]+) bytes; .* would take ([\d,]+)\.", SECTIONS[heading]).groups()
    assert numbers([stack, apart]) == [bytes_of(names["stack"]), 8 * bytes_of(ll.copy_state(names["start"]))]
    eval_step = ll.make_eval_step(names["adapted"], names["metric_fn"])
    losses = [ll.evaluate(eval_step, member, names["test_batches"])["loss"] for member in names["members"]]
    assert numbers(header(heading, "learning rate").split("|")) == names["rates"]
    [(_, *cells)] = rows(heading, "learning rate")
    assert numbers(cells) == pytest.approx(losses, abs=0.02)


def test_a_changed_model(capsys):
    heading = "Change the model in the middle of a run"
    grafted = run(heading)["grafted"]
    assert capsys.readouterr().out.strip() == re.search(r"It prints `(.*)`", SECTIONS[heading])[1]
    layers = ("first.weight", "first.bias", "second.bias", "last.weight", "last.bias")
    origins = {**{name: name for name in layers}, "second.weight": "first.weight"}
    moments = ("step", "exp_avg", "exp_avg_sq")
    of_adamw = {(name, moment): f"opt_state.AdamW.state.{name}.{moment}" for name in origins for moment in moments}
    assert grafted.carried == {
        **{f"params.{name}": f"params.{origin}" for name, origin in origins.items()},
        **{path: of_adamw[origins[name], moment] for (name, moment), path in of_adamw.items()},
    }
    assert all("third." in name for name in grafted.fresh)


def test_the_mean_of_a_stopped_epoch(tmp_path, monkeypatch):
    heading = "Log the mean loss since the last line"
    losses, add = [], ll.Window.add
    monkeypatch.setattr(ll.Window, "add", lambda self, metrics: losses.append(metrics) or add(self, metrics))
    printed, kept = [], {"print": lambda epoch, values: printed.append(values["train/loss"])}
    monkeypatch.chdir(tmp_path)
    block = BLOCK.findall(SECTIONS[heading])[1].replace("ll.every_n_steps(3)", "ll.every_n_steps(5)")
    exec(SETUP + block, dict(kept))
    exec(SETUP + block.replace("        ckpt.save(state)", "        break"), dict(kept))  # from step 5
    [_, whole], [_, resumed], [_, last] = rows(heading, "run")
    assert [f"{mean:.4f}" for mean in printed] == [whole, resumed]
    window = ll.Window()
    for metrics in losses[5:8]:
        window = add(window, metrics)
    assert f"{ll.compute(window.metrics())['loss']:.4f}" == last.partition(",")[0]


def test_rows_that_are_added_and_pruned(tmp_path, monkeypatch):
    heading = "Add and prune rows (Gaussian splats)"
    taken, take_rows = [], ll.optim.take_rows

    def recorded(optimizer, state, keep, **named):
        result = take_rows(optimizer, state, keep, **named)
        moments = result.opt_state["exp_avg"]["weight"] if "exp_avg" in result.opt_state else moments_of(result)
        counts = [len(state.params["weight"]), int(keep["weight"].sum()), len(result.params["weight"])]
        taken.append([state.step, *counts, int((moments != 0).any(1).sum())])
        return result

    monkeypatch.setattr(ll.optim, "take_rows", recorded)
    names = run(heading, folder=tmp_path, monkeypatch=monkeypatch)
    assert taken == [numbers(row) for row in rows(heading, "after step")]
    assert len(names["ckpt"].restore(names["state"]).params["weight"]) == taken[-1][3]


def moments_of(state):
    leaves = torch.utils._pytree.tree_leaves(state.opt_state)
    return next(
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.shape == state.params["weight"].shape
    )


def test_where_the_average_of_a_target_stands():
    heading = "Train against a target network (DQN, TD3, SAC)"
    whole = [
        (
            '"critic": ll.chain(adam, ll.ema(0.995))}, lambda name, tensor: name.split(".")[0]\n)',
            '"critic": adam}, '
            'lambda name, tensor: name.split(".")[0]\n)\noptimizer = ll.chain(optimizer, ll.ema(0.995))',
        ),
        ('ll.optim.average(optimizer, state, "critic")', "ll.optim.average(optimizer, state)"),
    ]
    moves = []
    for changes in ([], whole):
        state = run(heading, 2, changes)["state"]
        [count] = re.findall(r"'updates': tensor\((\d+)\)", str(state.opt_state))
        moves.append([int(count), pytest.approx(0.995 ** int(count), abs=5e-4)])
        assert state.step == 15
    assert [numbers(row[1:]) for row in rows(heading, "`ll.ema(0.995)` stands")] == moves


def test_a_second_phase():
    heading = "Start from saved weights"
    names = run(heading, 2, [("for batch in", "second = state\nfor batch in"), ("donate=True", "donate=False")])
    first, second = names["first"], names["second"]
    table = {name: cells for name, *cells in rows(heading, "")}
    assert all(torch.equal(tensor, second.params[name]) for name, tensor in first.params.items())
    counts = [f"{state.step}, {state.epoch}, {state.samples}" for state in (first, second)]
    assert table["`step`, `epoch`, `samples`"] == counts
    assert table["`seed`"] == [str(first.seed), str(second.seed)]


def test_the_rate_at_a_plateau(monkeypatch):
    heading = "Reduce the learning rate on a plateau"
    seen, reduce_on_plateau = {}, ll.optim.reduce_on_plateau
    optimizer = ll.optimizer(torch.optim.AdamW, lr=ll.optim.inject(1e-2))

    def recorded(state, scores, **named):
        result = reduce_on_plateau(state, scores, **named)
        seen[state.epoch] = scores["eval/loss"], float(ll.optim.hyperparameters(optimizer, result)["lr"])
        return result

    monkeypatch.setattr(ll.optim, "reduce_on_plateau", recorded)
    run(heading)
    epochs = [int(cell) for cell in header(heading, "epoch").split("|")]
    [(_, *losses), (_, *rates)] = rows(heading, "epoch")
    assert numbers(rates) == pytest.approx([seen[epoch][1] for epoch in epochs])
    assert numbers(losses) == pytest.approx([seen[epoch][0] for epoch in epochs], rel=0.01)


def test_the_average_with_and_without_its_own_statistics(capsys):
    heading = "Average the last weights (SWA) of a model with BatchNorm"
    run(heading)
    losses = [float(loss) for loss in re.findall(r"'loss': ([\d.]+)", capsys.readouterr().out)]
    assert [float(loss) for _, loss in rows(heading, "weights")] == pytest.approx(losses, rel=0.01)


def test_schedules():
    heading = "Warm up and decay the learning rate"
    steps = [int(cell) for cell in header(heading, "step").split("|")]
    for code, *cells in rows(heading, "step"):
        schedule = eval(code.strip("`"), {"ll": ll})
        assert numbers(cells) == pytest.approx([1e3 * float(schedule(step)) for step in steps], abs=5.1e-4), code


def test_the_bytes_of_rounds_are_the_weights():
    names = {}
    exec(SETUP, names)
    weights = sum(4 * tensor.numel() for tensor in names["model"].parameters())
    for run_of, steps, count, _ in rows("Synchronize every few steps (local SGD, DiLoCo)", ""):
        times = int(run_of.split()[0]) if "rounds" in run_of else int(steps)
        assert int(count.replace(",", "")) == times * weights


@pytest.mark.slow
def test_the_operations_of_a_text():
    heading = "Measure model FLOPs utilization (MFU)"
    names = run(heading, changes=[("print(", "print = str\nprint(")])
    for length, counted, formula, share in rows(heading, "length"):
        length = int(length.replace(",", ""))
        tokens = torch.zeros(1, length, dtype=torch.long)
        count, flops = ll.log.count_flops(names["grad_fn"], names["state"], tokens), names["flops"](tokens)
        attention = 12 * names["layers"] * names["width"] * length**2 / flops
        assert [counted, formula, share] == [
            f"{count:.2e}".replace("+0", ""),
            f"{flops:.2e}".replace("+0", ""),
            f"{attention:.0%}",
        ]


def test_bytes_of_adamw_on_the_device_and_on_the_host():
    params, moments = {}, {}
    for heading in ("Apply weight decay to matrices only", "Keep the optimizer's state on the host"):
        state = run(heading)["state"]
        weight, kept = state.params["0.weight"], state.opt_state["AdamW"]["state"]["0.weight"]
        params[heading] = weight.nbytes / weight.numel()
        moments[heading] = (
            sum(tensor.nbytes for tensor in kept.values() if tensor.shape == weight.shape) / weight.numel()
        )
    (weights,), (states,) = {*params.values()}, {*moments.values()}
    alone, offloaded = rows("Keep the optimizer's state on the host", "AdamW")
    assert alone[1:] == [f"{weights + states:g}", "0", "0"]
    assert offloaded[1:] == [f"{weights:g}", f"{states:g}", f"{states:g} each way"]
