"""Copy a box of a strided tensor of 1 to 5 dimensions with ``cp.async.bulk.tensor`` (tensor_nd.cu).

All sequences are in numpy's order, innermost last; a kernel's coordinates are innermost first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_aligned,
    check_alike,
    check_apart,
    check_available,
    check_call,
    check_whole,
    launch,
    require,
    tma_unavailable,
)
from kernels.tma.ring import RingConfig
from smfree.cuda import CudaSource, DeviceArray, OobFill, Stream, TensorMap
from smfree.cuda.tensormap import TensorMapSpec, data_type_of, encode

MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
COORDINATE_LIMIT = 2**31
"""Coordinates are s32."""
unavailable = tma_unavailable


@dataclass(frozen=True)
class TensorNdConfig(RingConfig):
    """How ``tma_tensor_nd`` is compiled and launched: ``num_stages`` boxes in flight, one thread asking.

    ``box``: elements of dst per tile and dimension. ``element_strides``: every how many-th element of src is
    taken, 1 to 8 (empty: all 1; the innermost is 1, PTX ISA "Traversal-Stride"). ``element_bytes`` 1, 2, 4
    or 8. ``fill``: what loads write for elements outside src. Raises ConfigError.
    """

    box: tuple[int, ...]
    element_bytes: int = 4
    element_strides: tuple[int, ...] = ()
    fill: OobFill = OobFill.ZERO

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("box", "element_strides"):
            given = getattr(self, name)
            require(isinstance(given, Sequence), f"{name} is a sequence", repr(given), "use (64, 64)")
            object.__setattr__(self, name, tuple(check_whole(f"{name}[{i}]", n) for i, n in enumerate(given)))
        require(
            1 <= self.rank <= MAX_RANK,
            "box has 1 to 5 dimensions",
            self.rank,
            "merge dimensions of the arrays",
        )
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        require(
            len(self.element_strides) == self.rank,
            f"element_strides has one entry per dimension of box, {self.rank}",
            len(self.element_strides),
            "leave it empty for strides of 1",
        )
        require(isinstance(self.fill, OobFill), "fill is an OobFill", repr(self.fill), "use OobFill.ZERO")
        check_whole("element_bytes", self.element_bytes)
        require(
            self.element_bytes in (1, 2, 4, 8),
            "element_bytes is 1, 2, 4 or 8",
            self.element_bytes,
            "view the arrays as such a dtype",
        )
        for at, (edge, step) in enumerate(zip(self.box, self.element_strides, strict=True)):
            require(
                1 <= step <= MAX_ELEMENT_STRIDE,
                f"element_strides[{at}] is 1 to 8",
                step,
                "skip in the kernel",
            )
            require(
                1 <= edge * step <= MAX_BOX,
                f"box[{at}] times its element stride is 1 to {MAX_BOX}",
                f"{edge} x {step}",
                "use a smaller box",
            )
        require(
            self.element_strides[-1] == 1,
            "the innermost element stride is 1",
            self.element_strides[-1],
            "make the strided dimension an outer one, of length 1 inside",
        )
        require(
            self.box[-1] * self.element_bytes % 16 == 0,
            "the box's innermost row is a multiple of 16 bytes",
            f"{self.box[-1]} x {self.element_bytes} bytes",
            f"use a multiple of {16 // self.element_bytes} elements",
        )

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.box)

    @property
    def src_box(self) -> tuple[int, ...]:
        """Elements of src that a tile's box covers."""
        return tuple(b * s for b, s in zip(self.box, self.element_strides, strict=True))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in shared memory; elements outside src count, they are filled."""
        return math.prod(self.box) * self.element_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = {"RANK": self.rank, "TILE_BYTES": self.tile_bytes, "NUM_STAGES": self.num_stages}
        return CudaSource(KERNELS / "tma" / "tensor_nd.cu", defines)


def copy(
    dst: DeviceArray,
    src: DeviceArray,
    *,
    config: TensorNdConfig,
    start: Sequence[int] = (),
    shape: Sequence[int] = (),
    strides_bytes: Sequence[int] = (),
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst[i] = src[start + i * element_strides]`` for all of dst, ``fill`` where that lies outside src.

    ``start`` (elements; default 0) may be negative; innermost a multiple of 16 bytes. ``shape`` and
    ``strides_bytes`` (of all dimensions but the innermost) see src's memory as another tensor than the dense
    array it is. dst is dense, its innermost dimension a multiple of 16 bytes: hardware is reported to store
    whole 16-byte units. Both 16-byte aligned, not overlapping. Queues on ``stream`` and returns; nothing is
    launched for an empty dst.

    Raises OperandError, ConfigError, TensorMapError.
    """
    capabilities = check_call(config, TensorNdConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_alike(dst, src)
    origin = _whole("start", start) or (0,) * config.rank
    src_shape = _whole("shape", shape) or src.shape
    strides = _whole("strides_bytes", strides_bytes) or dense_strides(src_shape, config.element_bytes)
    _check_shapes(dst, origin, src_shape, strides, config)
    for name, array in (("dst", dst), ("src", src)):
        check_aligned("cp.async.bulk.tensor", name, array, 16)
    check_apart(dst, src)
    if dst.nbytes == 0:
        return LaunchInfo(None)
    _check_inside(src, src_shape, strides)
    tiling = _tiling(dst.shape, origin, config)
    num_tiles = math.prod(int(n) for n in tiling[:, 0])
    if num_tiles >= COORDINATE_LIMIT:
        raise OperandError(f"a copy has fewer than 2^31 tiles (got {num_tiles}); use a larger box")
    dst_map = _map(dst, dst.shape, dense_strides(dst.shape, config.element_bytes), config.box)
    src_map = _map(src, src_shape, strides, config.src_box, config.element_strides, config.fill)
    return launch(
        config.source,
        config.grid_for(num_tiles, capabilities),
        32,
        (dst_map, src_map, tiling),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def _whole(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise OperandError(f"{name} is a sequence of whole numbers (got {values!r}); use int()") from None


def dense_strides(shape: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Byte strides of a dense array, of all dimensions but the innermost."""
    return tuple(math.prod(shape[at + 1 :]) * element_bytes for at in range(len(shape) - 1))


def _map(
    array: DeviceArray,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] = (),
    fill: OobFill = OobFill.ZERO,
) -> TensorMap:
    spec = TensorMapSpec(
        address=array.ptr,
        data_type=data_type_of(array.dtype),
        dims=tuple(shape)[::-1],
        strides_bytes=tuple(strides)[::-1],
        box=tuple(box)[::-1],
        element_strides=tuple(element_strides)[::-1] or (1,) * len(box),
        oob_fill=fill,
    )
    return encode(array.device.calls, spec, array.allocation)


def _tiling(dst_shape: Sequence[int], start: Sequence[int], config: TensorNdConfig) -> np.ndarray:
    """The kernel's ``Tiling``: per dimension, innermost first, tiles, first coordinate of src, steps."""
    rows = [
        (-(-extent // edge), first, edge * step, edge)
        for extent, first, edge, step in zip(
            dst_shape, start, config.box, config.element_strides, strict=True
        )
    ]
    return np.array(rows[::-1], np.int32)


def _check_shapes(
    dst: DeviceArray,
    start: tuple[int, ...],
    src_shape: tuple[int, ...],
    strides: tuple[int, ...],
    config: TensorNdConfig,
) -> None:
    rank, size = config.rank, config.element_bytes
    for name, dims in (
        ("dst", dst.shape),
        ("src", src_shape),
        ("start", start),
        ("strides_bytes", (*strides, 0)),
    ):
        if len(dims) != rank:
            raise OperandError(
                f"{name} has as many dimensions as the box, {rank} (got {len(dims)}; strides_bytes leaves "
                "out the innermost); reshape it or use another box"
            )
    if dst.dtype.itemsize != size:
        raise OperandError(
            f"the arrays' elements have config.element_bytes, {size} (got {dst.dtype}, {dst.dtype.itemsize} "
            "bytes); make a config for them"
        )
    if dst.shape[-1] * size % 16:
        raise OperandError(
            f"dst's innermost dimension must be a multiple of 16 bytes for a tensor store (got "
            f"{dst.shape[-1]} x {size} bytes); pad it"
        )
    if start[-1] * size % 16:
        raise OperandError(
            f"the innermost start must be a multiple of 16 bytes (got {start[-1]} x {size} bytes); start at "
            f"a multiple of {16 // size} elements"
        )
    for at, (first, extent, step) in enumerate(zip(start, dst.shape, config.element_strides, strict=True)):
        last = first + (extent + config.box[at]) * step
        if not -COORDINATE_LIMIT <= first <= last < COORDINATE_LIMIT:
            raise OperandError(
                f"coordinates of dimension {at} must fit 32 bits (got {first} to {last}); split the array"
            )


def _check_inside(src: DeviceArray, shape: Sequence[int], strides: Sequence[int]) -> None:
    """The tensor that shape and strides describe lies in src's memory."""
    if 0 in shape:
        raise OperandError(
            f"src must not be empty, a tensor map cannot be (got shape {tuple(shape)}); fill dst"
        )
    item = src.dtype.itemsize
    end = sum((n - 1) * s for n, s in zip(shape, (*strides, item), strict=True)) + item
    if end > src.nbytes or min(strides, default=0) < 0:
        raise OperandError(
            f"shape {tuple(shape)} with strides {tuple(strides)} bytes must lie in src (it ends {end} bytes "
            f"in, src has {src.nbytes}); make it smaller"
        )
