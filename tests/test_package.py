"""The package as a newcomer meets it."""

import ast
import functools
import re
import subprocess
import sys
import sysconfig
import types
from collections import Counter
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
    "apply_gradients",
    "at_epoch_end",
    "autocast",
    "bind",
    "chain",
    "checkpoint_io",
    "clip_by_global_norm",
    "compile_step",
    "compute",
    "console",
    "copy_state",
    "early_stopping",
    "ema",
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
    "next_token_loss",
    "optimizer",
    "plot",
    "predict",
    "progress",
    "skip_nonfinite",
    "tee",
    "update_best",
    "vmap_step",
    "warmup_cosine",
]
# `gradients`, `steps` and `updates` define names of the top level, under which the reference lists these. `state` has what few
# loops use (`ll.state.fold_in`), and pages write `ll.plot` more often than most names above.
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
    "updates",
]


def test_the_top_level_holds_the_everyday_names_and_the_rooms():
    assert sorted(ll.__all__) == sorted(EVERYDAY + ROOM_NAMES), "a name more at the top is a decision: list it above"
    seen = {name for name in dir(ll) if name[0] != "_"} - {
        "recipes"
    }  # a command, which another test may have imported
    assert seen == {*EVERYDAY, *ROOM_NAMES}
    assert len(EVERYDAY) <= 45
    assert not [name for name in EVERYDAY if isinstance(getattr(ll, name), types.ModuleType)]


def test_every_public_name_is_documented_with_an_example_or_is_a_type():
    # What a function returns, raises or takes: the example stands with the function.
    plain = [
        "Checkpoint",
        "CheckpointIO",
        "CheckpointVersionError",
        "CorruptionError",
        "DamagedCheckpointError",
        "Difference",
        "DonatedStateError",
        "EvalStep",
        "Gradients",
        "LRCurve",
        "LeafDifference",
        "Loader",
        "Metric",
        "MuP",
        "NonFiniteGradientsError",
        "Part",
        "Replayed",
        "SampleScore",
        "TorchMetric",
        "Tracker",
        "UntraceableError",
    ]
    functions = {name: value for name, value in public_names().items() if name.rpartition(".")[2] not in plain}
    aliases = {name for name in functions if name.startswith(("types.", "testing."))}
    missing = [name for name in functions.keys() - aliases if ">>>" not in (functions[name].__doc__ or "")]
    assert not missing, f"add an example (>>>) to the docstrings of {missing}"
    assert (Path(ll.__file__).parent / "py.typed").exists()


IMPORT = """
import random, signal, sys, torch

def of_the_process():
    return torch.get_rng_state().tolist(), random.getstate(), [signal.getsignal(s) for s in signal.valid_signals()]

modules, before = set(sys.modules), of_the_process()
import looplib as ll
assert of_the_process() == before, "importing looplib draws, or sets a handler of signals"
print(*{name.partition('.')[0] for name in set(sys.modules) - modules})

late = {'contrib', 'debug', 'schedules', 'testing', 'transforms'}
assert not [name for name in late if f'looplib.{name}' in sys.modules], "a room that few loops use is imported at once"
assert late < {*dir(ll)}
from looplib import debug, warmup_cosine
assert ll.debug is debug
assert callable(ll.contrib.sam) and not hasattr(ll.testing, 'sam')
assert ll.schedules.warmup_cosine is warmup_cosine is ll.warmup_cosine

for again in range(2):
    model, optimizer = torch.nn.Linear(2, 1), ll.optimizer(torch.optim.AdamW, lr=1e-3)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend='eager')
    assert step(ll.init_state(model, optimizer), torch.ones(4, 2))[0].step == 1
    for name in [name for name in sys.modules if name.startswith('looplib')]: del sys.modules[name]
    import looplib as ll
"""


