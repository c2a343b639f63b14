"""What every host wrapper needs: its errors, the checks of its operands, and the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from smfree.cuda import Capabilities, CudaSource, Device, DeviceArray, Kernel, Stream, TritonSource

KERNELS = Path(__file__).parent
MAX_STAGES = 8
MAX_THREADS = 1024
MAX_UNROLL = 8


class ConfigError(ValueError):
    """A configuration that the kernel or the device cannot run. Rule, value, remedy."""


class OperandError(ValueError):
    """Arrays that the kernel cannot copy between. Rule, value, remedy."""


@dataclass(frozen=True)
class LaunchInfo:
    """What was launched. ``kernel`` is None when there was nothing to do (zero length, nothing launched)."""

    kernel: Kernel | None
    grid: int = 0
    threads: int = 0
    shared_bytes: int = 0


def require(holds: bool, rule: str, got: object, remedy: str) -> None:
    """Raise ConfigError unless ``holds``."""
    if not holds:
        raise ConfigError(f"{rule} (got {got}); {remedy}")


def check_whole(name: str, value: object) -> int:
    """A Python or numpy integer, given as Python's. Raises ConfigError."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise ConfigError(f"{name} must be a whole number (got {value!r}); convert it with int()")


def check_flag(name: str, value: object) -> None:
    """True or False. Raises ConfigError."""
    require(isinstance(value, bool), f"{name} must be a bool", repr(value), "use True or False")


def plain_integers(config: Any) -> None:
    """The numpy integers among the fields of a frozen dataclass become Python's: products of narrow ones
    would wrap."""
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, np.integer):
            object.__setattr__(config, item.name, int(value))


def check_float32(name: str, value: Any) -> np.float32:
    """A real number, rounded to float32. Raises OperandError, also for one above float32's largest."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise OperandError(f"{name} must be a real number (got {value!r}); convert it with float()")
    largest = float(np.finfo(np.float32).max)
    size = abs(value if isinstance(value, int) else float(value))
    if largest < size != math.inf:
        raise OperandError(
            f"{name} must be at most {largest:g}, as float32 is (got {value}); scale the arrays"
        )
    return np.float32(value)


def check_tile(tile_bytes: int, *, multiple_of: int = 16) -> None:
    """A tile is a positive multiple of 16 bytes (of ``multiple_of``). Raises ConfigError."""
    check_whole("tile_bytes", tile_bytes)
    below = tile_bytes // multiple_of * multiple_of
    near = f"{below} or {below + multiple_of}" if below > 0 else str(multiple_of)
    require(
        tile_bytes > 0 and tile_bytes % multiple_of == 0,
        f"tile_bytes must be a positive multiple of {multiple_of}",
        tile_bytes,
        f"use {near}",
    )


def check_threads(threads: int) -> None:
    """Whole warps, at most 1024 threads. Raises ConfigError."""
    check_whole("threads", threads)
    require(
        0 < threads <= MAX_THREADS and threads % 32 == 0,
        f"threads must be a multiple of 32, at most {MAX_THREADS}",
        threads,
        "use 128",
    )


def check_stages(num_stages: int, *, at_most: int = MAX_STAGES) -> None:
    """1 to ``at_most`` stages. Raises ConfigError."""
    check_whole("num_stages", num_stages)
    require(
        1 <= num_stages <= at_most,
        f"num_stages must be 1 to {at_most}",
        num_stages,
        f"use 1 (no overlap) to {at_most}",
    )


def check_unroll(unroll: int) -> None:
    """One to eight accesses in flight per thread. Raises ConfigError."""
    check_whole("unroll", unroll)
    require(1 <= unroll <= MAX_UNROLL, f"unroll must be 1 to {MAX_UNROLL}", unroll, "use 4")


def check_ctas(ctas_per_sm: int) -> None:
    """At least one CTA per SM. Raises ConfigError."""
    check_whole("ctas_per_sm", ctas_per_sm)
    require(ctas_per_sm >= 1, "ctas_per_sm must be at least 1", ctas_per_sm, "use 1")


def check_shared(shared_bytes: int, capabilities: Capabilities) -> None:
    """The CTA's shared memory fits the device. Raises ConfigError."""
    require(
        shared_bytes <= capabilities.max_shared_bytes_per_block,
        f"a CTA has at most {capabilities.max_shared_bytes_per_block} bytes of shared memory on "
        f"{capabilities.name}",
        f"{shared_bytes} for all stages",
        "use a smaller tile or fewer stages",
    )


def tma_unavailable(capabilities: Capabilities) -> str | None:
    """Why the TMA cannot be used on a device, None when it can."""
    if capabilities.has_tma:
        return None
    major, minor = capabilities.compute_capability
    return f"needs the TMA (compute capability 9.0 or higher); {capabilities.name} has {major}.{minor}"


def cp_async_unavailable(capabilities: Capabilities) -> str | None:
    """Why ``cp.async`` cannot be used on a device, None when it can."""
    if capabilities.has_cp_async:
        return None
    major, minor = capabilities.compute_capability
    return f"needs cp.async (compute capability 8.0 or higher); {capabilities.name} has {major}.{minor}"


