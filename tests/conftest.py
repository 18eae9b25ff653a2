"""One hypothesis profile for all: a slow machine may slow a test down, never fail it; CI sees the same examples each time.
A machine with a GPU tests what others test. And a way to test what runs where there is no C compiler."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "burnish", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("burnish")

# No test asks the network for a model. Those of the hub have a server of their own (tests/config/fake_hub.py).
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Runs take the GPU that they find, and there sums may come in any order: most tests of whole runs are of the CPU. `make test-gpu` has those that are not.
if not os.environ.get("BURNISH_TESTS_ON_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A job in the background of a shell script ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of tests and all of torch stay to the end: no garbage collection needs to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def in_torch() -> Iterator[None]:
    """No C kernels: their twins in torch run."""
    from tests.kernels import without_c  # which imports torch

    with without_c():
        yield


@pytest.fixture(scope="module", params=["C", "torch"])
def either_way(request: pytest.FixtureRequest) -> None:
    """Once by the C kernels, once by their twins in torch."""
    if request.param == "torch":
        request.getfixturevalue("in_torch")
