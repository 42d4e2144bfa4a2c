"""Mutants: change one thing at a time in the code, and see whether the tests next to it notice.

    python tests/mutants.py                              # 200 in the heart: steps, gradients, state, grads/ and optim/
    python tests/mutants.py --rooms                      # 200 in the rooms
    python tests/mutants.py --core                       # 200 in what all of these share
    python tests/mutants.py --only optim/_yours --count 10   # 10 in files with this in their path

Each mutant is one change of a comparison, a condition, a call whose result is not used, an operator, a number or the order
of two arguments. They are drawn with a fixed seed (`--seed`), in proportion to the size of the files, and run in copies of the
repository, two at a time: first the test file of the same name, then the room's fast tests, until one fails (200 take
20 minutes). A mutant that no test notices is printed as a diff: write a test, unless it changes nothing.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]

# For each part of the heart, the tests next to it, and a scenario on two ranks.
RANKS = ["tests/distributed/test_replicas.py", "tests/distributed/test_users_wrappers.py"]
TESTS = {
    "steps.py": [
        "tests/test_aliases.py",
        "tests/test_steps.py",
        "tests/test_predict_training.py",
        "tests/test_forward_writes.py",
        "tests/test_forgotten.py",
        "tests/test_kinds.py",
        "tests/test_advice.py",
        "tests/_core/test_lease.py",
        "tests/optim/test_parts.py",  # what a step does with a decision
        "tests/_core/test_interrupts.py",
        *RANKS,
    ],
    "updates.py": [
        "tests/test_apply_gradients.py",
        "tests/test_steps.py",
        "tests/test_aliases.py",
        "tests/_core/test_lease.py",
        "tests/optim/test_chain.py",
        "tests/_core/test_interrupts.py",
        "tests/optim/test_parts.py",
    ],
    "gradients.py": [
        "tests/test_gradients.py",
        "tests/test_aliases.py",
        "tests/test_another_network.py",
        "tests/test_forward_writes.py",
        "tests/test_kinds.py",
        "tests/grads",
        "tests/_core/test_interrupts.py",
        *RANKS,
    ],
    "state.py": [
        "tests/test_state.py",
        "tests/test_predict_training.py",
        "tests/test_aliases.py",
        "tests/test_steps.py",
        "tests/_core/test_lease.py",
        "tests/checkpoint/test_settings.py",  # what init_state notes
        "tests/log/test_configuration.py",  # how it describes the model
        "tests/test_functional_call.py",  # apply
        "tests/test_graft.py",
        "tests/transforms/test_many_adapters.py",  # copies of a stack with shared tensors
    ],
    "grads": ["tests/grads", "tests/test_kinds.py", "tests/distributed/test_few_samples.py", *RANKS],
    "optim": [
        "tests/optim",
        "tests/test_graft.py",  # take_rows
        "tests/test_kinds.py",
        "tests/test_write_your_own.py",
        "tests/_core/transforms/test_fused_update.py",  # optimizers in graphs
        "tests/transforms/test_compiling.py",
    ],
}

ROOMS = (
    "checkpoint contrib data debug distributed evaluation log losses metrics predicates schedules testing transforms"
)
TESTS_OF_ROOMS = {room: [f"tests/{room}", "tests/test_kinds.py"] for room in ROOMS.split()}
TESTS_OF_ROOMS["checkpoint"].append("tests/data/test_elastic.py")  # positions that a restore converts
TESTS_OF_ROOMS["transforms"] += [
    "tests/_core/transforms",
    "tests/_core/test_batches.py",
    "tests/test_another_network.py",
]

TESTS_OF_CORE = {
    "_core": [
        *(path for part in ("steps.py", "updates.py", "gradients.py", "state.py") for path in TESTS[part]),
        "tests/optim",
        "tests/_core",
        "tests/distributed",
        "tests/data/test_count_samples.py",
        "tests/debug",
        "tests/test_edits_between_steps.py",
        "tests/transforms/test_unrolling.py",
    ]
}

# Mutants that change nothing a user could see: (file, line of the original, why).
EQUIVALENT: list[tuple[str, str, str]] = [
    (
        "looplib/_core/torch_private.py",
        "torch.distributed.set_timeout(timeout, group)",
        "the pinned torch does not have this function, so the other branch runs",
    ),
    (
        "looplib/optim/_update.py",
        "return torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)",
        "what a class keeps for a tensor has the same names and dtypes at any small size",
    ),
    (
        "looplib/optim/_kernels.py",
        "return all(strides == first for strides in others) and all(map(is_dense, lists[0]))",
        "tensors of the same shapes and strides are dense alike",
    ),
    (
        "looplib/optim/_recipe.py",
        'groups[number]["fused"] = True',
        "the device of counts depends on it, which on a CPU is always the CPU",
    ),
    (
        "looplib/optim/_recipe.py",
        "if near := difflib.get_close_matches(key, known, 1, 0.85):",
        "the nearest of several is the first",
    ),
    ("looplib/optim/traced_update.py", "super().__init__()", "torch's TorchFunctionMode has an empty one"),
    (
        "looplib/steps.py",
        "applied: bool | Tensor = True  # True if an update was made",
        "only eval and predict steps leave it out, and nobody reads theirs",
    ),
    (
        "looplib/optim/_averaging.py",
        "return lambda count: min(decay, (1 + count) / (10 + count))",
        "the smaller of two numbers does not depend on their order",
    ),
    (
        "looplib/steps.py",
        "return Outcome(state.params, state.opt_state, state.buffers, step(state, batch), 0)",
        "an eval step's samples are not counted anywhere",
    ),
    (
        "looplib/checkpoint/_capture.py",
        'return {_ARRAY: torch.from_numpy(leaf.copy())} if getattr(leaf, "ndim", 0) else leaf.item()',
        "all that NumPy has with a tolist method has an ndim",
    ),
    (
        "looplib/gradients.py",
        "(loss,), (seed,), create_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True",
        "torch reads allow_unreachable= where it returns gradients, and not where it adds them up in the leaves",
    ),
    (
        "looplib/updates.py",
        "return Gradients(dict(gradients), {}, {}, 0, scale=scale)",
        "where nobody says how many samples there are, the weight of a report is 1",
    ),
    (
        "looplib/debug/_differences.py",
        "if same_bits(one, other):",
        "equality does not depend on the order",
    ),
    (
        "looplib/metrics/_scores.py",
        "return _mean(_errors(predictions, targets, weights), weights)",
        "the absolute difference of two numbers is the same in either order",
    ),
    (
        "looplib/checkpoint/_io.py",
        "shown = min(os.path.relpath(path), str(path), key=len)",
        "the shorter of two paths is the same in either order, and either will do",
    ),
    (
        "looplib/contrib/_find_lr.py",
        "width = max(width, 3)",
        "the larger of two numbers is the same in either order",
    ),
    (
        "looplib/contrib/_find_lr.py",
        "end = max(averages.index(min(averages)) + 1, width)",
        "the larger of two numbers is the same in either order",
    ),
    (
        "looplib/distributed/records.py",
        "index = 0",
        "a number that tells things of one name apart, on each rank alike, may begin anywhere",
    ),
    (
        "looplib/distributed/records.py",
        "index += 1",
        "and it may leave numbers out",
    ),
    (
        "looplib/evaluation/_oom.py",
        "largest = max(1, min(fitting or count, count))",
        "the larger of two numbers is the same in either order",
    ),
    (
        "looplib/log/_configuration.py",
        "command, cwd=folder if folder.is_dir() else folder.parent, capture_output=True, text=True, timeout=10",
        "how long git may hang is no promise to the second",
    ),
    (
        "looplib/testing/_gradients.py",
        'drawn = differing({"grads": whole.grads}, {"grads": reseeded.grads}, tolerance)',
        "only the names of what differs are used, which are those of either order",
    ),
    (
        "looplib/testing/_resume.py",
        "steps = int(min(6, most) if isinstance(batches, Loader) else most) if steps is None else steps",
        "the smaller of two numbers is the same in either order",
    ),
    (
        "looplib/testing/_samples.py",
        "for other in (inputs[:, :1].expand_as(future), future.flip(1), future.roll(1, 0)):",
        "a future like the first one is constant, and so its flip and its roll are like it too",
    ),
    (
        "looplib/testing/_samples.py",
        "_differing_outputs(before, after, tolerance),",
        "the message does not say which of two numbers is from which sequence",
    ),
    (
        "looplib/transforms/_backends.py",
        "if len(inputs) == 1 and is_same(node, inputs[0]):",
        "the comparison is symmetric, and an operation on one input that is no tensor is not compared",
    ),
]

FLIPPED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt}
FLIPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes_of(node):
    """Functions that change a node in place, each in one way."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        yield lambda new: new.ops.__setitem__(0, FLIPPED[type(new.ops[0])]())
    if isinstance(node, (ast.If, ast.IfExp)):
        yield lambda new: setattr(new, "test", ast.UnaryOp(ast.Not(), new.test))
    if isinstance(node, ast.BoolOp):
        yield lambda new: setattr(new, "op", ast.Or() if isinstance(new.op, ast.And) else ast.And())
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda new: setattr(new, "value", ast.Constant(None))
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield lambda new: setattr(new, "op", SWAPPED[type(new.op)]())
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not any(isinstance(arg, ast.Starred) for arg in node.args)
    ):
        yield lambda new: new.args.__setitem__(slice(0, 2), new.args[1::-1])
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield lambda new: setattr(new, "value", (not new.value) if type(new.value) is bool else new.value + 1)


