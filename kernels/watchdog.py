"""Kernels that may hang, run to an end: bounded waits, a child process with a time limit, and a report.

``run_watched(call, *args, spec=...)`` runs ``call(device, *args)`` in a process of its own. Every CUDA kernel
that ``device`` compiles gets the bounded waits of ``include/watchdog.cuh``; a wait that lasts too long leaves
a record in memory that both processes share, so it is there even if the child has to be killed. The same on
a GPU and, under the timed schedule, on an emulated one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.common import check_clock, check_whole, require
from smfree.cuda import CudaHostError, CudaSource, Device, Module, TritonSource
from smfree.cuda.choose import choose
from smfree.cuda.isolation import Ending, Outcome, run_isolated
from smfree.cuda.shared_layout import (
    WINDOW_MASK,
    SharedVariable,
    name_barrier,
    shared_variables,
    window_base,
)

LIMIT_NS = 200_000_000
"""Default bound of a wait on a GPU: far above any legitimate one here, far below a person's patience."""
EMULATED_LIMIT_NS = 200_000
"""On an emulated GPU, in modelled time."""
CAPACITY = 1024
"""Records kept; each waiting thread writes one."""

_DEVICEMAP = 0x02  # CU_MEMHOSTREGISTER_DEVICEMAP
_MEMORY = Path("/dev/shm")  # a file there is memory, whose pages a driver can lock
_HEADER = np.dtype([("claimed", "<u4"), ("capacity", "<u4"), ("padding", "<u8")])
_RECORD = np.dtype(
    [
        *((name, "<u4") for name in ("valid", "barrier", "parity", "answers")),
        *((name, "<u4") for name in ("cta", "thread", "line", "waited_us")),
        ("word", "<u8"),
        ("module", "<u8"),
    ]
)
_RECORDS_BYTES = _HEADER.itemsize + CAPACITY * _RECORD.itemsize
_MODULES_BYTES = 1 << 16
LOG_BYTES = _RECORDS_BYTES + _MODULES_BYTES
"""Size of a log: header, records, and the names of the modules as JSON."""


@dataclass(frozen=True)
class StuckWait:
    """Threads of one CTA that waited in vain at one place.

    ``barrier``: variable and index. ``parity``: the one waited for. ``phase_parity``: that of the phase which
    was still incomplete at the end; None when waits for both parities agree: no live barrier is there.
    ``words``: what the threads read of the barrier (8 bytes, layout not documented), on real GPUs only.
    """

    barrier: str
    parity: int
    phase_parity: int | None
    cta: int
    threads: tuple[int, ...]
    source: str
    line: int
    waited_us: int
    words: tuple[int, ...] = ()

    def __str__(self) -> str:
        phase = f"in a phase of parity {self.phase_parity}"
        if self.phase_parity is None:
            phase = "no live barrier there"
        return (
            f"{self.barrier} of CTA {self.cta}, {phase}: waited {self.waited_us} us for parity "
            f"{self.parity}; {_threads(self.threads)} at {self.source}:{self.line}"
        )


@dataclass(frozen=True)
class WatchReport:
    """``outcome``: how the child ended; ``waits``: who waited in vain, empty when nobody did; ``dropped``:
    threads for which there was no record left."""

    outcome: Outcome
    waits: tuple[StuckWait, ...]
    dropped: int = 0

    @property
    def hung(self) -> bool:
        """Whether some wait was not satisfied, or the child had to be ended."""
        return bool(self.waits) or self.outcome.ending is Ending.TIMED_OUT

    def __str__(self) -> str:
        lines = [str(wait) for wait in self.waits] or ["no wait ran out of time"]
        if self.dropped:
            lines.append(f"... and {self.dropped} more threads")
        return "\n".join(lines + ([self.outcome.text] if self.outcome.text else []))


@dataclass(frozen=True)
class _ModuleNames:
    source: str
    window_base: int
    variables: tuple[SharedVariable, ...]


