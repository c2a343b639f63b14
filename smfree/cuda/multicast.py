"""Multicast objects (NVLink SHARP): one address that means the same offset of several GPUs' memories.

A store to it (PTX ``multimem.st``) reaches every bound GPU, a reduction or a reducing load works on all of
them; plain loads and stores may not use it. The order that the driver demands::

    with MulticastObject.create(devices[0], nbytes, num_devices=len(devices)) as multicast:
        for device in devices:
            multicast.add(device)                      # all of them, before
        for memory in physical:                        # the first bind: it blocks until then
            multicast.bind(memory)                     # PhysicalMemory, shareable where the object is
        addresses = [multicast.map([device]) for device in devices]

Several processes: one creates it and exports a descriptor, each imports it, adds its own GPU, waits for all
others (barrier), binds its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from smfree.cuda.errors import ArrayError, DriverError, UnavailableError
from smfree.cuda.vmm import MemoryObject, PhysicalMemory, attribute, import_descriptor, round_up

if TYPE_CHECKING:
    from smfree.cuda.device import Device

_REASONS = {
    "CUDA_ERROR_ILLEGAL_STATE": "the NVLink fabric is in an illegal state: look at the fabric manager "
    "(systemctl status nvidia-fabricmanager, nvidia-smi -q, section Fabric) and, where GPUs of several nodes "
    "are joined, at the IMEX daemon and its channels (/dev/nvidia-caps-imex-channels)",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the system software is not running: start the fabric manager "
    "(nvidia-fabricmanager) and, where GPUs of several nodes are joined, the IMEX daemon",
    "CUDA_ERROR_NOT_PERMITTED": "this user has no IMEX channel, or the container hides it "
    "(/dev/nvidia-caps-imex-channels)",
    "CUDA_ERROR_OUT_OF_MEMORY": "the switch has no multicast resources left, or the GPU no memory",
    "CUDA_ERROR_NOT_SUPPORTED": "these GPUs are not joined by an NVSwitch that can multicast",
    "CUDA_ERROR_INVALID_DEVICE": "one of the GPUs cannot be part of a multicast team",
}


class MulticastObject(MemoryObject):
    """A team of ``num_devices`` GPUs and ``nbytes`` of each; see the module for the order of calls."""

    kind = "multicast object"

    def __init__(self, device: Device, handle: Any, nbytes: int, granularity: int, num_devices: int) -> None:
        super().__init__(device, handle, nbytes, granularity)
        self.num_devices = num_devices
        self._bound: list[tuple[Device, int, int]] = []

    @classmethod
    def create(
        cls, device: Device, nbytes: int, num_devices: int, *, shareable: bool = True
    ) -> MulticastObject:
        """A new object; ``nbytes`` per GPU is rounded up to :func:`multicast_granularity`.

        Raises UnavailableError when the GPU has no multicast, DriverError with the driver's reason.
        """
        if not attribute(device, "MULTICAST_SUPPORTED"):
            raise UnavailableError(_no_multicast(device))
        if nbytes < 1 or num_devices < 1:
            raise ArrayError(
                f"a multicast object has at least one byte and one GPU (got {nbytes} and {num_devices})"
            )
        granularity = multicast_granularity(device, num_devices, shareable=shareable)
        size = round_up(nbytes, granularity)
        properties = _properties(device, size, num_devices, shareable)
        handle = device.calls("cuMulticastCreate", properties, bytes=size, devices=num_devices)
        return cls(device, handle, size, granularity, num_devices)

    @classmethod
    def from_descriptor(
        cls, device: Device, descriptor: int, nbytes: int, num_devices: int
    ) -> MulticastObject:
        """What another process exported, for use by ``device``; the descriptor may be closed then.

        ``nbytes`` and ``num_devices`` are the exporter's.
        """
        granularity = multicast_granularity(device, num_devices)
        handle = import_descriptor(device, descriptor)
        return cls(device, handle, nbytes, granularity, num_devices)

    def add(self, device: Device) -> None:
        """Make ``device`` a member of the team, for good. All are added before the first :meth:`bind`."""
        self._call("cuMulticastAddDevice", self.handle, device.ordinal, device=device.spec)

    def bind(
        self,
        memory: PhysicalMemory,
        *,
        offset_bytes: int = 0,
        memory_offset_bytes: int = 0,
        nbytes: int | None = None,
    ) -> None:
        """Let [offset_bytes, + nbytes) of the object mean, on the memory's GPU, that part of ``memory``.

        All are multiples of :attr:`granularity`; default: as much as fits. Blocks until every GPU is added.
        Raises DriverError; see :func:`multicast_unavailable` for what its codes mean.
        """
        if nbytes is None:
            nbytes = min(self.nbytes - offset_bytes, memory.nbytes - memory_offset_bytes)
        self._call(
            "cuMulticastBindMem",
            self.handle,
            offset_bytes,
            memory.handle,
            memory_offset_bytes,
            nbytes,
            0,
            device=memory.device.spec,
            bytes=nbytes,
        )
        self._bound.append((memory.device, offset_bytes, nbytes))

    def unbind(self, device: Device) -> None:
        """Undo every :meth:`bind` of ``device``'s memory through this object."""
        for bound in [bound for bound in self._bound if bound[0] is device]:
            _, offset, nbytes = bound
            self._call("cuMulticastUnbind", self.handle, device.ordinal, offset, nbytes, device=device.spec)
            self._bound.remove(bound)


def multicast_granularity(device: Device, num_devices: int, *, shareable: bool = True) -> int:
    """Bytes of which sizes and offsets of such an object are multiples: the least, so that memory of a
    plain multiple of 2 MiB can fill it. The recommended one is told as 2 and as 512 MiB for the H100; what
    it gains nobody tells."""
    option = device.driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
    properties = _properties(device, 1, num_devices, shareable)
    return int(device.calls("cuMulticastGetGranularity", properties, option))


def multicast_unavailable(devices: Sequence[Device]) -> str | None:
    """Why these GPUs (all of one process) have no multicast; None when they have.

    The attribute alone is no proof, so real memory is bound: binding is where a missing fabric manager or
    IMEX channel shows.
    """
    for device in devices:
        if not attribute(device, "MULTICAST_SUPPORTED"):
            return _no_multicast(device)
    try:
        with ExitStack() as stack:
            multicast = stack.enter_context(MulticastObject.create(devices[0], 1, len(devices)))
            for device in devices:
                multicast.add(device)
            for device in devices:
                multicast.bind(stack.enter_context(PhysicalMemory.create(device, multicast.nbytes)))
            for device in devices:
                multicast.unbind(device)
    except DriverError as error:
        reason = _REASONS.get(error.code_name)
        if reason is None:
            raise
        return f"multicast: {error.api} returned {error.code_name} ({error.code}): {reason}"
    return None


def _no_multicast(device: Device) -> str:
    return (
        f"{device.name} ({device.spec}, {device.capabilities.arch}) has no multicast; it takes compute "
        "capability 9.0 and an NVSwitch"
    )


def _properties(device: Device, nbytes: int, num_devices: int, shareable: bool) -> Any:
    driver = device.driver
    kinds = driver.CUmemAllocationHandleType
    properties = driver.CUmulticastObjectProp()
    properties.numDevices = num_devices
    properties.size = nbytes
    properties.handleTypes = int(kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) if shareable else 0
    properties.flags = 0
    return properties
