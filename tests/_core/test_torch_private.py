import threading
from contextlib import suppress

import pytest
from torch.utils.data import DataLoader, get_worker_info

from looplib._core.torch_private import outside_of_workers, set_thread_value, thread_value


def test_a_value_of_a_thread_is_its_own():
    seen = []
    for value in ("one", "two", None):
        set_thread_value("looplib test", value)
        other = threading.Thread(target=lambda: seen.append(thread_value("looplib test")))
        other.start()
        other.join()
        assert thread_value("looplib test") == value
    assert seen == [None, None, None]


class Asking:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        answers = [get_worker_info() is None]
        with suppress(KeyError), outside_of_workers():
            answers.append(get_worker_info() is None)
            raise KeyError
        return [*answers, get_worker_info() is None]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_is_none_within_the_context_alone(workers):
    outside = not workers
    assert [*DataLoader(Asking(), batch_size=None, num_workers=workers)] == 2 * [[outside, True, outside]]
