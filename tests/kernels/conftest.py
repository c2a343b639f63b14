"""``device``: every test that takes it runs on each device: those named with --device or SMFREE_DEVICE, else
the emulated A100 and H100, and the real GPU 0 where there is one. The bodies cannot tell the difference.

``tma_device``: the same for kernels that need a TMA: else the emulated H100 and B200.

``timing`` marks tests of a device's own clock: on a GPU nothing else may run beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from smfree.cuda import CudaHostError, Device
from smfree.cuda.choose import real_devices
from smfree.measure.devices import alive
from smfree.measure.options import device_specs

EMULATED = {"device": ["emu:a100", "emu:h100"], "tma_device": ["emu:h100", "emu:b200"]}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timing: reads the device's clock")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, emulated in EMULATED.items():
        if name in metafunc.fixturenames:
            specs = device_specs(metafunc.config)
            if specs == ["auto"]:
                specs = emulated + (["cuda:0"] if real_devices()[1] else [])
            metafunc.parametrize(name, specs, indirect=True)


@pytest.fixture(autouse=True)
def gpu_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fault on a real GPU stays until the process ends, and would fail every test after it: so the process
    ends. Under xdist (-n) another worker takes over and the session goes on."""
    yield
    name = request.node.nodeid
    for spec in set(re.findall(r"cuda:\d+", name)):
        reason = broken(spec)
        if reason and "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)  # xdist reports the test as one that crashed its worker
        if reason:
            pytest.exit(f"{spec} is unusable after {name}: {reason}", returncode=3)


def broken(spec: str) -> str:
    """What a device answers whose context has failed; empty when it works."""
    try:
        with Device.open(spec) as opened:
            return alive(opened)
    except CudaHostError as error:
        return str(error)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device, closed after the test, so that a failing kernel spoils no other test."""
    with Device.open(request.param) as opened:
        yield opened


@pytest.fixture
def tma_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """As ``device``, with a TMA; skipped with the reason on one without."""
    with Device.open(request.param) as opened:
        if not opened.capabilities.has_tma:
            pytest.skip(f"{opened.name} has no TMA")
        yield opened