def is_overload(decorator):
    return getattr(decorator, "id", None) == "overload"


def in_code(tree):
    """The nodes of functions, without docstrings, annotations, overloads and what stands in a raise statement or a check."""
    waiting = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) or any(map(is_overload, getattr(node, "decorator_list", []))):
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "check" and len(node.args) > 1:
            waiting.append(node.args[0])  # and not the message
            continue
        yield node
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # of zip: it states what holds, as an assertion does
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "bases"):
                waiting += [
                    child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
                ]


def mutants_of(path):
    """(line, function that changes a copy of the file's tree) for each place that can be changed."""
    tree = ast.parse(path.read_text())
    for number, node in enumerate(in_code(tree)):
        for kind, _ in enumerate(changes_of(node)):
            yield node.lineno if hasattr(node, "lineno") else 0, number, kind


def mutated(path, number, kind):
    tree = copy.deepcopy(ast.parse(path.read_text()))
    node = next(node for at, node in enumerate(in_code(tree)) if at == number)
    [*changes_of(node)][kind](node)
    return ast.unparse(ast.fix_missing_locations(tree))


def drawn(count, only, parts=TESTS, seed=0):
    files = [ROOT / "looplib" / name for name in parts]
    files = [file for name in files for file in ([name] if name.suffix else sorted(name.rglob("*.py")))]
    files = [file for file in files if file.name != "__init__.py" and only in str(file.relative_to(ROOT))]
    places = [(file, *place) for file in files for place in mutants_of(file)]
    return random.Random(seed).sample(places, min(count, len(places)))  # each place is equally likely


