"""``device``: every test that takes it runs on each device: those named with --device or SMFREE_DEVICE, else
the emulated A100 and H100, and the real GPU 0 where there is one. The bodies cannot tell the difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smfree.cuda import Device
from smfree.cuda.choose import real_devices
from smfree.measure.devices import alive
from smfree.measure.options import device_specs

EMULATED = ["emu:a100", "emu:h100"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        specs = device_specs(metafunc.config)
        if specs == ["auto"]:
            specs = EMULATED + (["cuda:0"] if real_devices()[1] else [])
        metafunc.parametrize("device", specs, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device, closed after the test, so that a failing kernel spoils no other test. A fault on a real
    GPU stays until the process ends, so it ends the session there."""
    with Device.open(request.param) as opened:
        yield opened
        reason = "" if opened.is_emulated else alive(opened)
    if reason:
        pytest.exit(f"{request.param} is unusable after {request.node.nodeid}: {reason}", returncode=3)
