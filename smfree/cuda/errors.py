"""Errors of the host side. Each message states the rule, the value that broke it and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CudaHostError(Exception):
    """Base of every error that smfree.cuda raises itself."""


class DeviceSpecError(CudaHostError, ValueError):
    """A device string that names nothing smfree knows."""


class NoDeviceError(CudaHostError):
    """The GPU that was asked for is not there. Never answered by a silent fallback."""


class UnavailableError(CudaHostError):
    """The device, its driver or the machine lacks what the operation needs; says what, and why if known."""


class GraphError(CudaHostError):
    """A graph used before its capture ended, after its memory was freed, or captured where none can be."""


class TraceError(CudaHostError):
    """A trace was asked for where none can be made."""


class DeviceClosedError(CudaHostError):
    """Something of a closed device, or freed memory, was used."""


class LaunchError(CudaHostError, ValueError):
    """A launch that cannot work, refused before the driver sees it."""


class ArgumentError(LaunchError):
    """Kernel arguments that do not fit the kernel's ``.param`` list."""


class ArrayError(CudaHostError, ValueError):
    """A device or host buffer used against its shape, type, alignment or owner."""


class PeerError(CudaHostError):
    """Devices that cannot use each other's memory, or are not on one machine."""


class IpcError(CudaHostError):
    """Memory or an event that cannot be exported to, or opened from, another process."""


class TensorMapError(CudaHostError, ValueError):
    """A tensor map that cuTensorMapEncodeTiled would refuse, or refused."""


class KernelNotFoundError(CudaHostError, KeyError):
    """A module has no entry point of that name; lists those it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class VariableNotFoundError(CudaHostError, LookupError):
    """A module has no variable of that name."""


class ToolMissingError(CudaHostError):
    """A library or program that the operation needs is not installed; names the package."""


class TritonError(CudaHostError):
    """Triton is absent, too old, or was given what it cannot compile."""


class CompileError(CudaHostError):
    """A compiler refused a source. Carries the options, the searched directories and the whole log."""

    def __init__(
        self,
        message: str,
        *,
        log: str = "",
        options: Sequence[str] = (),
        include_dirs: Sequence[str] = (),
        hints: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.options = tuple(options)
        self.include_dirs = tuple(include_dirs)
        self.hints = tuple(hints)
        parts = [message]
        parts += [f"hint: {hint}" for hint in hints]
        if options:
            parts.append("options: " + " ".join(options))
        parts.append("include directories searched: " + (", ".join(include_dirs) or "none"))
        if log:
            parts.append("compiler log:\n" + log.rstrip())
        super().__init__("\n".join(parts))


class DriverError(CudaHostError):
    """A driver call that did not return CUDA_SUCCESS.

    ``api`` is the function's name, ``code`` its number, ``code_name`` its name, ``arguments`` those that
    matter, ``report`` what the emulated GPU had to say.
    """

    def __init__(
        self,
        api: str,
        code: int,
        code_name: str,
        *,
        arguments: Mapping[str, object] | None = None,
        remedy: str = "",
        report: str = "",
        text: str = "",
    ) -> None:
        self.api = api
        self.code = code
        self.code_name = code_name
        self.arguments = dict(arguments or {})
        self.remedy = remedy
        self.report = report
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        text = text or f"{api}({shown}) returned {code_name} ({code})"
        if remedy:
            text += f"; {remedy}"
        if report:
            text += f"\n{report}"
        super().__init__(text)


class KernelFaultError(DriverError):
    """A kernel failed and took its context with it (a *sticky* error). Everything queued before is lost."""


class ContextFailedError(DriverError):
    """The context had already failed before this call; this call's own arguments are not the reason."""


class DeviceLostError(DriverError):
    """The GPU itself is gone or unusable (off the bus, uncorrectable memory error, destroyed context)."""
