"""Processes that `ll.distributed.launch` starts, from a script, a notebook cell and a test: real ones, each time."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import looplib as ll

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def started(folder, code, *arguments):
    """A script in a process group of its own, as a terminal starts it, whose Ctrl-C reaches the whole group."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENV, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        try:
            yield run
        finally:
            run.kill()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited for 60 s"
        time.sleep(0.02)


def test_a_closure_runs_on_each_rank_and_nothing_is_left_changed():
    offset = 10
    before = dict(os.environ), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def main(factor):
        with ll.distributed.setup():
            mine = torch.tensor([float(offset + factor * ll.distributed.rank())])
            torch.distributed.all_reduce(mine)
            return mine, mine.to(torch.uint16), ll.distributed.world_size(), torch.get_num_threads()

    expected = torch.tensor([22.0]), torch.tensor([22], dtype=torch.uint16), 2, 1
    assert ll.distributed.launch(main, 2, nproc=2) == [expected] * 2
    assert before == (
        dict(os.environ),
        [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    )
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_script_spawns_its_function_and_says_so_if_the_call_is_not_guarded(tmp_path):
    code = """
    import sys
    import looplib as ll

    def main(word, end):
        with ll.distributed.setup():
            print(f"{word} {ll.distributed.rank()}", flush=True)
            return __name__, end

    if sys.argv[1] == "bare" or __name__ == "__main__":
        print(ll.distributed.launch(main, "rank", "!", nproc=2))
    """
    with started(tmp_path, code, "guarded") as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    for text in ("[('__mp_main__', '!'), ('__mp_main__', '!')]", "rank 0", "rank 1"):
        assert out.count(text) == 1  # in any order, and without ends of lines between what two processes print
    with started(tmp_path, code, "bare") as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == 1
    assert 'write the call under `if __name__ == "__main__":`' in err
    assert "ended with exit code 1; its output may say why" in err


def test_the_error_of_the_rank_that_failed_first_is_raised_with_its_traceback():
    def main():
        with ll.distributed.setup():
            if ll.distributed.rank() == 1:
                raise ValueError("no such thing")  # marked
            ll.distributed.barrier()

    with pytest.raises(RuntimeError) as caught:
        ll.distributed.launch(main, nproc=2)
    message = str(caught.value)
    assert message.startswith("rank 1 failed with ValueError: no such thing\n\nTraceback")
    assert 'raise ValueError("no such thing")  # marked' in message
    assert caught.value.__cause__ is None
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_or_exits_or_returns_what_cannot_be_sent_is_named():
    def killed():
        with ll.distributed.setup():
            if ll.distributed.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ll.distributed.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+\) was ended by SIGKILL"):
        ll.distributed.launch(killed, nproc=2)
    with pytest.raises(RuntimeError, match="rank 0 failed with SystemExit: 3"):
        ll.distributed.launch(lambda: sys.exit(3), nproc=1)
    assert ll.distributed.launch(lambda: sys.exit(0), nproc=2) == [None, None]
    with pytest.raises(RuntimeError, match=r"rank 0 failed with .*pickle"):
        ll.distributed.launch(lambda: threading.Lock(), nproc=1)


@pytest.mark.slow
def test_processes_are_started_again_as_often_as_allowed(tmp_path):
    def main(failures):
        with ll.distributed.setup():
            rank, attempt = ll.distributed.rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            (tmp_path / f"{rank}-{attempt}").touch()
            if rank == 0 and attempt < failures:
                raise ValueError(f"attempt {attempt}")
            ll.distributed.barrier()
            return attempt

    assert ll.distributed.launch(main, 1, nproc=2, max_restarts=1) == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    with pytest.raises(RuntimeError, match="rank 0 failed with ValueError: attempt 1"):
        ll.distributed.launch(main, 2, nproc=2, max_restarts=1)


