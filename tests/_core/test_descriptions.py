"""Values as code in reprs, and as plain values in checkpoints."""

import json
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

import looplib as ll
from looplib._core.records import described, shown, with_repr

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_descriptions_are_the_same_in_each_process(tmp_path):
    """No addresses, no order of sets, no hash of a string."""
    code = """
        import json
        import numpy as np, torch, looplib as ll
        from looplib._core.records import described
        class Plain:
            pass
        settings = [Plain(), ll.optimizer(torch.optim.AdamW, lr=lambda step: 0.1 / (step + 1)), torch.bfloat16, ll.every_n_steps(3),
                    print, torch.ones(3), torch.ones(30), 2**70, float("inf"), torch.nn.Linear, max,
                    list(range(1000)), 1j, np.float64(0.5), np.int64(3), np.array(2.0)]
        print(json.dumps(described(settings)))
    """
    outputs = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True, text=True, check=True, cwd=ROOT, env={"PYTHONHASHSEED": str(seed), "PATH": ""},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(outputs) == 1
    (text,) = outputs
    assert "0x" not in text
    assert json.loads(text)[0] == "Plain"
    assert json.loads(text)[-4:] == ["1j", 0.5, 3, 2.0]


def scaled(factor, name="x"):
    return lambda step: (factor, name, 3)


def test_settings_are_described_by_their_names_and_numbers():
    for setting, description in [
        (set("hgfedcba"), list("abcdefgh")),  # the order of text differs between processes
        (frozenset({3, 1}), [1, 3]),
        (scaled(0.5), "lambda step: ... (3, factor=0.5, name=x)"),
        (partial(scaled, 0.5, name="y"), {"function": "scaled", "args": [0.5], "name": "y"}),
        (ll.optimizer, "optimizer"),
    ]:
        assert described(setting) == description


def test_what_has_no_short_code_is_shown_by_its_name():
    values = list(range(20)), torch.zeros(1000), object(), (1,), [torch.nn.Linear(2, 1)]
    assert [*map(shown, values)] == ["list of 20", "Tensor(...)", "object(...)", "(1,)", "[Linear]"]


def repeat(step, n):
    return with_repr(lambda state, batch: step(state, batch), repeat, step, n)


def test_what_a_function_of_a_users_made_is_shown_as_its_call():
    assert repr(repeat(len, 3)) == "repeat(len, 3)"
    assert repr(repeat(repeat(max, 2), 3)) == "repeat(repeat(max, 2), 3)"
