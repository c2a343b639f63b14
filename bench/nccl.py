"""NCCL's AllGather on the memory and the streams of a group: one process, one thread, all GPUs.

Through torch.cuda.nccl, which makes a communicator per set of devices at its first call and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.ipc.group import Group
from kernels.ipc.member import Member
from kernels.ipc.symmetric import Symmetric
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
        return "here it gathers within one process"
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
    streams = [
        torch.cuda.ExternalStream(int(member.stream.handle), device=outputs[rank].device)
        for rank, member in enumerate(group.members)
    ]

    def launch(_: int) -> object:
        return torch.cuda.nccl.all_gather(inputs, outputs, streams=streams)

    return launch


def _tensor(array: DeviceArray, member: Member) -> Any:
    """A view of an array as torch's."""
    import torch

    tensor = torch.as_tensor(array.view(np.uint8), device=torch.device("cuda", member.device.ordinal))
    if tensor.data_ptr() != array.ptr:
        raise RuntimeError("this torch copies instead of viewing __cuda_array_interface__; use a newer one")
    return tensor
