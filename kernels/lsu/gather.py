"""Read elements that are no neighbours: by index, or a stride apart (gather.cu)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_aligned,
    check_alike,
    check_apart,
    check_call,
    check_ctas,
    check_threads,
    check_unroll,
    check_whole,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, DeviceArray, Stream

ELEMENT_BYTES = (4, 8, 16)


@dataclass(frozen=True)
class GatherConfig:
    """How ``lsu_gather`` is compiled and launched: elements of ``element_bytes``, ``unroll`` of them in
    flight per thread. ``indexed`` follows from the function called. Raises ConfigError."""

    element_bytes: int = 4
    threads: int = 256
    unroll: int = 4
    ctas_per_sm: int = 1
    indexed: bool = True

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("element_bytes", self.element_bytes)
        sizes = "4, 8 or 16"
        require(
            self.element_bytes in ELEMENT_BYTES,
            f"element_bytes must be {sizes}",
            self.element_bytes,
            "move wider elements as several",
        )
        check_threads(self.threads)
        check_unroll(self.unroll)
        check_ctas(self.ctas_per_sm)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes of elements that the CTA has asked for before it uses the first."""
        return self.threads * self.unroll * self.element_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "gather.cu",
            {
                "THREADS": self.threads,
                "UNROLL": self.unroll,
                "ELEMENT_BYTES": self.element_bytes,
                "INDEXED": self.indexed,
            },
        )


def gather(
    dst: DeviceArray,
    src: DeviceArray,
    index: DeviceArray,
    *,
    config: GatherConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst[i] = src[index[i]]`` over elements of ``config.element_bytes``.

    ``dst`` and ``src``: one dtype, aligned to an element, whole elements, ``dst`` overlapping neither ``src``
    nor ``index``. ``index``: uint32, one per element of ``dst``, each below the elements of ``src`` (the
    kernel does not look). Queues on ``stream`` and returns; nothing is launched for zero elements.

    Raises OperandError, ConfigError.
    """
    check_call(config, GatherConfig, src=src, dst=dst, index=index)
    elements = _elements(dst, src, config)
    if index.dtype != np.uint32 or index.nbytes != 4 * elements:
        raise OperandError(
            f"index must be {elements} uint32, one per element of dst (got {index.nbytes // 4} of "
            f"{index.dtype}); make it with dtype=np.uint32"
        )
    if index.device is not src.device:
        raise OperandError(
            f"index and src must be on one device (got {index.device.spec} and {src.device.spec}); "
            "copy one over"
        )
    check_aligned("4-byte loads", "index", index, 4)
    check_apart(dst, index, "index")
    return _launch(dst, src, elements, config, stream, index=index)


def strided(
    dst: DeviceArray, src: DeviceArray, stride: int, *, config: GatherConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst[i] = src[i * stride]`` over elements of ``config.element_bytes``; ``src`` must reach that far.

    Otherwise as :func:`gather`. Raises OperandError, ConfigError.
    """
    check_call(config, GatherConfig, src=src, dst=dst)
    stride = check_whole("stride", stride)
    require(stride >= 1, "stride must be at least 1 element", stride, "reverse the array on the host")
    elements = _elements(dst, src, config)
    reach = (elements - 1) * stride + 1
    held = src.nbytes // config.element_bytes
    if elements and reach > held:
        raise OperandError(
            f"{elements} elements, {stride} apart, need {reach} elements of src (got {held}); "
            "shorten dst or the stride"
        )
    return _launch(dst, src, elements, config, stream, stride=stride)


def _elements(dst: DeviceArray, src: DeviceArray, config: GatherConfig) -> int:
    check_alike(dst, src)
    for name, array in (("dst", dst), ("src", src)):
        check_aligned(f"{config.element_bytes}-byte loads and stores", name, array, config.element_bytes)
        if array.nbytes % config.element_bytes:
            raise OperandError(
                f"{name} must be whole elements of {config.element_bytes} bytes (got {array.nbytes} bytes); "
                "use smaller elements"
            )
    check_apart(dst, src)
    return dst.nbytes // config.element_bytes


def _launch(
    dst: DeviceArray,
    src: DeviceArray,
    elements: int,
    config: GatherConfig,
    stream: Stream | None,
    *,
    index: DeviceArray | None = None,
    stride: int = 0,
) -> LaunchInfo:
    if elements == 0:
        return LaunchInfo(None)
    batches = -(-elements // (config.threads * config.unroll))
    grid = persistent_grid(src.device.capabilities, batches, config.ctas_per_sm)
    args = (dst, src, src if index is None else index, np.uint64(stride), np.uint64(elements))
    source = replace(config, indexed=index is not None).source
    return launch(source, grid, config.threads, args, device_array=src, shared_bytes=0, stream=stream)
