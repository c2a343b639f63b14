"""Times by the host's clock, for what the host itself does or waits for: handles, copies of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from smfree.measure.points import Point
from smfree.measure.records import Record

if TYPE_CHECKING:
    from smfree.measure.fixture import Measure

METHOD = "the host's clock around the call, waits included (Device.host_seconds)"


def timed_by_host(
    measure: Measure, point: Point, seconds: Callable[[], float], verify: Callable[[], None]
) -> Record:
    """Record what ``seconds()`` returns: a sample of the host's clock, each one after the first.

    The first call warms up and is verified; on a deterministic clock it is the sample.
    """
    measure.timer.explicit()
    first = measure.run(seconds)
    measure.verify(verify)
    samples: list[float] = []

    def target() -> None:
        samples.append(first if measure.deterministic else seconds())
        measure.timer.add(samples[-1])

    measure.pedantic(target)
    record = measure.record(point, samples, [], {}, 0)
    record.timing = {"method": METHOD}
    return measure.finish(record)
