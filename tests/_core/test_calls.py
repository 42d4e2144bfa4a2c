"""Reprs that read as code."""

import torch

from looplib._core.records import shown


def test_what_has_no_code_is_shown_by_its_name():
    assert shown(list(range(20))) == "list of 20"
    assert shown(torch.zeros(1000)) == "Tensor(...)"
    assert shown(object()) == "object(...)"