def part_of(file):
    inside = file.relative_to(ROOT / "looplib")
    return inside.parts[0]


def is_equivalent(place):
    file, line, _, _ = place
    code = file.read_text().splitlines()[line - 1].strip()
    return any((str(file.relative_to(ROOT)), code) == known[:2] for known in EQUIVALENT)


def noticed(place, folder):
    """True if a test fails on this mutant, in a copy of the repository."""
    file, _, number, kind = place
    target = folder / file.relative_to(ROOT)
    original = target.read_text()
    target.write_text(mutated(file, number, kind))
    paths = [path for path in (TESTS | TESTS_OF_ROOMS | TESTS_OF_CORE)[part_of(file)] if (ROOT / path).exists()]
    same_name = sorted(
        str(found.relative_to(ROOT))
        for path in paths
        for found in (ROOT / path).glob(f"test_{file.stem.lstrip('_')}.py")
    )
    try:
        return any(fails(tests, folder) for tests in (same_name, paths) if tests)
    finally:
        target.write_text(original)


def fails(tests, folder):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "300", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=1200).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def run(places):
    """Yield (place, verdict) for each of these, from a copy of the repository of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        for place in places:
            found = noticed(place, folder)
            file, line, _, _ = place
            verdict = "noticed" if found else "equivalent" if is_equivalent(place) else "SURVIVED"
            print(f"{verdict:10} {file.relative_to(ROOT)}:{line}", flush=True)
            if verdict == "SURVIVED":
                show(place)
            yield place, verdict


def show(place):
    """The line before and after."""
    file, _, number, kind = place
    before = ast.unparse(ast.parse(file.read_text())).splitlines()
    after = mutated(file, number, kind).splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            print(f"    - {old.strip()}\n    + {new.strip()}", flush=True)
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of mutants drawn")
    parser.add_argument("--rooms", action="store_true", help="mutate the rooms in place of the heart")
    parser.add_argument("--core", action="store_true", help="mutate _core in place of the heart's other parts")
    parser.add_argument("--only", default="", help="part of a path: draw from these files")
    parser.add_argument("--seed", type=int, default=0, help="draw other ones")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    for name, line, _ in EQUIVALENT:
        if line not in (ROOT / name).read_text():
            print(f"{name} no longer has the line {line!r}: remove it from EQUIVALENT")
    parts = TESTS_OF_ROOMS if options.rooms else TESTS_OF_CORE if options.core else TESTS
    places = drawn(options.count, options.only, parts, options.seed)
    shares = [places[index :: options.workers] for index in range(options.workers)]
    with ThreadPoolExecutor(options.workers) as pool:
        results = [result for share in pool.map(lambda share: list(run(share)), shares) for result in share]
    verdicts = [verdict for _, verdict in results]
    count, alike = verdicts.count("noticed"), verdicts.count("equivalent")
    print(
        f"{count} of {len(results)} mutants were noticed ({count / max(len(results), 1):.0%}), {alike} are equivalent"
    )


if __name__ == "__main__":
    main()
