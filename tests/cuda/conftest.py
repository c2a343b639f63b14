"""Fixtures of the host side: a compile cache of its own, a fake device, an emulated one, and GPUs of the
``node`` that a test runs on: emulated, or the real ones that --device names (tests/nodes.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smfree.cuda import Device
from tests.cuda.fake_driver import FakeDriver
from tests.nodes import open_gpus, open_ranks


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


Opens = Callable[..., list[Device]]


@pytest.fixture
def gpus(node: str) -> Iterator[Opens]:
    """``gpus(2)`` opens two different GPUs, or skips; with ``shared=True`` two that may be the same one."""
    opened: list[Device] = []

    def open_them(count: int, *, shared: bool = False) -> list[Device]:
        found = open_ranks(node, count) if shared else open_gpus(node, count)
        opened.extend(found)
        return found

    yield open_them
    for device in opened:
        device.close()


@pytest.fixture
def gpu(gpus: Opens) -> Device:
    """One GPU."""
    return gpus(1)[0]
