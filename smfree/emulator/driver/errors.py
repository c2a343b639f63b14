"""Return codes: refusals of a call, and what a kernel's fault looks like from the host."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.errors import (
    BarrierFault,
    CopyFault,
    Deadlock,
    EmulationError,
    MemoryFault,
    PtxError,
    Unsupported,
)

CUresult = cuda.CUresult

_TEXTS = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_OUT_OF_MEMORY": "out of memory",
    "CUDA_ERROR_NOT_INITIALIZED": "initialization error",
    "CUDA_ERROR_INVALID_DEVICE": "invalid device ordinal",
    "CUDA_ERROR_INVALID_IMAGE": "device kernel image is invalid",
    "CUDA_ERROR_INVALID_CONTEXT": "invalid device context",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "CUDA_ERROR_INVALID_PTX": "a PTX JIT compilation failed",
    "CUDA_ERROR_INVALID_HANDLE": "invalid resource handle",
    "CUDA_ERROR_NOT_FOUND": "named symbol not found",
    "CUDA_ERROR_NOT_READY": "device not ready",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
    "CUDA_ERROR_NOT_SUPPORTED": "operation not supported",
    "CUDA_ERROR_TIMEOUT": "wait operation timed out",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": "invalid cluster size",
    "CUDA_ERROR_MAP_FAILED": "mapping of buffer object failed",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "peer access is not supported between these two devices",
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": "peer access is already enabled",
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": "peer access has not been enabled",
}


class Refusal(Exception):
    """A call that fails with ``code``. The message states the rule, the value and the remedy."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refusal:
    """CUDA_ERROR_INVALID_VALUE."""
    return Refusal(CUresult.CUDA_ERROR_INVALID_VALUE, message)


def invalid_handle(message: str) -> Refusal:
    """CUDA_ERROR_INVALID_HANDLE."""
    return Refusal(CUresult.CUDA_ERROR_INVALID_HANDLE, message)


def unsupported(message: str) -> Refusal:
    """CUDA_ERROR_NOT_SUPPORTED: the emulator does not do this."""
    return Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, message)


def error_text(code: Any) -> str:
    """A short description of a return code."""
    name: str = code.name
    return _TEXTS.get(name) or name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()


def fault_code(error: EmulationError) -> Any:
    """The sticky code that the host sees after a kernel's fault.

    A deadlock is what a watchdog would end. What hardware would not notice, or only corrupt, is a launch
    failure.
    """
    match error:
        case Deadlock():
            return CUresult.CUDA_ERROR_LAUNCH_TIMEOUT
        case PtxError():
            return CUresult.CUDA_ERROR_INVALID_PTX
        case Unsupported():
            return CUresult.CUDA_ERROR_NOT_SUPPORTED
        case MemoryFault() | CopyFault() if "align" in error.rule:
            return CUresult.CUDA_ERROR_MISALIGNED_ADDRESS
        case MemoryFault():
            return CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        case BarrierFault() | CopyFault() | _:
            return CUresult.CUDA_ERROR_LAUNCH_FAILED