@pytest.mark.slow
def test_importing_looplib_changes_nothing_and_imports_little_beyond_torch():
    """In one process; at the end, once more without its modules."""
    out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    standard = set(sys.stdlib_module_names) | {sysconfig._get_sysconfigdata_name()}
    assert set(out.stdout.split()) - standard <= {"looplib", "orjson", "tqdm", "torch"}


# Imported, read from `ll`, or in a string: a path to patch, or another process's code.
PRIVATE = re.compile(r"\b(?:looplib|ll)(?:\.\w+)*\._(?!_)\w+|from looplib[.\w]* import [\w\s,(]*?\b_(?!_)\w+")


def test_private_names_are_imported_by_tests_of_the_core_alone():
    here = Path(__file__).parent
    for path in [*here.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        if not {here / "_core", here / "benchmarks"} & {*path.parents}:  # a benchmark may measure one part
            found = PRIVATE.search(path.read_text())
            assert not found, f"{path} uses {found and found[0]}: use a public name, or move the test to tests/_core"


@functools.cache
def parsed():
    """The package's files as trees."""
    return {path: ast.parse(path.read_text()) for path in (ROOT / "looplib").rglob("*.py")}


def test_rooms_import_no_private_file_of_another_room():
    """Code that two rooms use is public in one of them, or lies in `_core`."""
    for path, tree in parsed().items():
        room = path.relative_to(ROOT / "looplib").parts[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("looplib."):
                other, *files = node.module.split(".")[1:]
                private = other not in (room, "_core", "_objective") and any(file.startswith("_") for file in files)
                assert not private, (
                    f"{path}:{node.lineno} imports {node.module}: make it public in {other}, or move it"
                )


# Types: the tests are of the functions that return one.
NOT_IN_TESTS = {
    "predicates.Predicate",
    "checkpoint.Checkpoint",
    "contrib.LRCurve",
    "contrib.MuP",
    "metrics.TorchMetric",
}
NOT_IN_TESTS |= {f"debug.{name}" for name in ("Difference", "LeafDifference", "Replayed", "SampleScore")}


def test_every_public_name_is_in_a_test():
    """By its name in the room's own tests, or as `ll.name` or `room.name` in others."""
    here = Path(__file__).parent
    words, dotted, imported = (
        {},
        set(),
        set(),
    )  # words by room, pairs such as `ll.name`, and names imported from looplib
    for path in here.rglob("*.py"):
        if here / "far" not in path.parents:
            text = path.read_text()
            words.setdefault(path.relative_to(here).parts[0], set()).update(re.findall(r"\w+", text))
            dotted.update(re.findall(r"\b(\w+)\.(?=(\w+))", text))
            for names in re.findall(r"from looplib[.\w]* import ([^\n(]+|\([^)]*)", text):
                imported.update(re.findall(r"\w+", names))
    missing = []
    for full in sorted(name for name in public_names() if not name.startswith("types.")):
        room, name = full.split(".")
        is_tested = name in imported | words.get(room, set()) or {("ll", name), (room, name)} & dotted
        if full not in NOT_IN_TESTS and not is_tested:
            missing.append(full)
    assert not missing, f"write a test of {missing} in tests/<room>; see 'Add a feature' in CONTRIBUTING.md"


def names_in(node):
    """The names that code uses, and those of an `__all__`. Docstrings are no code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.alias):
            yield part.name
        elif isinstance(part, ast.Assign) and "__all__" in names_in(part.targets[0]):
            yield from ast.literal_eval(part.value)


def test_what_no_other_code_uses_is_in_an_index():
    package, trees = ROOT / "looplib", parsed()
    used = {node: Counter(names_in(node)) for tree in trees.values() for node in tree.body}
    count = Counter()
    for names in used.values():
        count.update(names)
    unused = [
        f"{path.relative_to(package)}: {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not (node.name.startswith("_") and node.decorator_list)  # a decorator may register it
        and not node.name.startswith("__")  # Python itself calls it
        and count[node.name] == used[node][node.name]
    ]
    assert not unused, f"nobody uses {unused}: add a public name to its room's __init__.py, and delete any other"
