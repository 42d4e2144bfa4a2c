import threading

from looplib._core.torch_private import set_thread_value, thread_value


def test_a_value_of_a_thread_is_its_own():
    seen = []
    for value in ("one", "two", None):
        set_thread_value("looplib test", value)
        other = threading.Thread(target=lambda: seen.append(thread_value("looplib test")))
        other.start()
        other.join()
        assert thread_value("looplib test") == value
    assert seen == [None, None, None]
