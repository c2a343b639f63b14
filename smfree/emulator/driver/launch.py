"""Launches: every rule is checked before anything is queued; and the occupancy queries."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from smfree.emulator.driver.base import entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.modules import LoadedFunction, ModuleCalls
from smfree.emulator.driver.params import pack
from smfree.emulator.node import LaunchOutcome, LaunchRecord
from smfree.emulator.occupancy import Occupancy, footprint, occupancy, resident_clusters
from smfree.emulator.streams import Operation, Room, Stream

Dim3 = tuple[int, int, int]
_AXES = "xyz"
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK_Z = 64
_LARGEST_CLUSTER = 16


class Shape(NamedTuple):
    """What a launch asks for; ``cluster`` is None where neither attribute nor kernel speak of one."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    shared_bytes: int
    cooperative: bool = False

    @property
    def cluster_ctas(self) -> int:
        return prod(self.cluster or (1,))

    def __str__(self) -> str:
        cluster = f" cluster {self.cluster}" if self.cluster_ctas > 1 else ""
        return f"grid {self.grid} block {self.block}{cluster}, {self.shared_bytes} bytes dynamic shared"


class _Attributes(NamedTuple):
    cluster: Dim3 | None = None
    cooperative: bool = False


class LaunchCalls(ModuleCalls):
    """cuLaunch* and cuOccupancy*."""

    @entry(0)
    def cuLaunchKernel(
        self,
        f: Any,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: Any,
        kernelParams: Any,
        extra: Any,
    ) -> None:
        function, stream = self._function(f), self._stream(hStream)
        grid = int(gridDimX), int(gridDimY), int(gridDimZ)
        block = int(blockDimX), int(blockDimY), int(blockDimZ)
        shape = _check_shape(function, grid, block, int(sharedMemBytes), _Attributes())
        self._launch(function, shape, stream, pack(function.kernel, kernelParams, extra))

    @entry(0)
    def cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
        if config is None:
            raise invalid("config is None")
        function, stream = self._function(f), self._stream(config.hStream)
        self._launch(
            function, _shape_of(function, config), stream, pack(function.kernel, kernelParams, extra)
        )

    @entry(0)
    def cuLaunchCooperativeKernel(
        self,
        f: Any,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: Any,
        kernelParams: Any,
    ) -> None:
        function, stream = self._function(f), self._stream(hStream)
        grid = int(gridDimX), int(gridDimY), int(gridDimZ)
        block = int(blockDimX), int(blockDimY), int(blockDimZ)
        shape = _check_shape(function, grid, block, int(sharedMemBytes), _Attributes(cooperative=True))
        self._launch(function, shape, stream, pack(function.kernel, kernelParams, 0))

    def _launch(self, function: LoadedFunction, shape: Shape, stream: Stream, params: bytes) -> None:
        context, node = function.context, self.node
        device = context.device
        if stream.context is not context:
            raise invalid_stream(function, stream)
        if shape.cooperative:
            self._check_resident(function, shape)
        kernel, symbols = function.kernel, function.module.addresses
        label = f"kernel {function.name} ({shape}) on {stream.name}, launched at {self._caller()}"

        def begin(start_s: float) -> LaunchOutcome:
            return node.executor(
                device,
                kernel,
                params,
                shape.grid,
                shape.block,
                shape.cluster,
                shape.shared_bytes,
                schedule=node.schedule,
                seed=node.seed,
                start_s=start_s,
                module_symbols=symbols,
                registers=function.registers,
                context=context,
            )

        def ended(operation: Operation) -> None:
            outcome: Any = operation.activity
            outcome.counters.launches = 1
            device.counters += outcome.counters
            node.findings.extend(outcome.findings)
            device.last_launch = LaunchRecord(
                kernel=function.name,
                grid=shape.grid,
                block=shape.block,
                cluster=shape.cluster or (1, 1, 1),
                shared_bytes=shape.shared_bytes,
                start_s=operation.start_s,
                end_s=operation.end_s,
                cycles=outcome.cycles,
                counters=outcome.counters,
                ctas_per_sm=outcome.ctas_per_sm,
                findings=tuple(outcome.findings),
            )

        self._submit(
            stream,
            label,
            begin=begin,
            ended=ended,
            room=_room(function, shape),
            gap_s=device.profile.host.kernel_gap_us * 1e-6,
            host_cost_s=self._launch_cost_s(device),
        )

    def _check_resident(self, function: LoadedFunction, shape: Shape) -> None:
        found = _occupancy(function, prod(shape.block), shape.shared_bytes, "a cooperative launch")
        spec, size = function.module.device.profile.device, shape.cluster_ctas
        capacity = resident_clusters(spec, found.ctas, size) * size
        if prod(shape.grid) > capacity:
            raise Refusal(
                CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                f"kernel {function.name}: {prod(shape.grid)} CTAs must be resident at once, {capacity} fit "
                f"({found.ctas} per SM: {found.limits}); launch at most that many",
            )

    # ----------------------------------------------------------------------------------------- occupancy

    @entry(1)
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, func: Any, blockSize: int, dynamicSMemSize: int
    ) -> int:
        return self._active_blocks(func, blockSize, dynamicSMemSize)

    @entry(1)
    def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        self, func: Any, blockSize: int, dynamicSMemSize: int, flags: int
    ) -> int:
        if int(flags) not in (0, 1):
            raise invalid(f"flags must be CU_OCCUPANCY_DEFAULT or _DISABLE_CACHING_OVERRIDE, got {flags}")
        return self._active_blocks(func, blockSize, dynamicSMemSize)

    def _active_blocks(self, func: Any, threads: int, dynamic_bytes: int) -> int:
        if threads < 1 or dynamic_bytes < 0:
            raise invalid(f"blockSize must be positive and dynamicSMemSize not negative, got {threads}")
        return _occupancy(self._function(func), int(threads), int(dynamic_bytes), "occupancy").ctas

    @entry(1)
    def cuOccupancyAvailableDynamicSMemPerBlock(self, func: Any, numBlocks: int, blockSize: int) -> int:
        function = self._function(func)
        spec = function.module.device.profile.device
        if numBlocks < 1 or blockSize < 1:
            raise invalid(f"numBlocks and blockSize must be positive, got {numBlocks} and {blockSize}")
        share = spec.shared_bytes_per_sm // numBlocks // 128 * 128 - spec.reserved_shared_bytes_per_block
        most = min(share, spec.shared_bytes_per_block_optin) - function.kernel.static_shared_bytes
        return max(0, most)

    @entry(1)
    def cuOccupancyMaxPotentialClusterSize(self, func: Any, config: Any) -> int:
        """The compiled-in size, or the largest one that may be launched and fits; ``config``'s is ignored."""
        function = self._function(func)
        _needs_clusters(function)
        if function.kernel.cluster_dims is not None:
            return prod(function.kernel.cluster_dims)
        block = int(config.blockDimX), int(config.blockDimY), int(config.blockDimZ)
        found = _occupancy(function, prod(block), int(config.sharedMemBytes), "occupancy")
        return min(_largest_cluster(function), found.ctas * function.module.device.profile.device.num_sms)

    @entry(1)
    def cuOccupancyMaxActiveClusters(self, func: Any, config: Any) -> int:
        """As many as a launch keeps resident: an upper bound, see resident_clusters."""
        function = self._function(func)
        _needs_clusters(function)
        shape = _shape_of(function, config)
        if shape.cluster is None:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE,
                f"kernel {function.name} is not compiled for a cluster size; give the attribute of the "
                "cluster dimension",
            )
        found = _occupancy(function, prod(shape.block), shape.shared_bytes, "occupancy")
        return resident_clusters(function.module.device.profile.device, found.ctas, shape.cluster_ctas)


