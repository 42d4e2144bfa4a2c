"""Inductor's check of vector instructions is left out, unless its kernels fail without it or the user has decided."""

import functools

import pytest
from torch._inductor import config, cpu_vec_isa

from looplib.transforms._vector_isa import without_isa_check


@pytest.fixture
def isa(monkeypatch):
    """A CPU with one set of instructions, whose checks are counted, and Inductor's function that lists those that work."""

    class ISA:
        checks = 0

        @functools.cache  # noqa: B019
        def __bool__(self):
            if config.cpp.vec_isa_ok is None:
                self.checks += 1
                return False
            return config.cpp.vec_isa_ok

    made = ISA()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [made])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: [made] if made else []))
    return made


def compiler(fails=lambda isas: False):
    """A function that compiles with the settings it is given, and the instructions that it used each time."""
    used = []

    def compile(settings):
        with config.patch(settings):
            used.append(list(cpu_vec_isa.valid_vec_isa_list()))
        if fails(used[-1]):
            raise OSError("no such instruction")
        return "compiled"

    return compile, used


def test_the_first_instructions_are_used_without_a_check(isa):
    compile, used = compiler()
    assert without_isa_check(compile, {}) == "compiled"
    assert (used, isa.checks) == ([[isa]], 0)


def test_kernels_that_fail_are_compiled_with_the_check(isa):
    compile, used = compiler(fails=bool)
    assert without_isa_check(compile, {}) == "compiled"
    assert (used, isa.checks) == ([[isa], []], 1)


def test_an_error_that_stays_is_raised(isa):
    compile, used = compiler(fails=lambda isas: True)
    with pytest.raises(OSError, match="no such instruction"):
        without_isa_check(compile, {})
    assert len(used) == 2


def test_an_interrupt_ends_compiling(isa):
    def compile(settings):
        assert settings
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        without_isa_check(compile, {})


def test_what_is_compiled_afterwards_by_torch_itself_is_checked(isa):
    without_isa_check(compiler()[0], {})
    assert cpu_vec_isa.valid_vec_isa_list() == []
    assert isa.checks == 1


@pytest.mark.parametrize("allowed", [False, True])
def test_the_users_setting_holds(isa, allowed):
    expected = [isa] if allowed else []
    compile, used = compiler()
    with config.patch({"cpp.vec_isa_ok": allowed}):  # as by TORCHINDUCTOR_VEC_ISA_OK
        without_isa_check(compile, {})
    assert used == [expected]


@pytest.mark.parametrize("allowed", [False, True])
def test_the_users_option_holds(isa, allowed):
    compile, used = compiler()
    option = {"cpp.vec_isa_ok": allowed}
    without_isa_check(lambda settings: compile({**option, **settings}), option)
    assert used == [[isa] if allowed else []]
