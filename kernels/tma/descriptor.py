"""Copy matrices of different shapes in one launch, through tensor maps in device memory (descriptor.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_operands,
    launch,
    require,
    tma_unavailable,
)
from kernels.tma.ring import BoxConfig
from smfree.cuda import CudaSource, Device, DeviceArray, Stream
from smfree.cuda.tensormap import MAP_BYTES

GROUP = np.dtype([("dst", np.uint64), ("src", np.uint64), ("num_rows", np.uint32), ("num_cols", np.uint32)])
"""The kernel's ``Group``."""
unavailable = tma_unavailable


class Maps(Enum):
    """Who makes the tensor maps."""

    FROM_HOST = "host"
    FROM_DEVICE = "device"


@dataclass(frozen=True, kw_only=True)
class DescriptorConfig(BoxConfig):
    """How ``tma_descriptor`` is compiled and launched; elements of 4 bytes. Raises ConfigError."""

    box_rows: int = 32
    box_cols: int = 32
    maps: Maps = Maps.FROM_DEVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.maps, Maps), "maps is a Maps", self.maps, "use Maps.FROM_DEVICE")
        require(
            self.element_bytes == 4, "element_bytes is 4", self.element_bytes, "view the matrices as uint32"
        )

    @property
    def static_shared_bytes(self) -> int:
        """The barriers and the two maps being edited."""
        edited = 2 * MAP_BYTES if self.maps is Maps.FROM_DEVICE else 0
        return edited + super().static_shared_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = {
            "MAPS": self.maps.name,
            "BOX_ROWS": self.box_rows,
            "BOX_COLS": self.box_cols,
            "NUM_STAGES": self.num_stages,
        }
        return CudaSource(KERNELS / "tma" / "descriptor.cu", defines)


@dataclass(frozen=True)
class Groups:
    """Pairs of matrices on one device, ready to be copied: ``table`` of :data:`GROUP`, and the tensor maps,
    (slots, 2, 128) bytes. ``arrays`` keeps the matrices alive."""

    table: DeviceArray
    maps: DeviceArray
    arrays: tuple[DeviceArray, ...]
    config: DescriptorConfig
    grid: int


def prepare(pairs: Sequence[tuple[DeviceArray, DeviceArray]], *, config: DescriptorConfig) -> Groups | None:
    """The table of ``pairs`` (dst, src) and memory for the maps, encoded here under Maps.FROM_HOST.

    In each pair both have one shape (rows, cols) and dtype of 4 bytes, cols a multiple of 4, both 16-byte
    aligned, not overlapping; all on one device. Empty matrices are left out; None if nothing is left.
    Raises OperandError, ConfigError.
    """
    live = [(dst, src) for dst, src in pairs if _check_pair(dst, src, config) and src.size]
    if not live:
        return None
    device = live[0][0].device
    if any(dst.device is not device for dst, _ in live):
        raise OperandError("all matrices of one launch are on one device; launch once per device")
    rows = [(dst.ptr, src.ptr, *src.shape) for dst, src in live]
    grid = config.grid_for(len(live), device.capabilities)
    box = (config.box_rows, config.box_cols)
    maps = device.empty((grid, 2, MAP_BYTES))
    if config.maps is Maps.FROM_HOST:
        encoded = [device.tensor_map(array, box).tobytes() for pair in live for array in pair]
        maps = device.asarray(np.frombuffer(b"".join(encoded), np.uint8).reshape(-1, 2, MAP_BYTES))
    arrays = tuple(array for pair in live for array in pair)
    return Groups(device.asarray(np.array(rows, GROUP)), maps, arrays, config, grid)


def copy(groups: Groups | None, *, stream: Stream | None = None) -> LaunchInfo:
    """Copy every src to its dst in one launch. ``groups`` may be used again; two launches with maps made on
    the device may not overlap in time, they write the same slots. Queues on ``stream`` and returns.
    """
    if groups is None:
        return LaunchInfo(None)
    config, device = groups.config, groups.table.device
    return launch(
        config.source,
        groups.grid,
        32,
        (_template(groups, device), groups.maps, groups.table, np.uint32(groups.table.size)),
        device_array=groups.table,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def _template(groups: Groups, device: Device) -> object:
    """A map whose box is the config's; address, dimensions and stride are replaced."""
    config = groups.config
    return device.tensor_map(groups.arrays[0], (config.box_rows, config.box_cols))


def _check_pair(dst: DeviceArray, src: DeviceArray, config: DescriptorConfig) -> bool:
    check_available(unavailable(check_call(config, DescriptorConfig, src=src, dst=dst)))
    check_operands("cp.async.bulk.tensor", dst, src)
    for name, array in (("src", src), ("dst", dst)):
        config.check_rows(name, array)
    if dst.shape != src.shape:
        raise OperandError(f"dst has src's shape {src.shape} (got {dst.shape}); reshape it")
    return True
