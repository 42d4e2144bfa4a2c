"""Ways to start the ranks: accelerate's launcher in a notebook, and the Slurm script of the page on scale."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


NOTEBOOK = """
import sys, torch
from accelerate import notebook_launcher
import looplib as ll


def main(offset):  # of a cell, so that no other process could import it
    with ll.distributed.setup():
        mine = torch.tensor([offset + 2.0 * ll.distributed.rank()])
        torch.distributed.all_reduce(mine)
        torch.save(mine, f"{ll.distributed.rank()}-of-{ll.distributed.world_size()}")


notebook_launcher(main, (10,), num_processes=2, use_port=sys.argv[1])
"""


@pytest.mark.slow
def test_a_notebook_launches_a_function_with_accelerate(tmp_path):
    # In a process of its own, since the launcher forks, and leaves its handlers of signals behind.
    subprocess.run([sys.executable, "-c", NOTEBOOK, str(free_port())], cwd=tmp_path, env=ENV, check=True, timeout=300)
    assert {path.name: torch.load(path).item() for path in tmp_path.iterdir()} == {"0-of-2": 22, "1-of-2": 22}


SLURM = {
    "scontrol": """
        if [ "$1" = show ]; then echo localhost; else touch "requeued-$2"; fi
    """,
    "srun": """
        for host in 1 2; do "$@" & pids="$pids $!"; done
        for pid in $pids; do wait $pid || failed=1; done
        exit ${failed:-0}
    """,
}


@pytest.mark.slow
def test_the_slurm_script_starts_all_ranks_and_is_queued_until_it_has_finished(tmp_path):
    page = (ROOT / "recipes" / "SCALE.md").read_text()
    script = re.search(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)[1]
    assert script.count(":29500") == 1
    (tmp_path / "train.sbatch").write_text(script.replace(":29500", f":{free_port()}"))
    (tmp_path / "train.py").write_text(
        "import looplib as ll, pathlib, sys\n"
        "with ll.distributed.setup():\n"
        "    pathlib.Path(f'rank-{ll.distributed.rank()}-of-{ll.distributed.world_size()}').touch()\n"
        "    if pathlib.Path('second').exists():\n"
        "        pathlib.Path('finished').touch()\n"
    )
    (tmp_path / "bin").mkdir()
    for name, code in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{textwrap.dedent(code)}")
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"JOB_NODELIST": "localhost", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "1", "JOB_ID": "7"}
    env = {**ENV, **{f"SLURM_{name}": value for name, value in given.items()}, "PATH": path}
    for job in range(2):
        run = subprocess.run(
            ["bash", "train.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
        )
        assert run.returncode == 0, run.stderr
        assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0-of-2", "rank-1-of-2"}
        assert (tmp_path / "requeued-7").exists() == (job == 0)
        if job == 0:
            assert not (tmp_path / "finished").exists()
            (tmp_path / "requeued-7").rename(tmp_path / "second")
            (tmp_path / "rank-0-of-2").unlink()
