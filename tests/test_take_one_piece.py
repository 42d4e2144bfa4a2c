"""The page "Take one piece": each block beside the plain loop that it replaces."""

import contextlib
import dataclasses
import io
import math
import re

import pytest
import torch
from public import ROOT
from ranks import launch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import looplib as ll

TEXT = (ROOT / "recipes/TAKE_ONE_PIECE.md").read_text()
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.S)
    for section in re.split(r"^##? ", TEXT, flags=re.M)
}
[LOOP] = SECTIONS["Take one piece"]
ACCUMULATE, PRIVATE, CONTRAST = SECTIONS["Gradients"]
[LOADER], [AVERAGE] = SECTIONS["Data"], SECTIONS["Average the weights (EMA)"]
RESUME, BEST = SECTIONS["Checkpoints and resume"]
[DICT, PARTS] = SECTIONS["An update on a dict of tensors"]
[SCHEDULE], [EVALUATE] = SECTIONS["Predicates and schedules"], SECTIONS["Metrics, evaluation and predictions"]
[STOP], [LOG], [CHECKS] = SECTIONS["Early stopping"], SECTIONS["Logs and plots"], SECTIONS["Unit tests"]
TRAIN = ACCUMULATE.partition("\n")[2]


def run(names, *blocks):
    for block in blocks:
        exec(compile(block, "TAKE_ONE_PIECE.md", "exec"), names)
    return names


@pytest.fixture
def loops(tmp_path, monkeypatch):
    """The names after the plain loop, twice, with batches of 30 and 10 samples in place of the random ones."""
    monkeypatch.chdir(tmp_path)
    both = run({}, LOOP), run({}, LOOP)
    for names in both:
        names["batches"] = [*zip(names["x"][:160].split(30), names["y"][:160].split(30), strict=True)]
    return both


def seed(step, microbatch=0, run_seed=0, rank=0):
    """Draw the masks that looplib draws."""
    state = ll.TrainState(step=step, seed=run_seed)
    torch.manual_seed(ll.debug.step_seed(state, microbatch=microbatch, rank=rank))


def raw_loop(names, backward, scheduled=True):
    for batch in names["batches"]:
        names["adamw"].zero_grad()
        backward(names["model"], batch, names["step"])
        names["adamw"].step()
        if scheduled:
            names["scheduler"].step()
        names["step"] += 1


def values(names):
    return {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}


def same(one, other):
    return [*one] == [*other] and all(torch.equal(one[name], other[name]) for name in one)


