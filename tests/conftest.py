"""``node``: a test that takes it runs on each machine of tests/nodes.py, by default on emulated H100s, and on
all real GPUs where there are any. Schedules, reports and counters are the emulator's: tests of those do not
take it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from smfree.cuda import CudaHostError, Device
from smfree.measure.devices import alive
from tests.nodes import is_emulated, parametrize

FIXTURES = ("node", "device", "tma_device")
"""Those whose parameter names devices; a ``row`` of tests/kernels/pairwise.py may do so too."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples in every run
    settings.load_profile("suite")
    # Ranks that share a GPU have many streams. Streams that share a work queue of it wait for each other, so
    # a rank that is to end a wait could stand behind it. 32 is the most there are (CUDA C++ Programming
    # Guide, environment variables); the driver reads it before the first context.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    config.addinivalue_line("markers", "on_device: runs on the devices that --device names")
    config.addinivalue_line("markers", "node: so do its ranks, which wait for each other: not beside others")


def pytest_collection_finish() -> None:
    """Decoding a kernel makes many objects, few of them garbage: with Python's own thresholds a fifth of all
    time goes into looking for it. What imports have made is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 5)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter's end finds it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, "node", ["emu:h100"], "cuda")


@pytest.fixture(scope="session")
def contexts() -> Iterator[dict[str, list[Device]]]:
    """Real GPUs by the name of their machine, open from the first test to the last: a primary context that
    each test makes and destroys costs more than the test."""
    kept: dict[str, list[Device]] = {}
    yield kept
    for device in (device for devices in kept.values() for device in devices):
        device.close()


@pytest.fixture
def node(request: pytest.FixtureRequest, contexts: dict[str, list[Device]]) -> str:
    """The name of a machine."""
    name: str = request.param
    if not is_emulated(name) and name not in contexts:
        contexts[name] = Device.open_all(name)
    return name


@pytest.fixture(autouse=True)
def gpu_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fault on a real GPU stays until the process ends, and would fail every test after it: so the process
    ends. Under xdist (-n) another worker takes over and the session goes on."""
    yield
    for spec in specs_of(request.node):
        reason = "" if is_emulated(spec) else broken(spec)
        if reason and "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)  # xdist reports the test as one that crashed its worker
        if reason:
            pytest.exit(f"{spec} is unusable after {request.node.nodeid}: {reason}", returncode=3)


def specs_of(item: pytest.Item) -> set[str]:
    """The devices that a test has run on."""
    callspec = getattr(item, "callspec", None)
    params = dict(callspec.params) if callspec else {}
    row = params.get("row")
    found = [row.get("spec")] if isinstance(row, dict) else []
    if item.get_closest_marker("on_device") is not None:
        found += [params.get(name) for name in FIXTURES]
    return {spec for spec in found if spec}


def broken(spec: str) -> str:
    """What the devices answer when a context has failed; empty when all work."""
    devices: list[Device] = []
    try:
        devices = Device.open_all(spec)
        return next((reason for reason in map(alive, devices) if reason), "")
    except CudaHostError as error:
        return str(error)
    finally:
        for device in devices:
            device.close()
