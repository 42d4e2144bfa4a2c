"""Accelerators by their general name: `torch.accelerator`, with the few exceptions listed here."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import distributed

import looplib as ll

ROOT = Path(__file__).parents[1]

# The text that may contain the word, by file, with the reason why no general name exists.
CUDA_ALONE = {
    "looplib/transforms/_backends.py": {
        "triton.cudagraphs": "an option of Inductor",
        "cudagraph_mark_step_begin": "a function of torch.compiler",
    },
    "looplib/log/_configuration.py": {
        "torch.version.cuda": "the version of one vendor's libraries",
        '"cuda"': "the same",
    },
    "looplib/transforms/_compile_step.py": {'"max-autotune-no-cudagraphs"': "a mode of torch.compile"},
}


@pytest.mark.every_case
@pytest.mark.parametrize("folder", ["looplib", "recipes", "notebooks"])
def test_no_code_names_cuda_where_torch_has_a_general_name(folder):
    found = {}
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("*.ipynb"), *(ROOT / folder).glob("*.md")]:
        name = path.relative_to(ROOT).as_posix()
        text = re.sub(r'"image/png": ".*"', "", path.read_text())  # any letters may stand in a figure
        for allowed in CUDA_ALONE.get(name, ()):
            assert allowed in text, f"{name} no longer has {allowed}: remove it from the list"
            text = text.replace(allowed, "")
        if lines := [line.strip() for line in text.splitlines() if "cuda" in line and "no_cuda" not in line]:
            found[name] = lines
    assert not found


class Accelerators:
    """Stands in for `torch.accelerator` on a host with some devices."""

    def __init__(self, kind, count):
        self.kind, self.count, self.current = kind, count, None

    def current_accelerator(self, check_available=False):
        return torch.device(self.kind) if self.count or not check_available else None

    def device_count(self):
        return self.count

    def set_device_index(self, device):
        self.current = device


@pytest.fixture
def host(monkeypatch):
    """Make the processes' setup see accelerators that this host does not have, and return what it asks of torch."""

    def having(kind, count, local_rank=0):
        accelerators, asked = Accelerators(kind, count), {}
        monkeypatch.setattr(torch, "accelerator", accelerators)
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": local_rank, "MASTER_ADDR": "x"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", "1")
        store = distributed.HashStore()
        meeting = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
        monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
        start = distributed.init_process_group

        def init(backend, *, store, rank, world_size, **options):
            asked.update(backend=backend, **options)
            start("gloo", store=store, rank=rank, world_size=world_size)

        monkeypatch.setattr(distributed, "init_process_group", init)
        return accelerators, asked

    return having


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("xpu", "cpu:gloo,xpu:xccl"), ("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo"), ("mps", "gloo")],
)
def test_a_process_gets_the_accelerator_of_its_local_rank(host, kind, backend):
    accelerators, asked = host(kind, 0 if kind == "cpu" else 2, local_rank=1)
    with ll.distributed.setup() as device:
        pass
    shared = kind in ("cpu", "mps")  # a Mac's processes would share its one GPU
    assert device == (torch.device("cpu") if shared else torch.device(kind, 1))
    assert asked["backend"] == backend
    assert asked.get("device_id") == accelerators.current == (None if shared else device)


def test_more_processes_than_accelerators_are_refused(host):
    host("xpu", 2, local_rank=2)
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK 2, and this host 2 GPUs.*--nproc-per-node 2"):
        ll.distributed.setup().__enter__()


@pytest.mark.parametrize(("kind", "name"), [(None, "cpu"), ("mps", "mps")])  # torch.mps has no names of devices
def test_a_configuration_names_the_device(monkeypatch, kind, name):
    device = kind and torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert ll.log.configuration(ll.TrainState())["device"] == name
