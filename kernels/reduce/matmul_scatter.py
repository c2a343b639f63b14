"""A matrix product summed over the ranks, its rows scattered as its tiles are made (matmul_scatter.cu)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import (
    MAX_STAGES,
    OperandError,
    check_aligned,
    check_apart,
    check_whole,
    cp_async_unavailable,
    require,
)
from kernels.ipc.exchange import agree
from kernels.ipc.shards import given_sources
from kernels.reduce.config import KernelWay, ReduceConfig
from kernels.reduce.elements import Element
from kernels.reduce.message import check_outside, share_of
from kernels.reduce.ways import ReduceInfo
from smfree.cuda import DeviceArray

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace

__all__ = ["MatmulScatterConfig", "matmul_scatter", "prepare", "rows_of", "throughput_config", "unavailable"]

BLOCK = 64
"""Rows, columns and depth of what a stage is good for."""
STAGE_BYTES = 2 * BLOCK * BLOCK * 2
TILE_BYTES = BLOCK * BLOCK * 4
THREADS = 128


@dataclass(frozen=True, kw_only=True)
class MatmulScatterConfig(ReduceConfig):
    """``ctas`` CTAs, a tile of every rank's rows each in a turn, with ``num_stages`` of blocks of A and B.
    Raises ConfigError."""

    file: ClassVar[str] = "matmul_scatter.cu"

    threads: int = field(default=THREADS, init=False)
    unroll: int = field(default=1, init=False)
    num_stages: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = check_whole("num_stages", self.num_stages)
        require(2 <= stages <= MAX_STAGES, f"num_stages must be 2 to {MAX_STAGES}", stages, "use 3")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages."""
        return self.num_stages * STAGE_BYTES

    def scratch_for(self, world_size: int) -> int:
        """Scratch memory per rank: a tile from every rank on each of two sides, per CTA."""
        return self.ctas * 2 * world_size * TILE_BYTES

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes of A and B that an SM with one CTA has asked for before it uses the first."""
        return (self.num_stages - 1) * STAGE_BYTES

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {"THREADS": self.threads, "NUM_STAGES": self.num_stages}


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """The operands of the local ranks: a (m, k_r), b (n, k_r), dst (rows_of(m, r), n)."""

    workspace: Workspace
    m: int
    n: int
    a: Mapping[int, DeviceArray]
    b: Mapping[int, DeviceArray]
    dst: Mapping[int, DeviceArray]
    element: Element = Element.F32


def rows_of(m: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows of C that ``rank`` owns: the first, and the one behind the last."""
    return share_of(m, world_size, rank)


