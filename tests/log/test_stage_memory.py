"""Memory of each stage, against the Trainer's memory tracker in the same process, and against blocks of known sizes."""

import builtins
import mmap
import sys

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import TrainerMemoryTracker

import looplib as ll

MB = 2**20
linux = sys.platform == "linux"  # elsewhere the system does not reset its peak


def block(megabytes):
    """Memory from the system: an allocator might have as much left from before, and the process would not grow."""
    pages = mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


class Stages:
    """Stages with the names that the tracker looks for on the stack; each measures what it is given to do."""

    def __init__(self, enter, leave, work):
        self.enter, self.leave, self.work = enter, leave, work
        self.kept = []

    def train(self):
        self.enter("train")
        self.kept.append(block(96))
        self.work(self)
        peak = block(160)
        del peak
        self.leave("train")

    def evaluate(self):
        self.enter("eval")
        peak = block(64)
        del peak
        self.leave("eval")


def by_tracker(work):
    tracker, metrics = TrainerMemoryTracker(), {}

    def enter(stage):
        tracker.derive_stage = lambda: stage  # it reads the name of the function two calls up
        tracker.start()

    def leave(stage):
        tracker.stop(stage)
        tracker.update_metrics(stage, metrics)

    tracker.init_reported = True  # there was no __init__ to report
    stages = Stages(enter, leave, work)
    stages.train()
    stages.evaluate()
    return metrics


def by_looplib(work):
    memory, stack = ll.log.stage_memory(), []

    def enter(stage):
        stack.append(memory(stage))
        stack[-1].__enter__()

    stages = Stages(enter, lambda stage: stack.pop().__exit__(None, None, None), work)
    stages.train()
    stages.evaluate()
    return memory.read()


@pytest.mark.skipif(not linux, reason="only Linux resets a process's peak")
@pytest.mark.slow
def test_the_numbers_are_those_of_the_trainers_tracker():
    theirs, ours = by_tracker(lambda stages: None), by_looplib(lambda stages: None)
    assert theirs.keys() == {name for name in ours if not name.startswith("before_")}
    # The system counts pages by core and adds up now and then, so bounds are loose.
    assert ours == pytest.approx(ours | theirs, abs=12 * MB)
    assert ours["train_mem_cpu_alloc_delta"] == pytest.approx(96 * MB, abs=12 * MB)
    assert ours["train_mem_cpu_peaked_delta"] == pytest.approx(160 * MB, abs=12 * MB)
    assert ours["eval_mem_cpu_peaked_delta"] == pytest.approx(64 * MB, abs=12 * MB)


@pytest.mark.skipif(not linux, reason="only Linux resets a process's peak")
def test_a_stage_within_another_counts_in_both():
    memory = ll.log.stage_memory()
    with memory("train"):
        block(128)
        with memory("eval"):
            block(32)
    sizes = memory.read()
    assert sizes["train_mem_cpu_peaked_delta"] == pytest.approx(128 * MB, abs=12 * MB)
    assert sizes["eval_mem_cpu_peaked_delta"] == pytest.approx(32 * MB, abs=12 * MB)


@pytest.mark.slow
def test_the_names_are_those_that_the_trainer_reports(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=11, **sizes))
    rows = [{"input_ids": torch.ones(3, dtype=torch.long), "labels": torch.tensor(0)}] * 4
    arguments = TrainingArguments(
        tmp_path, max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        skip_memory_metrics=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    theirs = trainer.train().metrics | trainer.evaluate(rows) | trainer.predict(rows).metrics
    memory = ll.log.stage_memory()
    for stage in ("init", "train", "eval", "test"):
        with memory(stage):
            block(1)
    names = {name for name in theirs if "_mem_" in name}
    assert len(names) > 8
    assert names == {name for name in memory.read() if not name.startswith("before_") or "init" in name}


@pytest.mark.slow
def test_without_proc_a_peak_is_given_only_if_it_is_new(monkeypatch):
    real, peak = builtins.open, [1000]

    def missing(path, *args, **settings):
        if str(path).startswith("/proc/self/"):
            raise FileNotFoundError(path)
        return real(path, *args, **settings)

    monkeypatch.setattr("builtins.open", missing)
    resource = pytest.importorskip("resource")
    usage = type("usage", (), {"ru_maxrss": property(lambda _: peak[0])})()
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    memory = ll.log.stage_memory()
    with memory("train"):
        peak[0] = 10**9
    with memory("eval"):
        pass
    peaks = {name for name in memory.read() if "peaked" in name}
    assert peaks == {"train_mem_cpu_peaked_delta"}
    assert memory.read()["train_mem_cpu_peaked_delta"] > 10**9 / 2

    monkeypatch.setitem(sys.modules, "psutil", None)  # not installed
    with (memory := ll.log.stage_memory())("train"):
        pass
    assert not [name for name in memory.read() if "cpu" in name]


def test_an_accelerators_bytes_are_those_of_torchs_allocator(monkeypatch):
    """A stand-in counts: no accelerator is needed."""
    now, peak = [100.0], [700.0]

    class Accelerator:
        is_available = staticmethod(lambda: True)

        class memory:
            memory_allocated = staticmethod(lambda: now[0])
            max_memory_allocated = staticmethod(lambda: peak[0])

            @staticmethod
            def reset_peak_memory_stats():
                peak[0] = now[0]

    monkeypatch.setattr(torch, "accelerator", Accelerator)
    memory = ll.log.stage_memory()
    with memory("train"):
        now[0], peak[0] = 150.0, 400.0
        with memory("eval"):
            peak[0] = 250.0
    sizes = {name: value for name, value in memory.read().items() if "gpu" in name}
    assert sizes == {
        "before_train_mem_gpu": 100,
        "train_mem_gpu_alloc_delta": 50,
        "train_mem_gpu_peaked_delta": 250,
        "before_eval_mem_gpu": 150,
        "eval_mem_gpu_alloc_delta": 0,
        "eval_mem_gpu_peaked_delta": 100,
    }


def test_a_stage_that_is_under_way_is_not_begun_again():
    memory = ll.log.stage_memory()
    with memory("train"):
        with pytest.raises(ValueError, match="the stage 'train' is under way"), memory("train"):
            pass
        assert memory.read() == {}
    with memory("train"):  # it has ended, so its numbers are replaced
        pass
    assert len(memory.read()) >= 3
