"""The package as a newcomer meets it."""

import ast
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
from public import public_names

import looplib as ll

ROOT = Path(__file__).parent.parent


# What most loops use. A name more is a decision: it is read by everyone who types "ll.".
EVERYDAY = [
    "DonatedStateError",
    "Mean",
    "TrainState",
    "Window",
    "accumulate",
    "accuracy",
    "after_epochs",
    "after_signal",
    "after_steps",
    "at_epoch_end",
    "at_step",
    "autocast",
    "bind",
    "checkpoint_io",
    "clip_by_global_norm",
    "compile_step",
    "compute",
    "console",
    "copy_state",
    "early_stopping",
    "ema",
    "end_epoch",
    "eval_state",
    "evaluate",
    "every_n_epochs",
    "every_n_steps",
    "init_state",
    "jsonl",
    "make_eval_step",
    "make_grad_fn",
    "make_loader",
    "make_predict_step",
    "make_train_step",
    "merge",
    "next_token_loss",
    "optimizer",
    "plot",
    "predict",
    "predict_to",
    "progress",
    "tee",
    "update_best",
    "vmap_step",
    "warmup_cosine",
]
ROOM_NAMES = [
    "checkpoint",
    "contrib",
    "data",
    "debug",
    "distributed",
    "evaluation",
    "gradients",
    "grads",
    "log",
    "losses",
    "metrics",
    "optim",
    "predicates",
    "schedules",
    "state",
    "steps",
    "testing",
    "transforms",
    "types",
]


def test_the_top_level_holds_the_everyday_names_and_the_rooms():
    assert sorted(ll.__all__) == sorted(EVERYDAY + ROOM_NAMES)
    seen = {name for name in dir(ll) if name[0] != "_"} - {
        "recipes"
    }  # a command, which another test may have imported
    assert sorted(seen) == sorted(EVERYDAY + ROOM_NAMES)
    assert len(EVERYDAY) <= 45
    assert not [name for name in EVERYDAY if isinstance(getattr(ll, name), types.ModuleType)]


def test_every_public_name_is_documented_with_an_example_or_is_a_type():
    # What a function returns, raises or takes: the example stands with the function.
    plain = [
        "Checkpoint",
        "CheckpointIO",
        "Checkpoints",
        "CheckpointVersionError",
        "DamagedCheckpointError",
        "Difference",
        "DonatedStateError",
        "EvalStep",
        "Gradients",
        "LRCurve",
        "LeafDifference",
        "Loader",
        "Metric",
        "NonFiniteGradientsError",
        "Part",
        "Replayed",
        "SampleScore",
        "Stopped",
        "TorchMetric",
        "Tracker",
        "UntraceableError",
    ]
    functions = {name: value for name, value in public_names().items() if name.rpartition(".")[2] not in plain}
    aliases = {name for name in functions if name.startswith(("types.", "testing."))}
    missing = [name for name in functions.keys() - aliases if ">>>" not in (functions[name].__doc__ or "")]
    assert missing == []
    assert (Path(ll.__file__).parent / "py.typed").exists()


def test_importing_looplib_imports_little_beyond_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import looplib; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    standard = set(sys.stdlib_module_names) | {sysconfig._get_sysconfigdata_name()}
    extra = set(out.stdout.split()) - standard
    assert extra <= {"looplib", "orjson", "tqdm", "torch"}


def test_rooms_that_most_loops_do_not_use_are_imported_when_they_are_asked_for():
    code = (
        "import sys, looplib as ll; late = ['contrib', 'debug', 'schedules', 'testing', 'transforms']; "
        "assert not [name for name in late if f'looplib.{name}' in sys.modules]; assert {*late} < {*dir(ll)}; "
        "from looplib import debug; assert ll.debug is debug; assert callable(ll.contrib.sam); "
        "assert not hasattr(ll.testing, 'sam'); "
        "from looplib import warmup_cosine; assert ll.schedules.warmup_cosine is warmup_cosine is ll.warmup_cosine"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_looplib_is_imported_again_once_its_modules_are_gone():
    code = (
        "import sys, torch\n"
        "for _ in range(2):\n"
        "    for name in [name for name in sys.modules if name.startswith('looplib')]: del sys.modules[name]\n"
        "    import looplib as ll\n"
        "    model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)\n"
        "    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())\n"
        "    step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend='eager')\n"
        "    assert step(ll.init_state(model, optimizer), torch.ones(4, 2))[0].step == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_looplib_leaves_signals_and_random_streams_alone():
    code = (
        "import random, signal, torch; state = torch.get_rng_state(), random.getstate(); "
        "handlers = [signal.getsignal(s) for s in signal.valid_signals()]; import looplib; "
        "assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate(); "
        "assert handlers == [signal.getsignal(s) for s in signal.valid_signals()]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _names_of_looplib(tree):
    """Dotted names of looplib in a file: imported, read from `ll`, or in strings (paths to patch, other processes' code)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ll."):
            yield ast.unparse(node).replace("ll.", "looplib.", 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\blooplib[.\w]*(?: import \w+)?", node.value)


def test_private_names_are_imported_by_tests_of_the_core_alone():
    here = Path(__file__).parent
    for path in [*here.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        if not {here / "_core", here / "benchmarks"} & {*path.parents}:  # a benchmark may measure one part
            names = set(_names_of_looplib(ast.parse(path.read_text())))
            private = [name for name in names if re.match(r"looplib\b.*[. ]_(?!_)", name)]
            assert not private, (path, private)
