"""``device``: every test that takes it runs on each device: those named with --device or SMFREE_DEVICE, else
the emulated A100 and H100, and the real GPU 0 where there is one. The bodies cannot tell the difference.

``tma_device``: the same for kernels that need a TMA: else the emulated H100 and B200.

``timing`` marks tests of a device's own clock: on a GPU nothing else may run beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smfree.cuda import Device
from tests.nodes import parametrize

EMULATED = {"device": ["emu:a100", "emu:h100"], "tma_device": ["emu:h100", "emu:b200"]}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timing: reads the device's clock")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, emulated in EMULATED.items():
        parametrize(metafunc, name, emulated, "cuda:0")


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that failed waits but shortly for kernels that do not look at the abort word."""
    monkeypatch.setattr("kernels.ipc.wait.GRACE_S", 0.2)
