"""One report of all cases of a parametrized test."""

import pytest
import torch
from shared import one_report


def test_each_case_that_fails_is_named_with_its_reason_and_all_of_them_run(tmp_path):
    ran = []

    @one_report
    @pytest.mark.slow
    @pytest.mark.parametrize("right", [True, pytest.param(False, id="an id")])
    @pytest.mark.parametrize(("number", "name"), [(1, "a"), (2, "b")])
    def test(number, name, right, tmp_path, monkeypatch):
        ran.append((number, name, right, tmp_path, torch.rand(1).item()))
        monkeypatch.setattr(one_report, "__doc__", "patched")
        assert right, f"case {name} is wrong"

    assert [mark.name for mark in test.pytestmark] == ["slow"]
    assert [*test.__signature__.parameters] == ["tmp_path", "monkeypatch"]  # for which pytest looks for fixtures
    with pytest.raises(pytest.fail.Exception) as raised:
        test(tmp_path=tmp_path, monkeypatch=None)
    assert {case[:3] for case in ran} == {
        (number, name, right) for number, name in ((1, "a"), (2, "b")) for right in (True, False)
    }
    assert len({case[3] for case in ran}) == 4
    assert len({case[4] for case in ran}) == 1
    assert one_report.__doc__ != "patched"
    told = str(raised.value)
    assert told.startswith("2 of 4 cases:")
    for name in ("a", "b"):
        assert f"AssertionError: case {name} is wrong" in told
    assert "number=1, name='a', right=False" in told
    assert "right=True" not in told


def test_cases_that_all_hold_say_nothing():
    @one_report
    @pytest.mark.parametrize("number", [1, 2])
    def test(number):
        assert number

    test()