def check_available(reason: str | None) -> None:
    """Raise ConfigError with ``reason`` unless it is None."""
    if reason is not None:
        raise ConfigError(f"{reason}; use an LSU kernel")


def check_clock(device: Device) -> None:
    """A kernel that reads the clock can run there. Raises ConfigError."""
    if not device.has_clock:
        raise ConfigError(
            f"the kernel reads the clock, which only the schedule 'timed' has (got "
            f"'{device.driver.node.schedule}'); open the device with schedule='timed'"
        )


def check_call(config: object, kind: type, **arrays: object) -> Capabilities:
    """``config`` is of ``kind``, every array a DeviceArray; gives the capabilities of their device.

    What must hold before anything else of a call can be looked at. Raises ConfigError, OperandError.
    """
    for name, array in arrays.items():
        if not isinstance(array, DeviceArray):
            raise OperandError(
                f"{name} must be a DeviceArray (got {type(array).__name__}); use device.asarray or "
                "device.wrap"
            )
    require(
        isinstance(config, kind),
        f"config must be a {kind.__name__}",
        type(config).__name__,
        "make it with this engine's throughput_config or latency_config",
    )
    return next(array for array in arrays.values() if isinstance(array, DeviceArray)).device.capabilities


def check_operands(
    instruction: str, dst: DeviceArray, src: DeviceArray, *, align: int = 16, source: str = "src"
) -> None:
    """``dst`` and ``src``: same device, dtype and size, aligned, not overlapping. Raises OperandError.

    ``instruction`` demands the alignment; ``source`` is what the caller calls ``src``: for the message.
    """
    check_alike(dst, src, source)
    if dst.nbytes != src.nbytes:
        raise OperandError(
            f"dst and {source} must have the same size (got {dst.nbytes} and {src.nbytes} bytes); "
            "slice the longer"
        )
    for name, array in (("dst", dst), (source, src)):
        check_aligned(instruction, name, array, align)
    check_apart(dst, src, source)


def check_alike(dst: DeviceArray, src: DeviceArray, source: str = "src", target: str = "dst") -> None:
    """``dst`` and ``src``, named in the message, are on one device and of one dtype. Raises OperandError."""
    if dst.device is not src.device:
        twice = ", opened twice" if dst.device.spec == src.device.spec else ""
        raise OperandError(
            f"{target} and {source} must be on one device "
            f"(got {dst.device.spec} and {src.device.spec}{twice}); copy one over"
        )
    if dst.dtype != src.dtype:
        raise OperandError(
            f"{target} and {source} must have one dtype (got {dst.dtype} and {src.dtype}); "
            "view one as the other's"
        )


def check_apart(dst: DeviceArray, src: DeviceArray, source: str = "src", target: str = "dst") -> None:
    """``dst`` and ``src`` share no byte. Raises OperandError."""
    shared = bytes_shared(dst, src.ptr, src.nbytes)
    if shared:
        raise OperandError(
            f"{target} and {source} must not overlap (they share {shared} bytes); copy through a third array"
        )


def bytes_shared(array: DeviceArray, start: int, nbytes: int) -> int:
    """Bytes that ``array`` has in common with the ``nbytes`` at address ``start``."""
    return max(0, min(array.ptr + array.nbytes, start + nbytes) - max(array.ptr, start))


def check_aligned(instruction: str, name: str, array: DeviceArray, align: int) -> None:
    """Raise OperandError unless the array's address is a multiple of ``align``."""
    if array.nbytes and array.ptr % align:
        item = array.dtype.itemsize
        step = f"{align // item} elements" if align % item == 0 else f"{align} bytes"
        raise OperandError(
            f"{name} must be {align}-byte aligned for {instruction} (got address ending in "
            f"{array.ptr % align:#x}); offset the view by a multiple of {step}"
        )


def persistent_grid(capabilities: Capabilities, num_tiles: int, ctas_per_sm: int) -> int:
    """CTAs to launch: at most ``ctas_per_sm`` per SM, no more than there are tiles, at least the one for
    the tail."""
    return max(1, min(num_tiles, capabilities.num_sms * ctas_per_sm))


def launch(
    source: CudaSource | TritonSource,
    grid: int,
    threads: int,
    args: Sequence[object],
    *,
    device_array: DeviceArray,
    shared_bytes: int,
    stream: Stream | None,
    cluster: int | None = None,
) -> LaunchInfo:
    """Compile (cached), launch on the array's device in clusters of so many CTAs, never synchronise."""
    kernel = device_array.device.compile(source).kernel()
    if isinstance(source, TritonSource):
        kernel.launch(grid, None, args, stream=stream)
    else:
        kernel.launch(grid, threads, args, stream=stream, shared_bytes=shared_bytes, cluster=cluster)
    return LaunchInfo(kernel, grid, threads, shared_bytes)
