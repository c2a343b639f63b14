"""cuIpc*: memory and events of another process."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, invalid_handle
from smfree.emulator.driver.peers import PeerCalls, can_access
from smfree.emulator.driver.streams import StreamCalls
from smfree.emulator.interprocess import HANDLE_BYTES, Export, new_key
from smfree.emulator.process import Context
from smfree.emulator.streams import Event

GET_S, OPEN_S, CLOSE_S = 1.6e-6, 1.33e-3, 0.5e-3
"""Modelled host time of cuIpcGetMemHandle, of a first cuIpcOpenMemHandle and a last cuIpcCloseMemHandle, of
events too (published:ipc-open; 2019, GPU not named)."""
_LAZY_ENABLE_PEER_ACCESS = 1
_WAYS_OUT = (
    "cuIpcGetMemHandle takes memory of cuMemAlloc; allocate it so (PyTorch: without expandable_segments), or "
    "allocate it with cuMemCreate and share it with cuMemExportToShareableHandle"
)


class IpcCalls(PeerCalls, StreamCalls):
    """An imported pointer is a new address, valid in its process and for the context that opened it."""

    @entry(1)
    def cuIpcGetMemHandle(self, dptr: Any) -> Any:
        """The handle of the whole allocation, also for a pointer into it: add the offset after opening."""
        address = int(dptr)
        context = self._exportable(address)
        home = context.device.memory.check_range(address, 1, "dptr")
        export = context.exports.get(home.start)
        if export is None:
            export = context.exports[home.start] = Export(new_key(), context, home)
            self.node.ipc_handles[export.key] = export
        self._spend(GET_S)
        return _handle(cuda.CUipcMemHandle(), export.key)

    def _exportable(self, address: int) -> Context:
        """The context that holds the allocation around ``address``; a refusal of every other memory."""
        found = self._located(address)
        reason = self._why_not_exportable(found)
        if reason is not None or found is None or found.device is None:
            raise invalid(f"{address:#x} {reason}. {_WAYS_OUT}")
        return self.process.contexts[found.device.ordinal]

    @entry(1)
    def cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        """Opened again in one context: the same pointer, which then has to be closed as often."""
        context = self._context()
        if int(Flags) != _LAZY_ENABLE_PEER_ACCESS:
            raise invalid(f"Flags must be CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS (1), got {Flags}")
        export = self.node.ipc_handles.get(_key(handle))
        if not isinstance(export, Export):
            raise invalid_handle(_nothing("memory", export))
        owner = export.context
        if owner.process is self.process:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CONTEXT,
                f"the handle names {export.allocation} of this very process ({self.process}); use the "
                "pointer itself: CUDA IPC is between processes",
            )
        for known in export.imports:
            if known.context is context:
                known.count += 1
                return cuda.CUdeviceptr(known.mapping.start)
        if owner.device is not context.device and not can_access(context.device, owner.device):
            raise Refusal(
                CUresult.CUDA_ERROR_MAP_FAILED,
                f"device {context.ordinal}, the current one, cannot access memory of device {owner.ordinal}; "
                "open the handle with a context of another device, or copy through the host",
            )
        self._spend(OPEN_S)
        return cuda.CUdeviceptr(export.open(context).mapping.start)

    @entry(0)
    def cuIpcCloseMemHandle(self, dptr: Any) -> None:
        address, context = int(dptr), self._context()
        for holder in self.process.contexts.values():
            known = holder.imports.get(address)
            if known is None:
                continue
            if holder is not context:
                raise Refusal(
                    CUresult.CUDA_ERROR_INVALID_CONTEXT,
                    f"{known.mapping} was opened by the context of device {holder.ordinal}, that of device "
                    f"{context.ordinal} is current; make the opening one current",
                )
            known.count -= 1
            if known.count == 0:
                self._spend(CLOSE_S)
                known.close()
            return
        raise invalid(f"{address:#x} is no pointer that cuIpcOpenMemHandle returned and that is still open")

    # -------------------------------------------------------------------------------------------- events

    @entry(1)
    def cuIpcGetEventHandle(self, event: Any) -> Any:
        found = self._event(event)
        if not found.interprocess or found.origin is not None:
            raise invalid(
                f"event {found.handle:#x} was not created in this process with CU_EVENT_INTERPROCESS | "
                "CU_EVENT_DISABLE_TIMING"
            )
        if not found.key:
            found.key = new_key()
            self.node.ipc_handles[found.key] = found
        self._spend(GET_S)
        return _handle(cuda.CUipcEventHandle(), found.key)

    @entry(1)
    def cuIpcOpenEventHandle(self, handle: Any) -> Any:
        context = self._context()
        origin = self.node.ipc_handles.get(_key(handle))
        if not isinstance(origin, Event):
            raise invalid_handle(_nothing("event", origin))
        if origin.context.process is self.process:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CONTEXT,
                f"the handle names event {origin.handle:#x} of this very process ({self.process}); use the "
                "event itself: CUDA IPC is between processes",
            )
        self._spend(OPEN_S)
        made = Event(0, context, timed=False, interprocess=True, origin=origin)
        made.handle = self.process.name(made)
        return cuda.CUevent(made.handle)


def _key(handle: Any) -> bytes:
    if handle is None:
        raise invalid("handle is None")
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _handle(made: Any, key: bytes) -> Any:
    """``made`` with the bytes of ``key``: versions of the binding differ in whether they show them."""
    ctypes.memmove(made.getPtr(), key, HANDLE_BYTES)
    return made


def _nothing(wanted: str, found: object) -> str:
    if found is None:
        return (
            f"the handle names no {wanted} that is exported now: it was freed, its process has ended, or the "
            "handle comes from another machine"
        )
    return f"the handle names {'an event' if isinstance(found, Event) else 'memory'}, not {wanted}"
