"""``device``: every test that takes it runs on each device: those named with --device or SMFREE_DEVICE, else
the emulated A100 and H100, and the real GPU 0 where there is one. The bodies cannot tell the difference.

``tma_device``: the same for kernels that need a TMA: else the emulated H100 and B200."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from smfree.cuda import Device
from smfree.cuda.choose import real_devices
from smfree.measure.devices import alive
from smfree.measure.options import device_specs

EMULATED = {"device": ["emu:a100", "emu:h100"], "tma_device": ["emu:h100", "emu:b200"]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, emulated in EMULATED.items():
        if name in metafunc.fixturenames:
            specs = device_specs(metafunc.config)
            if specs == ["auto"]:
                specs = emulated + (["cuda:0"] if real_devices()[1] else [])
            metafunc.parametrize(name, specs, indirect=True)


@contextmanager
def open_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device, closed after the test, so that a failing kernel spoils no other test. A fault on a real
    GPU stays until the process ends, so it ends the session there."""
    with Device.open(request.param) as opened:
        yield opened
        reason = "" if opened.is_emulated else alive(opened)
    if reason:
        pytest.exit(f"{request.param} is unusable after {request.node.nodeid}: {reason}", returncode=3)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device."""
    with open_device(request) as opened:
        yield opened


@pytest.fixture
def tma_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """As ``device``, with a TMA; skipped with the reason on one without."""
    with open_device(request) as opened:
        if not opened.capabilities.has_tma:
            pytest.skip(f"{opened.name} has no TMA")
        yield opened
