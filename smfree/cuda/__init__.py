"""Host side of smfree: one code path to a real GPU or an emulated one.

The public names, in the order in which a program uses them::

    with Device.open("auto") as device:                    # "cuda:0", "emu:h100", or SMFREE_DEVICE
        device.capabilities.has_tma                        # Capabilities: arch "sm_90a", limits, peaks
        source = CudaSource("kernels/lsu/copy.cu", defines={"THREADS": 256})
        module = device.compile(source)                    # Module; .image: PTX, cubin, facts
        kernel = module.kernel("lsu_copy")                 # Kernel: .registers, .spill_bytes, .occupancy(...)
        src = device.asarray(np.arange(1 << 20, dtype=np.uint32))       # DeviceArray
        dst = device.empty(src.shape, src.dtype)
        stream = device.stream()
        kernel.launch((132,), (256,), [dst, src, np.uint64(src.nbytes)], stream=stream, shared_bytes=65536)
        stream.synchronize()
        dst.numpy()
        with stream.capture() as graph:                    # Graph: replayed by graph.launch()
            dst.copy_from_device(src, stream=stream)
        memory = PhysicalMemory.create(device, 1 << 21)    # mapped by memory.map(), shared by memory.export()
        device.pinned(1 << 20, numa_node=device.numa_node) # HostBuffer

Launch arguments are typed: DeviceArray or HostBuffer (a pointer), int (8-byte parameters only), numpy scalar,
ctypes value or structure, TensorMap (128 bytes by value), TritonDescriptor (Triton kernels only).

Importing this package initialises nothing: no driver call happens before ``Device.open``, and NVRTC is
loaded by the first compilation.
"""

from smfree.cuda.cache import CompileCache
from smfree.cuda.capabilities import Capabilities, arch_for
from smfree.cuda.choose import DeviceSpec, parse_spec
from smfree.cuda.compile_cuda import CudaSource, compile_cuda
from smfree.cuda.compile_triton import TritonDescriptor, TritonSource, compile_triton, triton_unavailable
from smfree.cuda.device import Device
from smfree.cuda.errors import (
    ArgumentError,
    ArrayError,
    CompileError,
    ContextFailedError,
    CudaHostError,
    DeviceClosedError,
    DeviceLostError,
    DeviceSpecError,
    DriverError,
    GraphError,
    IpcError,
    KernelFaultError,
    KernelNotFoundError,
    LaunchError,
    NoDeviceError,
    PeerError,
    TensorMapError,
    ToolMissingError,
    TraceError,
    TritonError,
    UnavailableError,
    VariableNotFoundError,
)
from smfree.cuda.graphs import Graph
from smfree.cuda.image import FunctionFacts, ModuleImage, ParamInfo
from smfree.cuda.memory import DeviceArray, HostBuffer
from smfree.cuda.module import Kernel, Module, ModuleLoadError
from smfree.cuda.multicast import MulticastObject, multicast_unavailable
from smfree.cuda.peers import CopyWay, Path, enable_peers, path_between
from smfree.cuda.streams import Event, Stream, WaitCondition
from smfree.cuda.tensormap import DataType, Interleave, L2Promotion, OobFill, Swizzle, TensorMap
from smfree.cuda.vmm import MappedMemory, PhysicalMemory, vmm_unavailable

__all__ = [
    "ArgumentError",
    "ArrayError",
    "Capabilities",
    "CompileCache",
    "CompileError",
    "ContextFailedError",
    "CopyWay",
    "CudaHostError",
    "CudaSource",
    "DataType",
    "Device",
    "DeviceArray",
    "DeviceClosedError",
    "DeviceLostError",
    "DeviceSpec",
    "DeviceSpecError",
    "DriverError",
    "Event",
    "FunctionFacts",
    "Graph",
    "GraphError",
    "HostBuffer",
    "Interleave",
    "IpcError",
    "Kernel",
    "KernelFaultError",
    "KernelNotFoundError",
    "L2Promotion",
    "LaunchError",
    "MappedMemory",
    "Module",
    "ModuleImage",
    "ModuleLoadError",
    "MulticastObject",
    "NoDeviceError",
    "OobFill",
    "ParamInfo",
    "Path",
    "PeerError",
    "PhysicalMemory",
    "Stream",
    "Swizzle",
    "TensorMap",
    "TensorMapError",
    "ToolMissingError",
    "TraceError",
    "TritonDescriptor",
    "TritonError",
    "TritonSource",
    "UnavailableError",
    "VariableNotFoundError",
    "WaitCondition",
    "arch_for",
    "compile_cuda",
    "compile_triton",
    "enable_peers",
    "multicast_unavailable",
    "parse_spec",
    "path_between",
    "triton_unavailable",
    "vmm_unavailable",
]