def with_sgd(*loops):
    """Adam would make differences of rounding large in the bias before BatchNorm, whose gradient is zero."""
    for names in loops:
        names["adamw"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(names["adamw"], 20)


def in_double(*loops):
    for names in loops:
        names["model"].double()
        names["batches"] = [(x.double(), y) for x, y in names["batches"]]


def test_the_plain_loop_has_what_the_page_says():
    names = run({}, LOOP)
    kinds = {*map(type, names["model"].modules())}
    assert {torch.nn.Dropout, torch.nn.BatchNorm1d} < kinds
    assert names["step"] == 10
    assert names["scheduler"].get_last_lr()[0] == pytest.approx(1e-2 * (1 + math.cos(math.pi * 10 / 20)) / 2)


def test_accumulate_is_a_loop_over_the_microbatches(loops):
    names, raw = loops

    def backward(model, batch, step):
        for number, (x, y) in enumerate(zip(*(column.tensor_split(4) for column in batch), strict=True)):
            seed(step, number)
            (names["loss_fn"](model, (x, y)) * (len(x) / len(batch[0]))).backward()

    stream = torch.get_rng_state()
    run(names, ACCUMULATE)
    assert torch.equal(stream, torch.get_rng_state())
    raw_loop(raw, backward)
    assert same(values(names), values(raw))
    assert names["step"] == 16
    assert names["model"][1].num_batches_tracked == 10 + 6 * 4


def test_each_samples_gradient_is_clipped_and_noise_is_drawn_for_each_step(loops):
    names, raw = loops
    quiet = PRIVATE.replace("Dropout(0.1)", "Dropout(0.0)").replace("noise_multiplier=0.5", "noise_multiplier=0.0")

    def backward(model, batch, step):
        params = [*model.parameters()]
        sums = [torch.zeros_like(param) for param in params]
        for x, y in zip(*batch, strict=True):
            grads = torch.autograd.grad(raw["loss_fn"](model, (x[None], y[None])), params)
            norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
            for total, grad in zip(sums, grads, strict=True):
                total += grad * (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for param, total in zip(params, sums, strict=True):
            param.grad = total / len(batch[0])

    for each in loops:
        torch.manual_seed(3)
        run(each, quiet)
        in_double(each)
        with_sgd(each)
    run(names, TRAIN)
    raw_loop(raw, backward)
    torch.testing.assert_close(values(names), values(raw), rtol=1e-9, atol=1e-12)

    begin, found = names["step"], []  # the same steps twice
    run(names, PRIVATE.replace("0.5", "50.0"))
    in_double(names)
    with_sgd(names)
    for _ in range(2):
        names["step"], before = begin, values(names)
        run(names, TRAIN)
        found.append(torch.cat([(values(names)[name] - tensor).flatten() for name, tensor in before.items()]))
    # The sum of six draws of noise, of which each was divided by the samples; the gradients, of norm 1 at most, are small.
    rates = [0.1 * (1 + math.cos(math.pi * number / 20)) / 2 for number in range(6)]
    deviation = 50.0 * math.hypot(*(lr / len(y) for lr, (_, y) in zip(rates, names["batches"], strict=True)))
    assert found[0].std().item() == pytest.approx(deviation, rel=0.1)
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.9  # drawn for the step, and not for the process


def test_a_contrastive_loss_sees_the_whole_batch(loops):
    names, raw = loops

    def backward(model, batch, step):
        parts = []
        for number, part in enumerate(zip(*(column.tensor_split(4) for column in batch), strict=True)):
            seed(step, number)
            parts.append(names["embed"](model, part))
        names["contrast"]([*map(torch.cat, zip(*parts, strict=True))]).backward()

    with_sgd(*loops)
    in_double(*loops)
    run(names, CONTRAST, TRAIN)
    raw_loop(raw, backward)
    torch.testing.assert_close(values(names), values(raw), rtol=1e-9, atol=1e-12)
    assert names["model"][1].num_batches_tracked == 10 + 6 * 4 * 2


def test_a_loader_yields_what_is_left_of_an_epoch(loops):
    names, _ = loops
    seen = []
    run(names | {"seen": seen}, LOADER.replace("...", "seen.append(batch)"))
    run(names, LOADER.replace(", num_workers=2", ""))
    loader, data = names["loader"], names["train_set"]
    epochs = [[*loader(ll.TrainState(epoch=epoch))] for epoch in range(2)]
    assert len(seen) == 2
    for (x, y), (whole_x, whole_y) in zip(seen, epochs[1][3:], strict=True):
        assert torch.equal(x, whole_x)
        assert torch.equal(y, whole_y)
    orders = [
        torch.cat([loader.indices(ll.TrainState(epoch=epoch, batch=i)) for i in range(5)]) for epoch in range(2)
    ]
    for order, batches in zip(orders, epochs, strict=True):
        assert sorted(order.tolist()) == [*range(160)]
        plain = torch.utils.data.DataLoader(data, batch_size=32, sampler=order.tolist())
        assert all(torch.equal(one[0], other[0]) for one, other in zip(plain, batches, strict=True))
    assert not torch.equal(*orders)


def script(folder, workers, stop, block):
    """The page's script in a new process, which ends after `stop` batches."""
    loader = LOADER.partition("\n")[0].replace("num_workers=2", f"num_workers={workers}")
    with contextlib.chdir(folder):
        run({}, "import os", LOOP, loader, killed_at(stop, block))


def killed_at(stop, block):
    """The script, which ends after the save of `stop` batches."""
    save = "        ckpt.save(run)\n"
    assert block.count(save) == 1
    return block.replace(save, f"{save}        if run['step'] == {stop}:\n            os._exit(0)\n")


@pytest.mark.slow
def test_a_script_that_is_killed_twice_ends_like_a_plain_loop(tmp_path):
    for workers, stop in (0, 5), (2, 8), (0, 99):
        launch(0, script, tmp_path, workers, stop, RESUME)
        found = run({}, LOOP)
        parts = {name: found[name] for name in ("model", "adamw", "scheduler")}
        parts["random"] = ll.checkpoint.RandomStreams()
        kept = ll.checkpoint_io(tmp_path / "mine").restore({**parts, "step": 0}, quiet=True)
        assert kept["step"] == min(stop, 15)

    raw = run({}, LOOP, LOADER.partition("\n")[0].replace(", num_workers=2", ""))
    raw |= {"step": 0, "batches": [b for epoch in range(3) for b in raw["loader"](ll.TrainState(epoch=epoch))]}

    def backward(model, batch, step):
        seed(step)
        raw["loss_fn"](model, batch).backward()

    raw_loop(raw, backward)
    assert same(values(found), values(raw))
    assert found["scheduler"].state_dict() == raw["scheduler"].state_dict()
    moments = found["adamw"].state_dict()["state"], raw["adamw"].state_dict()["state"]
    assert all(same(*both) for both in zip(*(each.values() for each in moments), strict=True))


def test_the_best_weights_are_loaded_alone(loops):
    names, _ = loops
    # With a rate that grows, the best comes early.
    names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(names["adamw"], 1.3)
    run(names, BEST)
    best = names["ckpt"].best()
    assert [each.step for each in names["ckpt"].steps()] == [best.step, 30]
    assert names["best"]["step"] == best.step
    scores = ll.evaluate(names["eval_step"], ll.init_state(names["model"]), names["test_batches"])
    assert scores["loss"] == best.metrics["eval/loss"]


@pytest.mark.slow
def test_an_average_of_a_killed_script_is_that_of_torchs_averaged_model(tmp_path):
    for workers, stop in (0, 5), (0, 8), (0, 99):
        launch(0, script, tmp_path, workers, stop, AVERAGE)
    with contextlib.chdir(tmp_path):
        found = run({}, LOOP, LOADER.partition("\n")[0].replace(", num_workers=2", ""), AVERAGE)
    assert found["run"]["step"] == 15

    raw = run({}, LOOP)
    raw |= {"step": 0, "batches": [b for epoch in range(3) for b in found["loader"](ll.TrainState(epoch=epoch))]}
    averaged = AveragedModel(raw["model"], multi_avg_fn=get_ema_multi_avg_fn(0.99))
    averaged.update_parameters(raw["model"])  # the first average is a copy

    def backward(model, batch, step):
        if step:
            averaged.update_parameters(model)
        raw["loss_fn"](model, batch).backward()

    raw_loop(raw, backward)
    averaged.update_parameters(raw["model"])
    assert same(values(found), values(raw))
    saved = torch.load(tmp_path / "ema.pt")
    assert same(saved, dict(averaged.module.named_parameters()))
    assert not same(saved, dict(raw["model"].named_parameters()))
    averaged.module.load_state_dict({**raw["model"].state_dict(), **saved})
    averaged.eval()
    [(x, y)] = raw["test_batches"]
    with torch.no_grad():
        assert found["scores"] == {"ema/loss": pytest.approx(F.cross_entropy(averaged(x), y).item())}


def test_an_optimizer_over_a_dict_has_the_bits_of_torchs(loops):
    names, _ = loops
    run(names, DICT)
    w, b = torch.zeros(10, 20, requires_grad=True), torch.zeros(10, requires_grad=True)
    raw, averages = torch.optim.SGD([w, b], lr=0.1, momentum=0.9, fused=True), [torch.zeros(10, 20), torch.zeros(10)]
    for _ in range(5):
        raw.zero_grad()
        F.cross_entropy(names["x"] @ w.T + b, names["y"]).backward()
        raw.step()
        for average, tensor in zip(averages, (w, b), strict=True):
            average.lerp_(tensor.detach(), 1 - 0.9)
    # torch.func computes the same sums, but may add in another order.
    torch.testing.assert_close(names["params"], {"w": w.detach(), "b": b.detach()}, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(names["average"], dict(zip("wb", averages, strict=True)), rtol=1e-6, atol=1e-7)


def test_an_average_and_a_clip_alone_have_the_bits_of_torchs(loops):
    names, raw = loops
    averaged = AveragedModel(raw["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(raw["model"])  # the first average is a copy
    norms = []

    def backward(model, batch, step):
        if norms:
            averaged.update_parameters(model)
        raw["loss_fn"](model, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    with_sgd(*loops)  # Adam's update hardly depends on the gradient's norm
    torch.manual_seed(5)
    names["norms"] = []
    run(names, PARTS.replace("    adamw.step()", "    norms.append(norm)\n    adamw.step()"))
    torch.manual_seed(5)
    raw_loop(raw, backward)
    averaged.update_parameters(raw["model"])
    assert max(norms) > 1
    assert [float(norm) for norm in names["norms"]] == [norm.item() for norm in norms]
    assert same(values(names), values(raw))
    assert same(names["average"], dict(averaged.module.named_parameters()))


def test_a_schedule_drives_param_groups_and_a_predicate_counts_updates(loops, capsys):
    names, raw = loops
    for each in loops:
        each["batches"] = each["batches"][:5]
    rates = [1e-2 * (step / 4 if step < 4 else (1 + math.cos(math.pi * (step - 4) / 16)) / 2) for step in range(20)]
    raw |= {"step": 0, "batches": raw["batches"] * 4}

    def backward(model, batch, step):
        raw["adamw"].param_groups[0]["lr"] = rates[step]
        raw["loss_fn"](model, batch).backward()

    torch.manual_seed(5)
    run(names, SCHEDULE)
    torch.manual_seed(5)
    raw_loop(raw, backward, scheduled=False)
    torch.testing.assert_close(values(names), values(raw), rtol=1e-4, atol=1e-5)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [1, 5, 10, 12, 15, 16, 20]  # the first, each fourth from 10 on, and the ends of epochs of 5 batches
    assert [int(step) for step, _ in printed] == steps
    assert [float(rate) for _, rate in printed] == pytest.approx([rates[step - 1] for step in steps])

    torchs = torch.optim.lr_scheduler.LambdaLR(
        optimizer := torch.optim.AdamW(raw["model"].parameters(), lr=1.0), names["schedule"]
    )
    for rate in rates:
        assert torchs.get_last_lr()[0] == pytest.approx(rate)
        optimizer.step()
        torchs.step()


def test_evaluation_and_predictions_leave_everything_alone(loops):
    names, raw = loops
    model, [(x, y)] = raw["model"], names["test_batches"]
    stream, before = torch.get_rng_state(), values(names)
    run(names, EVALUATE)
    assert torch.equal(stream, torch.get_rng_state())
    assert same(values(names), before)
    assert all(module.training for module in names["model"].modules())
    assert all(param.grad is not None for param in names["model"].parameters())  # of the loop's last step
    model.eval()
    with torch.no_grad():
        logits = model(x)
    assert names["scores"] == {"eval/accuracy": pytest.approx((logits.argmax(1) == y).float().mean().item())}
    assert torch.equal(names["probabilities"], logits.softmax(1))

    # Weights that are replaced, where a state of before would hold the old ones.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    names["model"].load_state_dict(zeros, assign=True)
    run(names, EVALUATE)
    assert torch.equal(names["probabilities"], torch.full((40, 10), 0.1))


def test_early_stopping_waits_as_written_by_hand_and_keeps_the_best(loops):
    names, _ = loops

    def train(batch):
        names["adamw"].zero_grad()
        names["loss_fn"](names["model"], batch).backward()
        names["adamw"].step()

    names |= {"train": train, "history": [], "saved": [], "reborn": reborn}
    names["adamw"].param_groups[0]["lr"] = 0.05  # with which it soon overfits
    block = STOP.replace("...", "train(batch)").replace(
        "    if stop(watch)",
        "    history.append(scores['eval/loss'])\n    saved.append(is_best(watch))\n"
        "    watch = reborn(watch)\n    if stop(watch)",
    )
    run(names, block)

    best, reference, waited, improved = math.inf, math.inf, 0, []
    for loss in names["history"]:
        improved.append(loss < best)
        best, waited = min(best, loss), waited + 1
        if reference - loss > 0.01:
            reference, waited = loss, 0
        if waited == 2:
            break
    assert improved == names["saved"]
    assert len(improved) < 20
    assert waited == 2
    names["model"].load_state_dict(torch.load("best.pt"))
    scores = ll.evaluate(names["eval_loss"], ll.init_state(names["model"]), names["test_batches"])
    assert scores["loss"] == best


def reborn(watch):
    """As in a new process, by what the page says to keep."""
    file = io.BytesIO()
    torch.save(dataclasses.asdict(watch.extra["best"]), file)
    file.seek(0)
    kept = torch.load(file)
    return ll.TrainState(step=watch.step, extra={"best": ll.predicates.BestSoFar(**kept)})


def test_a_window_logs_the_mean_over_the_samples(loops, tmp_path):
    names, raw = loops
    losses = []

    def backward(model, batch, step):
        loss = raw["loss_fn"](model, batch)
        losses.append((loss.item(), len(batch[0])))
        loss.backward()

    torch.manual_seed(5)
    run(names, LOG)
    torch.manual_seed(5)
    raw_loop(raw, backward, scheduled=False)
    assert same(values(names), values(raw))
    means = [
        sum(loss * count for loss, count in losses[i : i + 2]) / sum(count for _, count in losses[i : i + 2])
        for i in (0, 2, 4)
    ]
    rows = ll.log.read_jsonl("mine.jsonl")
    assert [row["step"] for row in rows] == [12, 14, 16]
    assert [row["train/loss"] for row in rows] == pytest.approx(means, rel=1e-12)
    assert (tmp_path / "mine.png").stat().st_size > 5000


def test_a_step_is_checked_without_a_loader_and_a_mistake_is_found(loops):
    names, _ = loops
    run(names, CHECKS)
    names["test_my_step"]()

    def forgetful(model, batch):
        return F.cross_entropy(model[4](model[:4](batch[0]).detach()), batch[1])

    names["loss_fn"] = forgetful
    with pytest.raises((AssertionError, ValueError), match=r"0\.weight"):
        names["test_my_step"]()


def on_two_ranks():
    loop = LOOP.partition("step = 0")[0]
    loader_line = LOADER.partition("\n")[0].replace("num_workers=2", "drop_last=True")
    with ll.distributed.setup():
        rank = torch.distributed.get_rank()
        found = []
        for by_hand in False, True:
            names = run({}, loop, loader_line)
            model = DistributedDataParallel(names["model"])
            if by_hand:  # the whole batches, of which each rank takes its part
                whole = ll.make_loader(names["train_set"], batch_size=32, divide=False)
                batches = [
                    [column.tensor_split(2)[rank] for column in b] for b in whole(ll.TrainState(epoch=1, batch=2))
                ]
            else:
                batches = names["loader"](ll.TrainState(epoch=1, batch=2))
            grad_fn = ll.make_grad_fn(model, names["loss_fn"])
            for step, batch in enumerate(batches):
                names["adamw"].zero_grad()
                if by_hand:
                    seed(step, rank=rank)
                    names["loss_fn"](model, batch).backward()
                else:
                    ll.grads.backward(grad_fn, model, batch, step=step)
                names["adamw"].step()
            found.append(values(names))
        assert step == 2
        assert same(*found)

        [(x, y)] = names["test_batches"]
        several = [*zip(x.split(7), y.split(7), strict=True)]
        names |= {"model": model, "test_batches": several}
        run(names, EVALUATE)
        model.module.eval()
        accuracy = (model.module(x).argmax(1) == y).float().mean().item()
        assert names["scores"] == {"eval/accuracy": pytest.approx(accuracy)}
        assert len(names["probabilities"]) == 40


def test_on_two_ranks_the_loader_and_the_evaluation_divide_the_batches():
    launch(2, on_two_ranks)
