"""Which driver calls a served node answers, and what their arguments are to another process.

A call of :data:`PLAIN` has nothing but numbers, handles, enums, names and structures: it travels as it is.
Those of :data:`SPECIAL` name memory of the calling process, and each has its own way in the client, many in
the server too. Anything else is not served.
"""

from __future__ import annotations

_PLAIN = (
    "cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString",
    "cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetPCIBusId cuDeviceGetUuid cuDeviceTotalMem",
    "cuDeviceCanAccessPeer cuDeviceGetAttribute cuDeviceGetP2PAttribute",
    "cuPointerGetAttribute cuPointerGetAttributes",
    "cuDevicePrimaryCtxGetState cuDevicePrimaryCtxSetFlags",
    "cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent cuCtxGetDevice cuCtxGetFlags cuCtxGetId cuCtxGetStreamPriorityRange cuCtxPopCurrent",
    "cuCtxPushCurrent cuCtxSetCurrent cuCtxSynchronize cuCtxEnablePeerAccess cuCtxDisablePeerAccess",
    "cuMemAlloc cuMemAllocAsync cuMemFree cuMemFreeAsync cuMemGetAddressRange cuMemGetInfo",
    "cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcOpenEventHandle",
    "cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess",
    "cuMemGetAccess cuMemGetAllocationGranularity cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem cuMulticastBindAddr cuMulticastUnbind",
    "cuMulticastGetGranularity",
    "cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyPeer cuMemcpyPeerAsync",
    "cuMemsetD8 cuMemsetD16 cuMemsetD32 cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async",
    "cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy cuStreamGetCtx cuStreamGetFlags cuStreamGetId",
    "cuStreamGetPriority cuStreamQuery cuStreamSynchronize cuStreamWaitEvent",
    "cuStreamWaitValue32 cuStreamWaitValue64 cuStreamWriteValue32 cuStreamWriteValue64",
    "cuStreamBeginCapture cuStreamEndCapture cuStreamGetCaptureInfo cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuGraphDestroy cuGraphExecDestroy cuGraphInstantiate cuGraphLaunch cuGraphUpload",
    "cuEventCreate cuEventDestroy cuEventElapsedTime cuEventQuery cuEventRecord cuEventRecordWithFlags",
    "cuEventSynchronize",
    "cuModuleGetFunction cuModuleGetGlobal cuModuleUnload",
    "cuFuncGetAttribute cuFuncGetModule cuFuncGetName cuFuncLoad cuFuncSetAttribute",
    "cuLibraryGetKernel cuLibraryGetModule cuLibraryUnload cuKernelGetFunction",
    "cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters",
    "cuOccupancyMaxPotentialClusterSize",
    "cuTensorMapEncodeTiled",
)
PLAIN = frozenset(name for line in _PLAIN for name in line.split())

IMAGES = frozenset({"cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"})
"""The first argument is a module image."""

LAUNCHES = {"cuLaunchKernel": 9, "cuLaunchKernelEx": 2, "cuLaunchCooperativeKernel": 9}
"""Where ``kernelParams`` stands, with ``extra`` behind it or nothing."""

TO_DEVICE = frozenset({"cuMemcpyHtoD", "cuMemcpyHtoDAsync"})
TO_HOST = frozenset({"cuMemcpyDtoH", "cuMemcpyDtoHAsync"})
ANYWHERE = frozenset({"cuMemcpy", "cuMemcpyAsync"})
PINNED = frozenset({"cuMemAllocHost", "cuMemHostAlloc"})

SPECIAL = frozenset(
    {
        *IMAGES,
        *LAUNCHES,
        *TO_DEVICE,
        *TO_HOST,
        *ANYWHERE,
        *PINNED,
        "cuDeviceGetAttribute",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemcpyBatchAsync",
        "cuMemFreeHost",
        "cuMemHostGetDevicePointer",
        "cuMemHostGetFlags",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuPointerGetAttribute",
        "cuPointerGetAttributes",
        "cuTensorMapReplaceAddress",
    }
)

REFUSED = {"cuLaunchHostFunc": "a host function is code of another process; wait for an event instead"}
"""Emulated calls that are not served, and why."""

NODE_ADDRESSES = ((1 << 40, 17 << 40), (0x2000_0000_0000, 0x5000_0000_0000))
"""From, to: device windows; shared host memory and mappings. All others are a process's own. Without a limit
on the stack (so runs what ``make`` starts) the system places a process's memory between the two."""


def is_node_address(address: int) -> bool:
    """Whether an address means the same to the server and to its clients."""
    return any(start <= address < end for start, end in NODE_ADDRESSES)
