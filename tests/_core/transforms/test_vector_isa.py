"""The check of vector instructions while a step is traced leaves Inductor's choice and its errors as they are."""

import functools
import threading

import pytest
from torch._inductor import config, cpu_vec_isa

from looplib.transforms._vector_isa import vector_isa_checked


class ISA:
    """A set of instructions whose check may fail or raise, and is counted."""

    def __init__(self, name, bits, works):
        self.name, self.bits, self.works = name, bits, works
        self.checks = []

    def __str__(self):
        return self.name

    def bit_width(self):
        return self.bits

    def __bool__(self):
        return self.check()

    @functools.cache  # noqa: B019
    def check(self):
        self.checks.append(threading.current_thread().name)
        if isinstance(self.works, Exception):
            raise self.works
        return self.works


@pytest.fixture
def isas(monkeypatch):
    """A CPU with these sets of instructions, and Inductor's function that lists those that work."""

    def make(*works):
        found = [ISA(f"isa{bits}", bits, works) for bits, works in zip((512, 256, 128), works, strict=False)]
        monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [ISA("missing", 1024, True), *found])
        monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: [isa.name for isa in found])
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: [isa for isa in found if isa]))
        return found

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return make


def test_a_thread_checks_no_more_than_inductor_needs(isas):
    wide, middle, narrow = isas(False, True, True)
    with vector_isa_checked():
        assert cpu_vec_isa.pick_vec_isa() is middle
        assert (wide.checks, middle.checks, narrow.checks) == (["vector isa"], ["vector isa"], [])
    assert cpu_vec_isa.valid_vec_isa_list() == [middle, narrow]
    assert cpu_vec_isa.pick_vec_isa() is middle


def test_a_width_that_is_asked_for_is_used(isas, monkeypatch):
    wide, middle, narrow = isas(True, True, True)
    with vector_isa_checked():
        with config.patch({"cpp.simdlen": 128}):
            assert cpu_vec_isa.pick_vec_isa() is narrow
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "isa256")
        monkeypatch.setattr(cpu_vec_isa, "get_isa_from_cpu_capability", lambda name, isas, _: isas[1])
        assert cpu_vec_isa.pick_vec_isa() is middle
    assert wide.checks == ["vector isa"]


@pytest.mark.parametrize("chosen", [{"options": {"cpp.vec_isa_ok": True}}, {"backend": "eager"}])
def test_inductor_checks_by_itself_with_options_for_cpp(isas, chosen):
    (wide,) = isas(True)
    plain = cpu_vec_isa.valid_vec_isa_list
    with vector_isa_checked(**{"mode": None, **chosen}):
        assert cpu_vec_isa.valid_vec_isa_list is plain
    assert not wide.checks


def test_settings_of_the_context_hold_in_the_thread(isas, monkeypatch):
    (wide,) = isas(True)
    monkeypatch.setattr(ISA, "__bool__", lambda isa: config.cpp.vec_isa_ok)
    with config.patch({"cpp.vec_isa_ok": False}), vector_isa_checked():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    with config.patch({"cpp.vec_isa_ok": True}), vector_isa_checked():
        assert cpu_vec_isa.pick_vec_isa() is wide


def test_an_error_of_the_check_is_inductors(isas):
    isas(OSError("no compiler"))
    with vector_isa_checked(), pytest.raises(OSError, match="no compiler"):
        cpu_vec_isa.pick_vec_isa()


def test_a_step_that_fails_leaves_no_thread_and_no_answer(isas):
    wide, _ = isas(False, True)
    plain = cpu_vec_isa.valid_vec_isa_list

    @vector_isa_checked()
    def compile():
        cpu_vec_isa.pick_vec_isa()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile()
    assert cpu_vec_isa.valid_vec_isa_list is plain
    assert "vector isa" not in [thread.name for thread in threading.enumerate()]
    wide.works = True  # Ctrl-C had ended the C++ compiler
    assert cpu_vec_isa.pick_vec_isa() is wide
    assert wide.checks == ["vector isa", "MainThread"]


def test_a_step_that_fails_waits_for_one_check_at_most(isas, monkeypatch):
    wide, narrow = isas(False, True)
    raised = threading.Event()
    monkeypatch.setattr(ISA, "__bool__", lambda isa: raised.wait(10) and isa.check())
    end_of_check = threading.Timer(0.05, raised.set)

    @vector_isa_checked()
    def compile():
        end_of_check.start()
        raise ValueError("untraceable")

    with pytest.raises(ValueError, match="untraceable"):
        compile()
    end_of_check.join()
    assert (wide.checks, narrow.checks) == (["vector isa"], [])


def test_a_step_compiled_within_another_uses_its_check(isas):
    isas(True)
    with vector_isa_checked():
        outer = cpu_vec_isa.valid_vec_isa_list
        with vector_isa_checked():
            assert cpu_vec_isa.valid_vec_isa_list is outer
        assert cpu_vec_isa.valid_vec_isa_list is outer
