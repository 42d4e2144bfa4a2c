import inspect
import sys
import threading

import pytest
import torch

from looplib._core.torch_private import eager_step, set_thread_value, thread_value


@pytest.mark.parametrize("removes", [True, False])
def test_a_value_of_a_thread_is_its_own_and_can_be_deleted(removes, monkeypatch):
    if not removes:  # as torch 2.11
        monkeypatch.delattr(torch._C, "_remove_obj_from_tls", raising=False)
    seen = []
    for value in ("one", "two", None):
        set_thread_value("looplib test", value)
        other = threading.Thread(target=lambda: seen.append(thread_value("looplib test")))
        other.start()
        other.join()
        assert thread_value("looplib test") == value
    assert seen == [None, None, None]


CLASSES = [torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adafactor]


def stepped(cls, step, updates=8):
    """An optimizer after several updates by this function."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, size).view(-1, 2)) for size in (2, 4, 8)]
    made = cls(params, foreach=True)
    with torch.no_grad():
        for update in range(updates):
            for param in params:
                param.grad = (param * (update - 1.3)).sin()
            step(made)
    return made


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_eager_step_of_a_class_has_its_bits_with_fewer_calls(cls):
    """The 1 that it adds to counts stays a 1, and no state holds it."""
    quick = eager_step(cls)
    expected, made = stepped(cls, inspect.unwrap(cls.step)), stepped(cls, quick)
    one = quick.__globals__["torch"].tensor(1.0, device="cpu")
    assert one.item() == 1
    for ours, torchs in zip(made.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True):
        assert torch.equal(ours, torchs)
        for key, value in made.state[ours].items():
            assert value is expected.state[torchs][key] is None or torch.equal(value, expected.state[torchs][key])
            assert value is None or value.data_ptr() != one.data_ptr()
    assert calls(quick, made) < 0.85 * calls(inspect.unwrap(cls.step), expected)


def calls(step, made):
    """Number of Python functions that a step calls."""
    seen = []
    with torch.no_grad():
        sys.setprofile(lambda frame, event, value: seen.append(event) if event == "call" else None)
        try:
            step(made)
        finally:
            sys.setprofile(None)
    return len(seen)


def test_a_step_that_replaces_torchs_own_is_run_as_it_is(monkeypatch):
    def step(self, closure=None):
        raise NotImplementedError

    monkeypatch.setattr(torch.optim.NAdam, "step", step)
    assert eager_step(torch.optim.NAdam) is step
