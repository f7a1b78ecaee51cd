"""What all tests share: one thread per process, so that sums are the same everywhere; properties without a limit of
time, which a busy machine would miss; and GPUs only where there are."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ["PANPIPE_CACHE"] = ""  # no test takes the plan of another one, nor any from the user's own folder

settings.register_profile(
    "any speed",
    settings.get_profile(settings.get_current_profile_name()),
    max_examples=50,  # of laws that do not say how many they need: they are drawn anew in every run
    deadline=None,
    database=None,  # the clone may be read-only; a failure prints the decorator that repeats it
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any speed")


if os.environ.get("PANPIPE_TEST_OFFLOAD"):  # only then: it imports the whole runtime
    from .support.backends.forced_offload import force_offload

    force_offload()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PANPIPE_TEST_OFFLOAD"):
        # A norm under autocast saves more than its fake tensor: it stays, with this warning.
        config.addinivalue_line("filterwarnings", "default:storage '.*' of stage .* is not as captured")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more process than cores: tests of ranks wait for each other a seventh of the time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
