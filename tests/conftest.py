import gc
import os
import signal

# Before torch is imported, for the processes that tests start as well: the models are tiny, and threads that wait
# for each other on two cores cost ten times what they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

# A shell starts its background jobs with Ctrl-C ignored, which the processes that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

# torch is imported where it is used: the process that only starts those that run the tests would take 2 s for it.

# No test depends on how fast the machine is, nor on luck: each run tries the same examples. The profile "search" tries
# new ones each time.
hypothesis.settings.register_profile("every run", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fast tier", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("search", deadline=None)


def pytest_configure(config):
    """The fast tier tries the first 30 of 100 examples, and of other numbers as many: see `shared.examples`."""
    tier = "fast tier" if "not slow" in config.option.markexpr else "every run"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", tier))


@pytest.fixture(autouse=True)
def seed():
    """Weights that a test does not seed itself are the same in each run, whichever tests ran before it."""
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # of the CPU alone: for each device that there is not, the other keeps the stack, which takes milliseconds
        torch.default_generator.manual_seed(0)


@pytest.fixture
def one_process():
    """A process group of this process alone, for torch's engines."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def the_hub(monkeypatch, tmp_path):
    """A stand-in for the Hugging Face Hub, to which huggingface_hub then sends."""
    from hub_stand_in import Hub

    return Hub(monkeypatch, tmp_path / "pulled")


# Checks of texts and sources: English, links, search, imports and the release. A tier of their own (`pytest -m pages`).
PAGES = {"test_english.py", "test_package.py", "test_recipes_page.py", "test_release.py", "test_site.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The fast tier runs one case of each parametrized test: that marked `hardest`, or the first. The others become `slow`.

    The exceptions are tables of what is refused, and tests marked `every_case`: checks of pages and tables whose cases are
    cheap and each of another thing. Where there are many, `shared.one_report` makes one test of them.
    """
    hardest = {test_of(item) for item in items if item.get_closest_marker("hardest")}
    tests = set()
    for item in items:
        test = test_of(item)
        is_chosen = item.get_closest_marker("hardest") if test in hardest else test not in tests
        if not is_chosen and "refused" not in test and not item.get_closest_marker("every_case"):
            item.add_marker("slow")
        if item.path.name in PAGES and not item.get_closest_marker("slow"):
            item.add_marker("pages")
        tests.add(test)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no examples in docstrings: to look for some in each would take seconds."""
    collectors = yield
    return [collector for collector in collectors if type(collector).__name__ != "DoctestModule"]


def test_of(item):
    return item.nodeid.partition("[")[0]


def pytest_collection_finish():
    """Keep the garbage collector from walking through all that was imported, which takes most of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """The same for what the tests of a file have imported."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    """And from the collections at the end, by pytest and by Python, of which one is enough."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def float64():
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
