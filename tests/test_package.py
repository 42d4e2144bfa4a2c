"""The package as a newcomer meets it."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import looplib as ll

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_documented_with_an_example_or_is_a_type():
    types = {
        "GradFn",
        "Schedule",
        "Predicate",
        "Sink",
        "TrainStep",
        "EvalStep",
        "PredictStep",
        "Metric",
        "Optimizer",
        "Loader",
    }
    plain = {"DonatedStateError", "NonFiniteGradientsError", "Gradients", "Part"}
    plain |= {
        "Stopped",
        "Checkpoint",
        "CheckpointIO",
        "Checkpoints",
        "CheckpointVersionError",
        "DamagedCheckpointError",
        "LRCurve",
        "TorchMetric",
        "UntraceableError",
        "Difference",
        "LeafDifference",
        "Replayed",
        "SampleScore",
    }
    public = {name: getattr(ll, name) for name in ll.__all__ if name not in ("distributed", "testing")}
    public |= {name: getattr(ll.distributed, name) for name in ll.distributed.__all__}
    missing = [name for name, value in public.items() if name not in types | plain and ">>>" not in value.__doc__]
    assert missing == []


def test_the_contract_of_the_design_is_there():
    contract = """
        TrainState init_state bind DonatedStateError optimizer make_grad_fn clip_by_global_norm make_train_step
        make_eval_step make_predict_step make_loader Mean merge compute evaluate jsonl console tee progress
        every_n_steps every_n_epochs every_n_samples at_step at_epoch_end after_steps after_epochs warmup_cosine
        apply_if_finite
    """
    assert set(contract.split()) <= set(ll.__all__)
    assert all(hasattr(ll, name) for name in ll.__all__)
    assert (Path(ll.__file__).parent / "py.typed").exists()


def test_importing_looplib_imports_little_beyond_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import looplib; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    standard = set(sys.stdlib_module_names) | {sysconfig._get_sysconfigdata_name()}
    extra = set(out.stdout.split()) - standard
    assert extra <= {"looplib", "orjson", "tqdm", "torch", "einops"}


def test_importing_looplib_leaves_signals_and_random_streams_alone():
    code = (
        "import random, signal, torch; state = torch.get_rng_state(), random.getstate(); "
        "handlers = [signal.getsignal(s) for s in signal.valid_signals()]; import looplib; "
        "assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate(); "
        "assert handlers == [signal.getsignal(s) for s in signal.valid_signals()]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_loop_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["state"].epoch >= 1
    assert ll.read_jsonl("runs/readme/log.jsonl")