class WatchedDevice(Device):
    """A device whose CUDA kernels have bounded waits.

    ``log``: :data:`LOG_BYTES` zeroed bytes, which outlive the device; :func:`read_log` says what they hold.
    ``schedule``, ``seed``: as for Device.open; only the timed schedule has the clock that the bounds need.
    Raises ConfigError.
    """

    def __init__(
        self, spec: str, log: NDArray[np.uint8], *, limit_ns: int | None = None, **schedule: Any
    ) -> None:
        choice = choose(spec, **schedule)
        super().__init__(choice.driver, choice.ordinal, spec=choice.spec, is_emulated=choice.is_emulated)
        usual = EMULATED_LIMIT_NS if self.is_emulated else LIMIT_NS
        self.limit_ns = usual if limit_ns is None else check_whole("limit_ns", limit_ns)
        require(1 <= self.limit_ns < 2**63, "limit_ns is 1 to 2^63 - 1", self.limit_ns, "leave it out")
        check_clock(self)
        self._log = log
        self._names: list[_ModuleNames] = []
        log[: _HEADER.itemsize].view(_HEADER)["capacity"] = CAPACITY
        address = int(log.ctypes.data)
        self.calls("cuMemHostRegister", address, LOG_BYTES, _DEVICEMAP, bytes=LOG_BYTES)
        self._log_ptr = int(self.calls("cuMemHostGetDevicePointer", address, 0))
        self._claimed = self.empty(1, np.uint32).fill(0)

    def close(self) -> None:
        """As Device.close; the log is the host's alone again."""
        if not self.calls.closed:
            with suppress(CudaHostError):  # a failed context has no count to give
                self._log[: _HEADER.itemsize].view(_HEADER)["claimed"] = self._claimed.numpy()
        self.calls.quiet("cuCtxSynchronize")
        self.calls.quiet("cuMemHostUnregister", int(self._log.ctypes.data))
        super().close()

    def compile(self, source: CudaSource | TritonSource) -> Module:
        """As Device.compile; a CUDA source with the bounded waits."""
        if not isinstance(source, CudaSource):
            return super().compile(source)
        defines: dict[str, object] = {**dict(source.defines), "WATCHDOG_NS": self.limit_ns}
        if not self.is_emulated:
            defines["WATCHDOG_RAW_WORD"] = 1
        known = len(self._modules)
        module = super().compile(
            CudaSource(
                source.path, defines, source.options, include_dirs=source.include_dirs, text=source.text
            )
        )
        if len(self._modules) > known and "watchdog_log" in module.image.ptx:
            self._arm(module)
        return module

    def _arm(self, module: Module) -> None:
        image = module.image
        base = window_base(image, is_emulated=self.is_emulated)
        self._names.append(_ModuleNames(image.name.rpartition("/")[2], base, shared_variables(image)))
        text = json.dumps([asdict(names) for names in self._names]).encode()
        self._log[_RECORDS_BYTES : _RECORDS_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        module.variable("watchdog_module", np.uint64).copy_from(np.array([len(self._names) - 1], np.uint64))
        module.variable("watchdog_claimed", np.uint64).copy_from(np.array([self._claimed.ptr], np.uint64))
        module.variable("watchdog_log", np.uint64).copy_from(np.array([self._log_ptr], np.uint64))


def new_log() -> NDArray[np.uint8]:
    """A log in this process' memory."""
    return np.zeros(LOG_BYTES, np.uint8)


def read_log(log: NDArray[np.uint8]) -> tuple[tuple[StuckWait, ...], int]:
    """The waits that a log holds, by CTA, line and barrier; and the number of threads that found no room."""
    header = log[: _HEADER.itemsize].view(_HEADER)[0]
    records = log[_HEADER.itemsize : _RECORDS_BYTES].view(_RECORD)
    records = records[records["valid"] == 1]
    modules = [
        _ModuleNames(
            item["source"], item["window_base"], tuple(SharedVariable(**v) for v in item["variables"])
        )
        for item in json.loads(log[_RECORDS_BYTES:].tobytes().rstrip(b"\0") or b"[]")
    ]
    found: dict[tuple[int, ...], list[Any]] = {}
    for record in records:
        key = tuple(int(record[name]) for name in ("module", "cta", "line", "barrier", "parity", "answers"))
        found.setdefault(key, []).append(record)
    waits = tuple(
        _stuck(modules[key[0]], alike) for key, alike in sorted(found.items(), key=lambda item: item[0])
    )
    return waits, max(0, int(header["claimed"]) - CAPACITY)


def _stuck(module: _ModuleNames, alike: Sequence[Any]) -> StuckWait:
    """One entry for records that differ only in their threads."""
    first = alike[0]
    offset = (int(first["barrier"]) & WINDOW_MASK) - module.window_base
    return StuckWait(
        barrier=name_barrier(module.variables, offset),
        parity=int(first["parity"]),
        phase_parity={0b01: 1, 0b10: 0}.get(int(first["answers"])),
        cta=int(first["cta"]),
        threads=tuple(sorted(int(record["thread"]) for record in alike)),
        source=module.source,
        line=int(first["line"]),
        waited_us=max(int(record["waited_us"]) for record in alike),
        words=tuple(sorted({int(record["word"]) for record in alike} - {0})),
    )


def run_watched(
    call: Callable[..., Any], *args: Any, spec: str, limit_ns: int | None = None, timeout_s: float = 60.0
) -> WatchReport:
    """``call(device, *args)`` in a child process, on a :class:`WatchedDevice`, then a synchronisation.

    ``call``, ``args`` and the result are pickled. Never raises for what happens in the child: a hang is a
    report.
    """
    with tempfile.TemporaryDirectory(prefix="smfree-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        log = np.memmap(Path(folder) / "log", np.uint8, mode="w+", shape=LOG_BYTES)
        outcome = run_isolated(_child, str(log.filename), spec, limit_ns, call, args, timeout_s=timeout_s)
        return WatchReport(outcome, *read_log(log))


def _child(
    path: str, spec: str, limit_ns: int | None, call: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    log = np.memmap(path, np.uint8, mode="r+", shape=LOG_BYTES)
    with WatchedDevice(spec, log, limit_ns=limit_ns) as device:
        result = call(device, *args)
        device.synchronize()
        return result


def _threads(numbers: Sequence[int]) -> str:
    """ "thread 64", "threads 0-31, 64" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"thread{'s' if len(numbers) > 1 else ''} {listed}"