def _room(function: LoadedFunction, shape: Shape) -> Room:
    """What the kernel needs of the SMs before it may start: one cluster, or all of a cooperative launch."""
    device = function.context.device
    spec, residents = device.profile.device, device.residents
    shared_bytes = (
        function.kernel.dynamic_shared_offset + shape.shared_bytes
        if shape.shared_bytes
        else function.kernel.static_shared_bytes
    )
    threads, registers = prod(shape.block), function.registers or None
    need = footprint(spec, threads, registers, shared_bytes)
    per_sm = occupancy(spec, threads, registers, shared_bytes).ctas
    ctas = prod(shape.grid) if shape.cooperative else shape.cluster_ctas
    return Room(
        free=lambda: residents.admits(need, per_sm, ctas),
        since_s=lambda: residents.freed / (spec.sm_clock_mhz * 1e6),
        describe=lambda: residents.crowd(ctas, shape.cooperative),
    )


def _occupancy(function: LoadedFunction, threads: int, dynamic_bytes: int, purpose: str) -> Occupancy:
    registers = function.needs_registers(purpose)
    shared_bytes = function.kernel.static_shared_bytes + dynamic_bytes
    return occupancy(function.module.device.profile.device, threads, registers, shared_bytes)


def invalid_stream(function: LoadedFunction, stream: Stream) -> Refusal:
    """The stream and the function belong to different contexts."""
    return Refusal(
        CUresult.CUDA_ERROR_INVALID_HANDLE,
        f"kernel {function.name} was loaded on device {function.module.device.ordinal}, {stream.name} "
        f"belongs to device {stream.context.ordinal}; load the module in the stream's context",
    )


