"""Hooks that let helpers run points of emulated devices; registered when --jobs allows more than one
process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from smfree.measure.fixture import Measure
from smfree.measure.helpers import Helpers
from smfree.measure.log import RunLog, Seconds
from smfree.measure.records import Record


@dataclass(frozen=True)
class Finished:
    """What a helper hands back for one point."""

    record: Record
    seconds: Seconds


class SharingHooks:
    """``items`` are the points that may run anywhere; ``log`` is the session's, copied into each helper by
    fork."""

    def __init__(self, items: Sequence[pytest.Item], log: RunLog, jobs: int) -> None:
        self._items = list(items)
        self._numbers = {item.nodeid: number for number, item in enumerate(self._items)}
        self._log = log
        self._helpers = Helpers(len(self._items), jobs - 1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[Any]:
        if not session.config.option.collectonly:
            self._helpers.start(self._run)
        try:
            return (yield)
        finally:
            self._helpers.close()

    def _run(self, number: int) -> Finished | None:
        """In a helper: run one item quietly and give its record."""
        item = self._items[number]
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            item.config.pluginmanager.unregister(capture)  # its files are shared with the session
        self._log.records.clear()
        self._log.seconds = Seconds()
        reports = runtestprotocol(item, log=False, nextitem=None)
        if not all(report.passed for report in reports) or len(self._log.records) != 1:
            return None
        return Finished(self._log.records[0], self._log.seconds)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """In the session: take a helper's result instead of running the point."""
        number = self._numbers.get(pyfuncitem.nodeid)
        finished = None if number is None else self._helpers.result(number)
        if finished is None:
            return None
        measure = pyfuncitem.funcargs["measure"]
        assert isinstance(measure, Measure)
        measure.replay(finished.record)
        self._log.seconds.add(finished.seconds)
        self._log.jobs = 1 + self._helpers.started
        return True