def throughput_config(workspace: Workspace, nbytes: int) -> MatmulScatterConfig:
    """For a C of ``nbytes``: a CTA for every tile of a rank's rows, as far as there are SMs and scratch
    memory."""
    group = workspace.group
    tiles = -(-nbytes // group.world_size // TILE_BYTES)
    room = workspace.scratch.nbytes // MatmulScatterConfig(ctas=1).scratch_for(group.world_size)
    most = min(group.capabilities.num_sms, workspace.channels, room, tiles)
    return MatmulScatterConfig(ctas=max(1, most))


def unavailable(group: Group) -> str | None:
    """Why the group cannot do it, None when it can."""
    return group.direct_reason or cp_async_unavailable(group.capabilities)


def matmul_scatter(
    workspace: Workspace,
    dst: Sequence[DeviceArray],
    a: Sequence[DeviceArray],
    b: Sequence[DeviceArray],
    *,
    config: MatmulScatterConfig | None = None,
) -> ReduceInfo:
    """Queue C = sum over all ranks of ``a @ b.T``, the rows of rank r (:func:`rows_of`) to its ``dst``, and
    return; ``group.wait`` waits for it.

    One array per local rank, in order of ``group.members``: ``a`` (m, k) and ``b`` (n, k) are bfloat16, given
    as uint16 (:func:`kernels.mbarrier.matmul.to_bfloat16`), 16-byte aligned, k a positive multiple of 8 that
    may differ from rank to rank; ``dst`` (rows, n) is float32, 8-byte aligned, overlapping neither. All
    row-major. What travels is float32; terms are added in order of rank. ``config`` None:
    :func:`throughput_config`. The operands are used in the order of ``workspace.stream(rank)``.

    Collective: every rank calls it with the same m, n and configuration, in the same order of calls of the
    workspace. Raises OperandError, ConfigError, GroupError before anything is queued.
    """
    product, chosen = _check(workspace, dst, a, b, config)
    what = f"matmul_scatter of {product.m} x {product.n}"
    if workspace.compare_calls:
        agree(workspace.group.exchange, "a matmul_scatter", f"{what}, {chosen}")
    launches = _KERNEL.run(product, chosen, what) if product.m * product.n else ()
    return ReduceInfo("fused", workspace.group.path, product.element, launches)


def prepare(
    workspace: Workspace,
    dst: Sequence[DeviceArray],
    a: Sequence[DeviceArray],
    b: Sequence[DeviceArray],
    *,
    config: MatmulScatterConfig | None = None,
) -> None:
    """Do what :func:`matmul_scatter` with these arguments does only the first time: compile and load.

    Collective. For before a capture or a timed region; raises as :func:`matmul_scatter`.
    """
    product, chosen = _check(workspace, dst, a, b, config)
    for member in workspace.group.members:
        _KERNEL.prepare(member, product, chosen)


def _check(
    workspace: Workspace,
    dst: Sequence[DeviceArray],
    a: Sequence[DeviceArray],
    b: Sequence[DeviceArray],
    config: MatmulScatterConfig | None,
) -> tuple[Product, MatmulScatterConfig]:
    """The operands, and the configuration that will be used."""
    workspace.check()
    group = workspace.group
    reason = unavailable(group)
    require(reason is None, "matmul_scatter needs GPUs that reach each other", reason, "use others")
    product = _product(workspace, dst, a, b)
    nbytes = 4 * product.m * product.n
    chosen = throughput_config(workspace, nbytes) if config is None else config
    require(
        type(chosen) is MatmulScatterConfig,
        "the config of matmul_scatter is a MatmulScatterConfig",
        type(chosen).__name__,
        "leave it out for the default",
    )
    return product, chosen


def _product(
    workspace: Workspace, dst: Sequence[DeviceArray], a: Sequence[DeviceArray], b: Sequence[DeviceArray]
) -> Product:
    """Raises OperandError unless dtypes, shapes and alignment fit."""
    group = workspace.group
    given = [given_sources(group, arrays, name) for name, arrays in (("a", a), ("b", b), ("dst", dst))]
    if any(arrays is None for arrays in given):
        raise OperandError("a matmul_scatter has a, b and dst on every rank (got None); give all three")
    all_a, all_b, all_dst = (arrays or {} for arrays in given)
    first = group.members[0].rank
    for rank, arrays in all_a.items():
        _check_matrices(group, rank, arrays, all_b[rank], all_dst[rank])
        for name, array in (("a", arrays), ("b", all_b[rank]), ("dst", all_dst[rank])):
            check_outside(workspace, rank, f"rank {rank}'s {name}", array)
        m, n = arrays.shape[0], all_b[rank].shape[0]
        if (m, n) != (all_a[first].shape[0], all_b[first].shape[0]):
            raise OperandError(
                f"a and b have the same m and n on every rank (got {m} and {n} on rank {rank}, "
                f"{all_a[first].shape[0]} and {all_b[first].shape[0]} on rank {first}); only k may differ"
            )
    m, n = all_a[first].shape[0], all_b[first].shape[0]
    return Product(workspace=workspace, m=m, n=n, a=all_a, b=all_b, dst=all_dst)


def _check_matrices(group: Group, rank: int, a: DeviceArray, b: DeviceArray, dst: DeviceArray) -> None:
    """Of one rank."""
    for name, array, dtype in (("a", a, np.uint16), ("b", b, np.uint16), ("dst", dst, np.float32)):
        if array.dtype != dtype or len(array.shape) != 2:
            raise OperandError(
                f"rank {rank}'s {name} must be a matrix of {np.dtype(dtype)} (got {array.dtype} of shape "
                f"{array.shape}); give bfloat16 as its bits, see to_bfloat16"
            )
    (m, k), (n, depth) = a.shape, b.shape
    begin, end = rows_of(m, group.world_size, rank)
    if depth != k or dst.shape != (end - begin, n):
        raise OperandError(
            f"rank {rank}'s a, b and dst must have shapes (m, k), (n, k) and (rows_of, n) (got {a.shape}, "
            f"{b.shape} and {dst.shape}, {end - begin} of {m} rows are its own); b is given transposed"
        )
    if k == 0 or k % 8:
        raise OperandError(
            f"k must be a positive multiple of 8, so that rows start 16-byte aligned (got {k} on rank "
            f"{rank}); pad a and b with zeros to {max(-(-k // 8) * 8, 8)} columns"
        )
    for name, array in (("a", a), ("b", b)):
        check_aligned("cp.async", f"rank {rank}'s {name}", array, 16)
        check_apart(dst, array, f"rank {rank}'s {name}")
    check_aligned("8-byte stores", f"rank {rank}'s dst", dst, 8)


def _arguments(member: Member, product: Product, config: MatmulScatterConfig) -> Sequence[object]:
    """What the kernel gets."""
    rank, workspace = member.rank, product.workspace
    a, b, dst = (arrays[rank] for arrays in (product.a, product.b, product.dst))
    table = np.array(
        [a.ptr, b.ptr, a.shape[1], dst.ptr, *workspace.scratch.pointers(rank), product.m, product.n],
        np.uint64,
    )
    rows = -(-product.m // workspace.group.world_size)  # of the first rank, which has most
    tiles = -(-rows // BLOCK) * -(-product.n // BLOCK)
    turns = -(-tiles // config.ctas)
    return table, workspace.control(member), np.uint32(turns), np.uint32(rank)


_KERNEL = KernelWay("fused", MatmulScatterConfig, throughput_config, unavailable, _arguments)