def _needs_clusters(function: LoadedFunction) -> None:
    spec = function.module.device.profile.device
    if spec.compute_major < 9:
        raise unsupported(f"{spec.name} (sm_{spec.compute_major}{spec.compute_minor}) has no clusters")


def _shape_of(function: LoadedFunction, config: Any) -> Shape:
    grid = int(config.gridDimX), int(config.gridDimY), int(config.gridDimZ)
    block = int(config.blockDimX), int(config.blockDimY), int(config.blockDimZ)
    return _check_shape(function, grid, block, int(config.sharedMemBytes), _attributes(config))


def _attributes(config: Any) -> _Attributes:
    """The launch attributes the emulator knows; hints are accepted, everything else is refused by name."""
    attrs, count = config.attrs or [], int(config.numAttrs)
    if count > len(attrs):
        raise invalid(
            f"numAttrs is {count} but attrs has {len(attrs)} entries; assign the whole list to attrs "
            "(appending to it does not reach the C struct)"
        )
    found = _Attributes()
    for attribute in attrs[:count]:
        name = attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_")
        match name:
            case "CLUSTER_DIMENSION":
                dims = attribute.value.clusterDim
                found = found._replace(cluster=(int(dims.x), int(dims.y), int(dims.z)))
            case "COOPERATIVE":
                found = found._replace(cooperative=bool(attribute.value.cooperative))
            case (
                "PROGRAMMATIC_STREAM_SERIALIZATION"  # permits an overlap; in full order is one legal outcome
                | "IGNORE"
                | "PRIORITY"
                | "SYNCHRONIZATION_POLICY"
                | "CLUSTER_SCHEDULING_POLICY_PREFERENCE"
                | "PREFERRED_SHARED_MEMORY_CARVEOUT"
            ):
                continue
            case _:
                raise unsupported(f"launch attribute {attribute.id.name} is not emulated")
    return found


