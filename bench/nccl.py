"""NCCL's collectives on the memory and the streams of a group: one process, one thread, all GPUs.

Through torch.cuda.nccl, which makes a communicator per set of devices at its first call and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.ipc.group import Group
from kernels.ipc.member import Member
from kernels.ipc.symmetric import Symmetric
from kernels.reduce.elements import Element
from smfree.cuda import DeviceArray


def unavailable(group: Group) -> str | None:
    """Why NCCL cannot take part, None when it can."""
    if group.members[0].device.is_emulated:
        return "it needs real GPUs"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not hasattr(torch._C, "_nccl_all_gather"):
        return f"torch {torch.__version__} was built without NCCL"
    if not group.in_process:
        return "here it runs within one process"
    return None


def version() -> str:
    """NCCL's own."""
    import torch.cuda.nccl

    return ".".join(map(str, torch.cuda.nccl.version()))


def allgather(group: Group, dst: Symmetric) -> Callable[[int], object]:
    """What queues a gather in place on the members' streams; the first call makes the communicators."""
    import torch
    import torch.cuda.nccl

    outputs = [_tensor(dst.array(member.rank), member) for member in group.members]
    shard = dst.nbytes // group.world_size
    inputs = [whole[rank * shard : (rank + 1) * shard] for rank, whole in enumerate(outputs)]
    streams = _streams(group)

    def launch(_: int) -> object:
        return torch.cuda.nccl.all_gather(inputs, outputs, streams=streams)

    return launch


def allreduce(group: Group, dst: Symmetric, src: Symmetric, element: Element) -> Callable[[int], object]:
    """What queues the sum of all ranks' ``src`` into every ``dst`` on the members' streams."""
    import torch.cuda.nccl

    inputs, outputs, streams = _elements(group, src, element), _elements(group, dst, element), _streams(group)

    def launch(_: int) -> object:
        return torch.cuda.nccl.all_reduce(inputs, outputs, streams=streams)

    return launch


def reduce_scatter(group: Group, dst: Symmetric, src: Symmetric, element: Element) -> Callable[[int], object]:
    """As :func:`allreduce`, each rank's part of the sum into its ``dst``."""
    import torch.cuda.nccl

    inputs, outputs, streams = _elements(group, src, element), _elements(group, dst, element), _streams(group)

    def launch(_: int) -> object:
        return torch.cuda.nccl.reduce_scatter(inputs, outputs, streams=streams)

    return launch


def _streams(group: Group) -> list[Any]:
    """The members' as torch's."""
    import torch

    return [
        torch.cuda.ExternalStream(
            int(member.stream.handle), device=torch.device("cuda", member.device.ordinal)
        )
        for member in group.members
    ]


def _elements(group: Group, memory: Symmetric, element: Element) -> list[Any]:
    """The bytes of all ranks as torch's tensors of such elements."""
    import torch

    dtype = getattr(torch, element.value)
    return [_tensor(memory.array(member.rank), member).view(dtype) for member in group.members]


def _tensor(array: DeviceArray, member: Member) -> Any:
    """A view of an array as torch's."""
    import torch

    tensor = torch.as_tensor(array.view(np.uint8), device=torch.device("cuda", member.device.ordinal))
    if tensor.data_ptr() != array.ptr:
        raise RuntimeError("this torch copies instead of viewing __cuda_array_interface__; use a newer one")
    return tensor