INTERRUPTED = """
import os, signal, sys, time
import looplib as ll
from torch.distributed.elastic.multiprocessing import api

def slowly(*args, start=api.mp.start_processes, **options):
    processes = start(*args, **options)
    time.sleep(2)  # the signal arrives while processes are being started
    return processes

if sys.argv[1] == "early":
    api.mp.start_processes = slowly

def main():  # counts the signals, and waits until it is told to end by one, or by nothing
    count = 0
    def note(*_):
        nonlocal count
        count += 1
        os.write(1, f"signal {os.getpid()}\\n".encode())
    signal.signal(signal.SIGINT, note)
    os.write(1, f"started {os.getpid()}\\n".encode())
    while sys.argv[1] == "stubborn" or not count:
        time.sleep(0.05)
    time.sleep(0.5)  # in which a second signal would arrive

forked = lambda: main()
try:
    ll.distributed.launch(forked, nproc=2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("kind", ["polite", "early", "stubborn", "killed", "terminated"])
def test_ctrl_c_ends_all_processes_and_so_does_the_end_of_the_first(tmp_path, kind):
    with started(tmp_path, INTERRUPTED, kind) as run:
        pids = [int(run.stdout.readline().removeprefix("started ")) for _ in range(2)]
        assert all(map(alive, pids))
        if kind == "killed":
            run.kill()
        elif kind == "terminated":
            run.terminate()
        else:
            os.killpg(run.pid, signal.SIGINT)  # as the terminal sends it
        if kind == "stubborn":
            assert sorted(int(run.stdout.readline().removeprefix("signal ")) for _ in range(2)) == sorted(pids)
            os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=25)  # less than the 30 s in which processes may end
    until(lambda: not any(map(alive, pids)))
    one_each = sorted(f"signal {pid}" for pid in pids)  # though the terminal and the launcher both send one
    code, expected = {
        "polite": (0, ["interrupted", *one_each]),
        "early": (0, ["interrupted", *one_each]),
        "stubborn": (0, ["interrupted"]),
        "killed": (-signal.SIGKILL, one_each),  # Linux sends it, maybe twice
        "terminated": (-signal.SIGTERM, []),
    }[kind]
    lines = set(out.splitlines()) if kind == "killed" else out.splitlines()
    assert (run.returncode, sorted(lines)) == (code, expected), err


def test_what_cannot_work_is_refused_by_name(monkeypatch):
    def main():
        pass

    def refused(match, **options):
        with pytest.raises(RuntimeError, match=match):
            ll.distributed.launch(main, nproc=2, **options)
        assert not multiprocessing.active_children()

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which init_process_group replaces
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="call it in the main thread"):
        pool.submit(ll.distributed.launch, main, nproc=1).result()
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        refused("started by launch or torchrun")
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        refused("main is defined in a notebook cell .* has used the cuda, .* move it into a module")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        refused("has joined a process group")
    finally:
        torch.distributed.destroy_process_group()
    for options in ({"nproc": 0}, {"nproc": True}, {"nproc": 1, "max_restarts": -1}):
        with pytest.raises(ValueError, match=r"nproc is|max_restarts is"):
            ll.distributed.launch(main, **options)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        ll.distributed.launch(main, nproc=1, start_method="spawn")


CELLS = [
    """
    import os, time, torch, looplib as ll
    from torch.nn.parallel import DistributedDataParallel

    def train(steps):
        with ll.distributed.setup(required=False):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1).double()
            if ll.distributed.launched():
                model = DistributedDataParallel(model)
            data = torch.randn(32, 3, dtype=torch.float64)
            loader = ll.make_loader(data, batch_size=8)
            optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1)
            step = ll.make_train_step(
                ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer, donate=True
            )
            state = ll.init_state(model, optimizer, epoch_length=len(loader))
            done = ll.after_steps(steps)
            while not done(state):
                for batch in loader(state):
                    state, metrics = step(state, batch)
            print("trained on rank", ll.distributed.rank(), flush=True)
            return {name: tensor.detach() for name, tensor in state.params.items()}
    """,
    """
    alone = train(8)
    several = ll.distributed.launch(train, 8, nproc=2)
    [(several[rank][name] - alone[name]).abs().max().item() < 1e-14 for rank in range(2) for name in alone]
    """,
    """
    def fails():
        raise ValueError("of a cell")

    try:
        ll.distributed.launch(fails, nproc=2)
    except RuntimeError as error:
        print(error)
    """,
    """
    def waits():
        open(f"waits-{os.getpid()}", "w").close()
        time.sleep(600)

    ll.distributed.launch(waits, nproc=2)
    """,
]


def printed(cell, name="stdout"):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == name)


def test_a_notebook_cell_launches_its_function_shows_errors_and_can_be_interrupted(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code)) for code in CELLS])
    env = {**ENV, "OMP_NUM_THREADS": "2"}  # which the first cell uses, and the forks cannot
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    pids = []

    def interrupt():
        until(lambda: len(list(tmp_path.glob("waits-*"))) == 2)
        pids.extend(int(path.name.removeprefix("waits-")) for path in tmp_path.glob("waits-*"))
        assert all(map(alive, pids))
        os.killpg(os.getpgid(client.km.provisioner.pid), signal.SIGINT)  # as Jupyter's button sends it

    thread = threading.Thread(target=interrupt)
    thread.start()
    client.execute(env=env)
    thread.join()
    _, trained, failed, interrupted = notebook.cells
    assert sorted(printed(trained).splitlines()) == ["trained on rank 0"] * 2 + ["trained on rank 1"]
    assert trained.outputs[-1].data["text/plain"] == "[True, True, True, True]", trained.outputs
    assert "failed with ValueError: of a cell" in printed(failed)
    assert 'raise ValueError("of a cell")' in printed(failed)
    assert interrupted.outputs[-1].ename == "KeyboardInterrupt"
    assert len(pids) == 2
    until(lambda: not any(map(alive, pids)))


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
def test_the_slurm_script_of_the_page_starts_all_ranks_and_is_queued_again_until_it_has_finished(tmp_path):
    page = (ROOT / "recipes" / "SCALE.md").read_text()
    script = re.search(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)[1]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    assert script.count(":29500") == 1
    (tmp_path / "train.sbatch").write_text(script.replace(":29500", f":{port}"))
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
