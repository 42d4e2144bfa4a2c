import threading

import pytest
import torch

from looplib._core.torch_private import set_thread_value, thread_value


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
