"""Node servers, started once for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulator.server_kit import Servers


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()
