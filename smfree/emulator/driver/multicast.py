"""Multicast objects: teams of devices, and what memory of each is behind one address."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import Needs, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.vmm import VmmCalls, multiples, no_flags
from smfree.emulator.node import DeviceState
from smfree.emulator.virtual import GRANULARITY_BYTES, Binding, Physical, Team

_DESCRIPTOR = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)


class MulticastCalls(VmmCalls):
    """cuMulticast*."""

    @entry(1, Needs.INIT)
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        self._team_of(prop)
        if int(option) not in (0, 1):
            raise invalid(f"option must be CU_MULTICAST_GRANULARITY_MINIMUM or _RECOMMENDED, got {option}")
        return GRANULARITY_BYTES

    @entry(1, Needs.INIT)
    def cuMulticastCreate(self, prop: Any) -> Any:
        devices, shareable = self._team_of(prop)
        multiples(size=prop.size)
        if devices > len(self.node.devices):
            raise invalid(f"numDevices must be at most the node's {len(self.node.devices)}, got {devices}")
        self._capable(self.node.devices[0])
        label = f"cuMulticastCreate at {self._caller()}"
        return self._name(Team(int(prop.size), shareable, num_devices=devices, label=label))

    def _team_of(self, prop: Any) -> tuple[int, bool]:
        """Devices and shareability of a CUmulticastObjectProp."""
        if prop is None:
            raise invalid("prop is None")
        no_flags(prop.flags)
        if int(prop.numDevices) < 1:
            raise invalid(f"prop.numDevices must be at least 1, got {prop.numDevices}")
        kinds = int(prop.handleTypes)
        if kinds not in (0, _DESCRIPTOR):
            raise unsupported(f"handle types {kinds:#x}: only POSIX file descriptors are emulated")
        return int(prop.numDevices), bool(kinds)

    @entry(0, Needs.INIT)
    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> None:
        team, device = self._backing(mcHandle, Team), self._device_at(dev)
        self._capable(device)
        if device in team.devices:
            raise invalid(f"device {device.ordinal} is in {team} already; add each device once")
        if team.complete:
            raise invalid(f"{team} has its {team.num_devices} devices; create it for more")
        team.devices.append(device)
        self.node.lock.notify_all()

    def _capable(self, device: DeviceState) -> None:
        spec = device.profile.device
        if spec.compute_major < 9:
            raise unsupported(
                f"device {device.ordinal}, {spec.name} (sm_{spec.compute_major}{spec.compute_minor}), has no "
                "multicast; ask CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED first"
            )

    # ------------------------------------------------------------------------------------------- binding

    @entry(0, Needs.INIT)
    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
    ) -> None:
        no_flags(flags)
        memory = self._backing(memHandle, Physical)
        self._bind(mcHandle, int(mcOffset), memory, int(memOffset), int(size))

    @entry(0, Needs.INIT)
    def cuMulticastBindAddr(self, mcHandle: Any, mcOffset: int, memptr: Any, size: int, flags: int) -> None:
        no_flags(flags)
        address = int(memptr)
        multiples(memptr=address)
        views = self._views(address, int(size))
        if len(views) != 1 or views[0].end < address + int(size):
            raise invalid(f"[{address:#x}, +{size}) is not inside one mapping of memory from cuMemCreate")
        memory = views[0].handle.backing
        if not isinstance(memory, Physical):
            raise invalid(f"memptr must be memory from cuMemCreate; {address:#x} is {memory}")
        self._bind(mcHandle, int(mcOffset), memory, address - views[0].start, int(size))

    def _bind(self, handle: Any, offset: int, memory: Physical, memory_offset: int, size: int) -> None:
        team: Team = self._backing(handle, Team)
        multiples(mcOffset=offset, memOffset=memory_offset, size=size)
        if memory_offset + size > memory.nbytes:
            raise invalid(
                f"memOffset + size must be at most the memory's {memory.nbytes}, got {memory_offset} + {size}"
            )
        if offset + size > team.nbytes:
            raise invalid(
                f"mcOffset + size must be at most the object's {team.nbytes}, got {offset} + {size}"
            )
        if (team.shareable or self._handle(handle).imported) and not memory.shareable:
            raise invalid(
                f"{team} is shareable, {memory} is not; ask for a file descriptor in its properties"
            )
        self._await_members(team)
        if memory.device not in team.devices:
            team_list = ", ".join(str(device.ordinal) for device in team.devices)
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_DEVICE,
                f"{memory} is of a device outside the team (devices {team_list}); bind memory of its devices",
            )
        for other in team.bindings:
            if other.memory.device is memory.device and other.offset < offset + size and offset < other.end:
                raise invalid(
                    f"device {memory.device.ordinal} has [{other.offset}, {other.end}) of {team} bound; "
                    "unbind it first"
                )
        team.bind(Binding(offset, size, memory, memory_offset))

    @entry(0, Needs.INIT)
    def cuMulticastUnbind(self, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
        """Only what one bind bound: anything else is undefined, so it is refused."""
        team, device = self._backing(mcHandle, Team), self._device_at(dev)
        multiples(mcOffset=mcOffset, size=size)
        for binding in team.bindings:
            if binding.memory.device is device and (binding.offset, binding.nbytes) == (
                int(mcOffset),
                int(size),
            ):
                team.unbind(binding)
                return
        raise invalid(
            f"device {device.ordinal} bound no {int(size)} bytes at offset {int(mcOffset)} of {team}; unbind "
            "with the bind's own offset and size"
        )
