"""What a launch must satisfy, checked before the driver sees it, and the configuration the driver gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from smfree.cuda.capabilities import Capabilities
from smfree.cuda.errors import LaunchError
from smfree.cuda.image import FunctionFacts

Dims = tuple[int, int, int]
DEFAULT_SHARED_BYTES = 48 * 1024
PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16


def as_dims(value: int | Sequence[int], what: str) -> Dims:
    """``4``, ``(4,)``, ``(4, 2)`` or ``(4, 2, 1)`` as three numbers. Raises LaunchError."""
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim):
        parts = tuple(value)
    whole = all(isinstance(p, Integral) and not isinstance(p, bool) for p in parts)
    if not whole or not 1 <= len(parts) <= 3:
        raise LaunchError(f"{what} is one to three integers (got {value!r})")
    x, y, z = (*(int(p) for p in parts), 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block in CTAs and threads, cluster in CTAs (None: not a cluster launch), dynamic shared
    bytes."""

    grid: Dims
    block: Dims
    shared_bytes: int = 0
    cluster: Dims | None = None
    cooperative: bool = False
    programmatic: bool = False

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return math.prod(self.block)

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return math.prod(self.grid)

    def validate(self, facts: FunctionFacts, device: Capabilities) -> None:
        """Check against the kernel and the device. Raises LaunchError with rule, value and remedy."""
        name = facts.name
        for axis, got, most in zip("xyz", self.grid, device.max_grid, strict=True):
            if got == 0:
                raise LaunchError(
                    f"{name}: the grid {self.grid} has no CTA; do not launch when there is no work"
                )
            if not 0 < got <= most:
                raise LaunchError(
                    f"{name}: grid.{axis} is 1 to {most} (got {got}); loop inside the kernel instead"
                )
        self._check_block(facts, device)
        self._check_shared(facts, device)
        if self.cooperative and not device.cooperative_launch:
            raise LaunchError(f"{name}: {device.name} has no cooperative launch; use several kernels instead")
        if self.programmatic and not device.has_programmatic_launch:
            raise LaunchError(
                f"{name}: programmatic dependent launch needs compute capability 9.0 (this device has "
                f"{device.compute_capability[0]}.{device.compute_capability[1]}); launch without it"
            )
        self._check_cluster(facts, device)

    def _check_block(self, facts: FunctionFacts, device: Capabilities) -> None:
        name = facts.name
        for axis, got, most in zip("xyz", self.block, device.max_block, strict=True):
            if not 0 < got <= most:
                raise LaunchError(f"{name}: block.{axis} is 1 to {most} threads (got {got})")
        if facts.required_block is not None and self.block != facts.required_block:
            raise LaunchError(
                f"{name} is compiled for blocks of exactly {facts.required_block} (got {self.block})"
            )
        most = min(device.max_threads_per_block, facts.max_threads or device.max_threads_per_block)
        if self.threads > most:
            bound = "__launch_bounds__" if facts.max_threads == most else "the device"
            raise LaunchError(f"{name}: {bound} allows {most} threads per CTA (got {self.threads})")
        warps = -(-self.threads // 32)
        needed = warps * (-(-facts.registers * 32 // 256) * 256)
        if needed > device.registers_per_block:
            raise LaunchError(
                f"{name}: {self.threads} threads of {facts.registers} registers need {needed} "
                "registers, a CTA has "
                f"{device.registers_per_block}; use fewer threads or __launch_bounds__"
            )

    def _check_shared(self, facts: FunctionFacts, device: Capabilities) -> None:
        if not isinstance(self.shared_bytes, Integral):
            raise LaunchError(
                f"{facts.name}: shared_bytes is a whole number of bytes (got {self.shared_bytes!r}); "
                "round it up"
            )
        total = self.shared_bytes + facts.static_shared_bytes
        if self.shared_bytes < 0 or total > device.max_shared_bytes_per_block:
            raise LaunchError(
                f"{facts.name}: a CTA has at most {device.max_shared_bytes_per_block} bytes of "
                "shared memory on "
                f"{device.name} (asked for {self.shared_bytes} dynamic + "
                f"{facts.static_shared_bytes} static = "
                f"{total}); use a smaller tile or fewer stages"
            )

    def _check_cluster(self, facts: FunctionFacts, device: Capabilities) -> None:
        name, compiled = facts.name, facts.cluster_dims
        cluster = self.cluster or compiled
        if cluster is None:
            return
        if compiled is not None and self.cluster is not None and self.cluster != compiled:
            raise LaunchError(
                f"{name} is compiled for clusters of {compiled}, the launch asks for "
                f"{self.cluster}; leave cluster out"
            )
        if not device.has_clusters:
            raise LaunchError(
                f"{name}: {device.name} has no clusters (compute capability 9.0); launch without"
            )
        size = math.prod(cluster)
        if min(cluster) < 1 or size > MAX_CLUSTER:
            raise LaunchError(f"{name}: a cluster has 1 to {MAX_CLUSTER} CTAs (got {cluster}, {size} CTAs)")
        if any(g % c for g, c in zip(self.grid, cluster, strict=True)):
            raise LaunchError(
                f"{name}: the grid {self.grid} is not divisible by the cluster {cluster}; round "
                "the grid up per axis"
            )

    def config(self, driver: Any, stream_handle: Any) -> Any:
        """The ``CUlaunchConfig``. The attribute list is assigned as a whole: appending does not reach C."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.shared_bytes
        config.hStream = stream_handle
        attributes = []
        ids = driver.CUlaunchAttributeID
        if self.cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = self.cluster
            attributes.append(attribute)
        if self.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if self.programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config
