"""Fixtures of the host side: a compile cache of its own, a fake device, and an emulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smfree.cuda import Device
from tests.cuda.fake_driver import FakeDriver


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMFREE_CACHE_DIR", str(tmp_path_factory.mktemp("smfree-cache")))
        yield


@pytest.fixture
def fake() -> FakeDriver:
    """A driver that logs."""
    return FakeDriver()


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    """A device on the fake driver, used as a real one."""
    with Device(fake, 0, spec="cuda:0", is_emulated=False) as opened:
        yield opened


@pytest.fixture(params=["emu:a100", "emu:h100"])
def emulated(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An emulated GPU of each generation."""
    with Device.open(request.param) as opened:
        yield opened


@pytest.fixture
def h100() -> Iterator[Device]:
    """The emulated H100."""
    with Device.open("emu:h100") as opened:
        yield opened
