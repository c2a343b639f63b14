"""Kinds of asynchronous copies, and where their bytes come from and go."""

from __future__ import annotations

from enum import Enum


class CopyKind(Enum):
    """What was issued."""

    CP_ASYNC = "cp.async"
    BULK_G2S = "cp.async.bulk load"
    BULK_S2G = "cp.async.bulk store"
    BULK_S2S = "cp.async.bulk copy to another CTA"
    TENSOR_G2S = "cp.async.bulk.tensor load"
    TENSOR_S2G = "cp.async.bulk.tensor store"
    REDUCE_S2G = "cp.reduce.async.bulk"
    REDUCE_S2S = "cp.reduce.async.bulk to another CTA"
    REDUCE_TENSOR = "cp.reduce.async.bulk.tensor"
    ST_ASYNC = "st.async"
    RED_ASYNC = "red.async"
    STORE = "store"
    RED = "red"

    @property
    def to_shared(self) -> bool:
        """The destination is shared memory."""
        return self not in _TO_GLOBAL and self not in _OF_THREADS

    @property
    def from_shared(self) -> bool:
        """The source is shared memory."""
        return self in _TO_GLOBAL or self in (CopyKind.BULK_S2S, CopyKind.REDUCE_S2S)

    @property
    def from_registers(self) -> bool:
        """There is no source in memory."""
        return self in _OF_REGISTERS

    @property
    def of_threads(self) -> bool:
        """An ordinary store or reduction that goes to another device."""
        return self in _OF_THREADS

    @property
    def reduces(self) -> bool:
        """The destination is combined with the source."""
        return self in _REDUCTIONS


_TO_GLOBAL = (CopyKind.BULK_S2G, CopyKind.TENSOR_S2G, CopyKind.REDUCE_S2G, CopyKind.REDUCE_TENSOR)
_REDUCTIONS = (CopyKind.REDUCE_S2G, CopyKind.REDUCE_S2S, CopyKind.REDUCE_TENSOR, CopyKind.RED_ASYNC)
_OF_THREADS = (CopyKind.STORE, CopyKind.RED)
"""Ordinary ones of threads that go to another device: they land later, too."""
_OF_REGISTERS = (CopyKind.ST_ASYNC, CopyKind.RED_ASYNC, *_OF_THREADS)
