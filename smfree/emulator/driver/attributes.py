"""Answers to cuDeviceGetAttribute, from the profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smfree.emulator.driver.errors import invalid
from smfree.emulator.node import DeviceState
from smfree.emulator.specs import WARP_SIZE, DeviceSpec

_PREFIX = "CU_DEVICE_ATTRIBUTE_"

_FROM_SPEC: dict[str, Callable[[DeviceSpec], int]] = {
    "MAX_THREADS_PER_BLOCK": lambda s: s.max_threads_per_block,
    "MAX_BLOCK_DIM_X": lambda s: s.max_threads_per_block,
    "MAX_BLOCK_DIM_Y": lambda s: s.max_threads_per_block,
    "MAX_SHARED_MEMORY_PER_BLOCK": lambda s: s.shared_bytes_per_block,
    "MAX_REGISTERS_PER_BLOCK": lambda s: s.registers_per_block,
    "CLOCK_RATE": lambda s: round(s.sm_clock_mhz * 1000),
    "MULTIPROCESSOR_COUNT": lambda s: s.num_sms,
    "MEMORY_CLOCK_RATE": lambda s: round(s.memory_clock_mhz * 1000),
    "GLOBAL_MEMORY_BUS_WIDTH": lambda s: s.memory_bus_bits,
    "L2_CACHE_SIZE": lambda s: s.l2_bytes,
    "MAX_THREADS_PER_MULTIPROCESSOR": lambda s: s.max_threads_per_sm,
    "ASYNC_ENGINE_COUNT": lambda s: s.copy_engines,
    "COMPUTE_CAPABILITY_MAJOR": lambda s: s.compute_major,
    "COMPUTE_CAPABILITY_MINOR": lambda s: s.compute_minor,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": lambda s: s.shared_bytes_per_sm,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": lambda s: s.registers_per_sm,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": lambda s: s.shared_bytes_per_block_optin,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": lambda s: s.max_ctas_per_sm,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": lambda s: s.reserved_shared_bytes_per_block,
    "CLUSTER_LAUNCH": lambda s: int(s.compute_major >= 9),
    "TENSOR_MAP_ACCESS_SUPPORTED": lambda s: int(s.compute_major >= 9),
    "MULTICAST_SUPPORTED": lambda s: int(s.compute_major >= 9),
}

_FIXED = {
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "TOTAL_CONSTANT_MEMORY": 65536,
    "WARP_SIZE": WARP_SIZE,
    "MAX_PITCH": 2**31 - 1,
    "TEXTURE_ALIGNMENT": 512,
    "GPU_OVERLAP": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "ECC_ENABLED": 1,
    "PCI_DEVICE_ID": 0,
    "PCI_DOMAIN_ID": 0,
    "UNIFIED_ADDRESSING": 1,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "CAN_USE_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR_V1": 1,
    "CONCURRENT_KERNELS": 1,
    "COOPERATIVE_LAUNCH": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "MEMORY_POOLS_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
}

_ABSENT = frozenset(
    {
        "KERNEL_EXEC_TIMEOUT",
        "INTEGRATED",
        "COMPUTE_MODE",
        "TCC_DRIVER",
        "MANAGED_MEMORY",
        "MULTI_GPU_BOARD",
        "HOST_NATIVE_ATOMIC_SUPPORTED",
        "PAGEABLE_MEMORY_ACCESS",
        "CONCURRENT_MANAGED_ACCESS",
        "COMPUTE_PREEMPTION_SUPPORTED",
        "COOPERATIVE_MULTI_DEVICE_LAUNCH",
        "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
        "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST",
        "GENERIC_COMPRESSION_SUPPORTED",
        "MAX_PERSISTING_L2_CACHE_SIZE",
        "MAX_ACCESS_POLICY_WINDOW_SIZE",
        "GPU_DIRECT_RDMA_SUPPORTED",
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
        "CAN_FLUSH_REMOTE_WRITES",
        "NUMA_CONFIG",
        "SPARSE_CUDA_ARRAY_SUPPORTED",
        "MEMPOOL_SUPPORTED_HANDLE_TYPES",
        "DMA_BUF_SUPPORTED",
        "HANDLE_TYPE_FABRIC_SUPPORTED",
        "UNIFIED_FUNCTION_POINTERS",
        "MPS_ENABLED",
    }
)
"""Attributes that are 0 here: what the emulated machine does not have or do."""


def device_attribute(device: DeviceState, attrib: Any) -> int:
    """The value of one CUdevice_attribute; INVALID_VALUE for one the emulator has no answer to."""
    name = str(attrib.name).removeprefix(_PREFIX)
    if name in _FROM_SPEC:
        return int(_FROM_SPEC[name](device.profile.device))
    if name in _FIXED:
        return _FIXED[name]
    if name == "PCI_BUS_ID":
        return device.ordinal + 1
    if name == "HOST_NUMA_ID":
        return device.numa_node
    if name in _ABSENT:
        return 0
    raise invalid(f"the emulated device has no answer for {attrib.name}")
