"""A number in device memory that CTAs count with ``atomicInc``, which wraps: after each launch it is 0 again.

Launches on one stream follow each other, so each stream has one counter, zeroed once when it is made.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from smfree.cuda import Device, DeviceArray, Stream
from smfree.cuda.memory import Allocation

_COUNTERS: WeakKeyDictionary[Stream, Allocation] = WeakKeyDictionary()


def counter_of(device: Device, stream: Stream | None) -> DeviceArray:
    """The counter (uint32, one element) of a stream of ``device``, None for the default stream."""
    used = stream if isinstance(stream, Stream) else device.default_stream
    found = _COUNTERS.get(used)
    if found is None or found.freed:
        made = device.empty(1, np.uint32).fill(0, stream=used)
        found = _COUNTERS[used] = made.allocation
    return DeviceArray(device, found, 0, (1,), np.dtype(np.uint32))
