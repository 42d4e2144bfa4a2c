"""Every public name has a docstring that names its parameters, and every room an index."""

import ast
import doctest
import inspect
import re
from itertools import pairwise

from public import ROOMS, ROOT, public_names

NAMES = public_names()


def parameters(value):
    """The names that a docstring must explain: those of a call, or of the `__call__` of a class that users make."""
    protocol = getattr(value, "_is_protocol", False)
    error = isinstance(value, type) and issubclass(value, BaseException)
    if protocol or error or not callable(value) or not inspect.getmodule(value).__name__.startswith("looplib"):
        return []
    given = [each for each in inspect.signature(value).parameters if each not in ("self", "args", "kwargs")]
    return [] if any(each.startswith("_") for each in given) else given


def unexplained(name):
    """The parameters that its docstring does not name."""
    if name in ("log.Tracker", "metrics.Window", "types.TrainState"):  # made by other means
        return []
    text = re.sub(r"^(>>>|\.\.\.).*$", "", inspect.getdoc(NAMES[name]) or "", flags=re.M)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", text))))
    for names in re.findall(r"^    ((?:\*{0,2}\w+,\s+)*\*{0,2}\w+): ", text, re.M):
        named |= set(re.findall(r"\w+", names))
    return [each for each in parameters(NAMES[name]) if each not in named]


def test_a_docstring_names_every_parameter():
    missing = {name: found for name in NAMES if (found := unexplained(name))}
    assert not missing, f"explain these below `Args:`, or name them in backquotes: {missing}"


def test_every_room_opens_with_one_sentence():
    for name, module in ROOMS.items():
        first = (module.__doc__ or "").partition("\n")[0]
        assert first.endswith("."), f"the docstring of looplib/{name} opens with one sentence, in one line"


def test_a_name_lives_in_one_room():
    homes = {}
    for name in NAMES:
        homes.setdefault(name.rpartition(".")[2], set()).add(name)
    twice = {bare: sorted(names) for bare, names in homes.items() if len(names) > 1}
    assert not twice, f"list these in the index of one room alone: {twice}"


def documented_assignments(path):
    """The strings below `Name = ...`, which is where a type alias has its docstring."""
    for pair in pairwise(ast.parse(path.read_text()).body):
        match pair:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def test_examples_of_type_aliases_run():
    examples = dict(documented_assignments(ROOT / "looplib/types.py"))
    assert all(">>>" in examples[name] for name in ("LossFn", "Schedule", "Logger"))
    for name, text in examples.items():
        test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
