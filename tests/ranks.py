"""Real processes for tests of several ranks, started as torchrun would."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from torch.distributed import TCPStore, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel

# Ranks are forked from one process that has imported all this. With torchrun each would take seconds to import it.
multiprocessing.set_forkserver_preload(
    [
        "hypothesis",
        "looplib",
        "pytest",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor.debug",
        "torch.distributed.tensor.parallel",
    ]
)


def launch(ranks, function, *arguments):
    """`function(*arguments)`, which its module has by name, in the environment that torchrun gives so many ranks.

    With 0 ranks it runs in one process that torchrun has not started.
    Gives all that they printed. If one fails, the others are ended, and what each has printed is in the error.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
        given = folder, environment, function, arguments
        running = start_processes(be_rank, given, ranks or 1, join=False, start_method="forkserver")
        end = time.monotonic() + 300
        failure = None
        try:
            while not running.join(max(0, end - time.monotonic()), grace_period=5):
                if time.monotonic() > end:
                    raise TimeoutError(f"{ranks} ranks have not ended in 300 s")
        except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
            failure = str(error).strip().partition("\n")[0]
        finally:
            for process in running.processes:
                process.kill()
        printed = [path.read_text() for path in sorted(Path(folder).iterdir())]
    assert not failure, failure + "".join(f"\nrank {rank}: {text[-3000:]}" for rank, text in enumerate(printed))
    return "".join(printed)


def be_rank(rank, folder, environment, function, arguments):
    with open(f"{folder}/{rank:05d}", "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if environment["WORLD_SIZE"] != "0":
        os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    multiprocessing.set_start_method(None, force=True)  # workers of loaders start as anywhere
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


def torchrun(ranks, *command):
    """Run a script by torchrun itself, where that looks after the ranks or is the command that a page shows."""
    given = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*map(str, given)], env=env, capture_output=True, text=True, timeout=300)


def run_script(path, *arguments):
    """For `launch`: a script as Python runs it."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def in_engine(model, engine, **options_of_ddp):
    """The model in DDP or in FSDP2, over all ranks, or as it is."""
    if engine == "ddp":
        return DistributedDataParallel(model, **options_of_ddp)
    if engine == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (get_world_size(),)))
    return model


def whole(tensors):
    """The tensors of a dict, those of FSDP2 and of tensor parallelism gathered from all ranks."""
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in tensors.items()}