def _check_shape(
    function: LoadedFunction, grid: Dim3, block: Dim3, dynamic_bytes: int, attributes: _Attributes
) -> Shape:
    """Every rule on a launch's dimensions, shared memory and cluster."""
    kernel, spec = function.kernel, function.module.device.profile.device
    for axis, size, limit in zip(_AXES, grid, _MAX_GRID, strict=True):
        if not 1 <= size <= limit:
            raise invalid(f"kernel {function.name}: gridDim.{axis} must be 1..{limit}, got {size}")
    block_limits = (spec.max_threads_per_block, spec.max_threads_per_block, _MAX_BLOCK_Z)
    for axis, size, limit in zip(_AXES, block, block_limits, strict=True):
        if not 1 <= size <= limit:
            raise invalid(f"kernel {function.name}: blockDim.{axis} must be 1..{limit}, got {size}")
    threads = prod(block)
    if threads > spec.max_threads_per_block:
        raise invalid(
            f"kernel {function.name}: {threads} threads per block, the limit is {spec.max_threads_per_block}"
        )
    if threads > function.max_threads or (kernel.reqntid is not None and block != kernel.reqntid):
        bound = kernel.reqntid or kernel.maxntid
        rule = "exactly" if kernel.reqntid else "at most"
        raise invalid(f"kernel {function.name} was compiled for {rule} {bound} threads, not {block}")
    _check_registers(function, threads)
    _check_shared(function, dynamic_bytes)
    cluster = _check_cluster(function, grid, attributes.cluster)
    return Shape(grid, block, cluster, dynamic_bytes, attributes.cooperative)


def _check_registers(function: LoadedFunction, threads: int) -> None:
    if function.registers is None:
        return
    spec = function.module.device.profile.device
    if occupancy(spec, threads, function.registers, 0).by_registers == 0:
        raise Refusal(
            CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            f"kernel {function.name}: {threads} threads of {function.registers} registers exceed the block's "
            f"{spec.registers_per_block}; use fewer threads or __launch_bounds__",
        )


def _check_shared(function: LoadedFunction, dynamic_bytes: int) -> None:
    if 0 <= dynamic_bytes <= function.max_dynamic_shared_bytes:
        return
    optin = function.module.device.profile.device.shared_bytes_per_block_optin
    most = optin - function.kernel.static_shared_bytes
    if dynamic_bytes > most:
        remedy = f"this device's limit for the kernel is {most} bytes"
    else:
        remedy = "set CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES with cuFuncSetAttribute first"
    raise invalid(
        f"kernel {function.name}: {dynamic_bytes} bytes of dynamic shared memory, "
        f"{function.max_dynamic_shared_bytes} are allowed; {remedy}"
    )


def _largest_cluster(function: LoadedFunction) -> int:
    """CTAs of the largest cluster that this function may be launched with."""
    spec = function.module.device.profile.device
    largest = _LARGEST_CLUSTER if function.non_portable_cluster else spec.portable_cluster_ctas
    return min(largest, function.kernel.maxclusterrank or largest)


def _check_cluster(function: LoadedFunction, grid: Dim3, asked: Dim3 | None) -> Dim3 | None:
    kernel, spec = function.kernel, function.module.device.profile.device
    compiled = kernel.cluster_dims
    if asked is not None and compiled is not None and asked != compiled:
        raise invalid(
            f"kernel {function.name} was compiled for clusters of {compiled}, the launch attribute asks for "
            f"{asked}; leave the attribute out or make them equal"
        )
    cluster = asked or compiled
    if cluster is None:
        if kernel.explicit_cluster:
            raise invalid(f"kernel {function.name} must be launched with a cluster dimension attribute")
        return None
    if min(cluster) < 1:
        raise invalid(f"kernel {function.name}: cluster dimensions must be positive, got {cluster}")
    size = prod(cluster)
    if size > 1:
        _needs_clusters(function)
    largest = _largest_cluster(function)
    if size > max(1, largest):
        raise Refusal(
            CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE,
            f"kernel {function.name}: a cluster of {cluster} has {size} CTAs, at most {largest} are allowed "
            f"(above {spec.portable_cluster_ctas} needs CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)",
        )
    for axis, ctas, width in zip(_AXES, grid, cluster, strict=True):
        if ctas % width:
            raise invalid(
                f"kernel {function.name}: grid {grid} is not divisible by cluster {cluster} in {axis} "
                f"({ctas} % {width} = {ctas % width}); round the grid up"
            )
    return cluster
