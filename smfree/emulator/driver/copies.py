"""cuMemcpy* and cuMemset*: what moves, on which unit, and for how long (modelled).

A copy from pageable memory reads its source when it is called, one from page-locked memory when it runs. A
copy to pageable memory, or inside of the host, blocks the host ("API synchronization behavior"). Copies pass
through L2, as the copy engines' do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from smfree.emulator.driver.base import entry
from smfree.emulator.driver.errors import invalid
from smfree.emulator.driver.memory import MemoryCalls, Place, address_of, host_bytes
from smfree.emulator.links import HOST
from smfree.emulator.node import DeviceState
from smfree.emulator.process import Context
from smfree.emulator.specs import LINE_BYTES
from smfree.emulator.streams import Stream, Unit
from smfree.emulator.transfers import Transfer, piece_ends


class CopyCalls(MemoryCalls):
    """cuMemcpy* and cuMemset*. Functions without Async use the legacy default stream."""

    @entry(0)
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
        self._host_to_device(dstDevice, srcHost, ByteCount, 0, block=True)

    @entry(0)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
        self._host_to_device(dstDevice, srcHost, ByteCount, hStream, block=False)

    def _host_to_device(self, dst: Any, src: Any, nbytes: int, stream: Any, *, block: bool) -> None:
        target = self._place(int(dst), nbytes, "dstDevice", on_device=True)
        source = self._place(address_of(src), nbytes, "srcHost")
        self._copy(target, source, nbytes, self._stream(stream), block=block)

    @entry(0)
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
        self._device_to_host(dstHost, srcDevice, ByteCount, 0, block=True)

    @entry(0)
    def cuMemcpyDtoHAsync(self, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self._device_to_host(dstHost, srcDevice, ByteCount, hStream, block=False)

    def _device_to_host(self, dst: Any, src: Any, nbytes: int, stream: Any, *, block: bool) -> None:
        target = self._place(address_of(dst), nbytes, "dstHost")
        source = self._place(int(src), nbytes, "srcDevice", on_device=True)
        self._copy(target, source, nbytes, self._stream(stream), block=block)

    @entry(0)
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        self._device_to_device(dstDevice, srcDevice, ByteCount, 0)

    @entry(0)
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self._device_to_device(dstDevice, srcDevice, ByteCount, hStream)

    def _device_to_device(self, dst: Any, src: Any, nbytes: int, stream: Any) -> None:
        target = self._place(int(dst), nbytes, "dstDevice", on_device=True)
        source = self._place(int(src), nbytes, "srcDevice", on_device=True)
        self._copy(target, source, nbytes, self._stream(stream), block=False)

    @entry(0)
    def cuMemcpy(self, dst: Any, src: Any, ByteCount: int) -> None:
        target = self._place(int(dst), ByteCount, "dst")
        source = self._place(int(src), ByteCount, "src")
        block = target.device is None or source.device is None
        self._copy(target, source, ByteCount, self._stream(0), block=block)

    @entry(0)
    def cuMemcpyAsync(self, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
        target = self._place(int(dst), ByteCount, "dst")
        source = self._place(int(src), ByteCount, "src")
        self._copy(target, source, ByteCount, self._stream(hStream), block=False)

    # ------------------------------------------------------------------------------------------ one copy

    def _copy(self, dst: Place, src: Place, nbytes: int, stream: Stream, *, block: bool) -> None:
        if nbytes < 0:
            raise invalid(f"ByteCount must not be negative, got {nbytes}")
        if nbytes == 0:
            return
        if (
            stream.legacy
            and dst.device is not src.device
            and dst.device is not None
            and src.device is not None
        ):
            contexts = {self.process.contexts[each.ordinal] for each in (dst.device, src.device)}
            self._copy_between(contexts, dst, src, nbytes, stream)
        else:
            self._submit_copy(dst, src, nbytes, stream, block=block)

    def _copy_between(
        self, contexts: Iterable[Context], dst: Place, src: Place, nbytes: int, stream: Stream
    ) -> None:
        """In the legacy default stream, a copy between two devices comes after everything queued on both and
        before everything queued later (CUDA programming guide, "Peer-to-Peer Memory Copy")."""
        streams = [each for context in contexts for each in self.node.timeline.streams_of(context)]
        before = tuple(each.last for each in streams if each.last is not None)
        self._submit(stream, "wait of a copy between devices for both", after=before)
        self._submit_copy(dst, src, nbytes, stream, block=False)
        assert stream.last is not None
        for other in streams:
            if other is not stream and not other.destroyed:
                self._submit(other, "wait for a copy between devices", after=(stream.last,))

    def _submit_copy(self, dst: Place, src: Place, nbytes: int, stream: Stream, *, block: bool) -> None:
        device = stream.context.device
        staged = src.device is None and not src.pinned and stream.capture is None
        data = host_bytes(src.address, nbytes).copy() if staged else None

        def move(lo: int, hi: int, time_s: float) -> None:
            size = hi - lo
            if dst.memory is not None and src.memory is not None:
                dst.memory.copy(dst.at + lo, src.memory, src.at + lo, size)
            elif src.memory is not None:
                host_bytes(dst.address + lo, size)[:] = src.memory.read(src.at + lo, size)
            else:
                read = data[lo:hi] if data is not None else host_bytes(src.address + lo, size)
                if dst.memory is not None:
                    dst.memory.write(dst.at + lo, read)
                else:
                    host_bytes(dst.address + lo, size)[:] = read
            for place, write in ((src, False), (dst, True)):
                if place.device is not None:
                    self._touch(place.device, place.at + lo, size, write=write)
            self._tell(dst, lo, hi, time_s)

        way = self._way(dst, src)
        label = f"copy of {nbytes} bytes from {src.address:#x} to {dst.address:#x}{way} on {stream.name}"
        startup_s, pace = device.profile.host.copy_startup_us * 1e-6, self._pace(device, dst, src)
        cost_s = self._launch_cost_s(device)
        unit = _engine(device, dst, src)
        operation = self._submit(
            stream,
            label,
            begin=lambda start_s: Transfer(piece_ends(nbytes), start_s + startup_s, pace, move),
            unit=unit,
            host_cost_s=cost_s,
        )
        within_host = dst.device is None and src.device is None
        if block or within_host or (dst.device is None and not dst.pinned):
            self._finish(operation)

    def _pace(self, device: DeviceState, dst: Place, src: Place) -> Callable[[int, float], float]:
        """When bytes that are sent at some time have landed: over links, or inside of a device."""
        if src.device is dst.device:
            rate = _rate_within(device, dst)
            return lambda nbytes, at_s: at_s + nbytes / rate
        links = self.node.links
        pinned = all(place.device is not None or place.pinned for place in (src, dst))
        ends = [HOST if place.device is None else place.device.ordinal for place in (src, dst)]
        hops = [(ends[0], ends[1])]
        if HOST not in ends and self._staged(dst, src):
            hops = [(ends[0], HOST), (HOST, ends[1])]
        numa_node = src.numa_node if src.device is None else dst.numa_node

        def pace(nbytes: int, at_s: float) -> float:
            at = np.array([at_s * 1e9])
            for one, other in hops:
                at = links.send(one, other, at, np.array([nbytes]), pinned=pinned, numa_node=numa_node)
            return float(at[0]) * 1e-9

        return pace

    def _way(self, dst: Place, src: Place) -> str:
        """ " over NVLink": what a copy passes, for reports."""
        if src.device is dst.device:
            return ""
        if src.device is None or dst.device is None:
            return " over PCIe"
        return " through the host" if self._staged(dst, src) else " over NVLink"

    def _staged(self, dst: Place, src: Place) -> bool:
        """Whether a copy between devices goes through the host: no mapping leads there, and neither has
        access to the other."""
        assert dst.device is not None and src.device is not None
        mapped = dst.address != dst.at or src.address != src.at
        return not mapped and not self.process.direct(dst.device, src.device)

    def _tell(self, place: Place, lo: int, hi: int, time_s: float) -> None:
        """Bytes lo to hi at a place have changed: whoever polls them goes on."""
        if place.device is not None:
            self.node.landed(place.device, place.at + lo, place.at + hi, time_s * 1e9)
        else:
            self.node.timeline.look(time_s)

    def _touch(self, device: DeviceState, address: int, nbytes: int, *, write: bool) -> None:
        """Let a copy pass through the device's L2, and count it."""
        if write:
            device.counters.copy_engine_write_bytes += nbytes
        else:
            device.counters.copy_engine_read_bytes += nbytes
        if self.node.clocked:
            first = (address - device.memory.base) // LINE_BYTES
            last = (address + nbytes - 1 - device.memory.base) // LINE_BYTES
            device.l2.touch(np.arange(first, last + 1, dtype=np.int64), write)

    # ------------------------------------------------------------------------------------------- memsets

    @entry(0)
    def cuMemsetD8(self, dstDevice: Any, uc: int, N: int) -> None:
        self._set(dstDevice, uc, N, 1, 0, block=True)

    @entry(0)
    def cuMemsetD16(self, dstDevice: Any, us: int, N: int) -> None:
        self._set(dstDevice, us, N, 2, 0, block=True)

    @entry(0)
    def cuMemsetD32(self, dstDevice: Any, ui: int, N: int) -> None:
        self._set(dstDevice, ui, N, 4, 0, block=True)

    @entry(0)
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, uc, N, 1, hStream, block=False)

    @entry(0)
    def cuMemsetD16Async(self, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, us, N, 2, hStream, block=False)

    @entry(0)
    def cuMemsetD32Async(self, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, ui, N, 4, hStream, block=False)

    def _set(self, dst: Any, value: int, count: int, width: int, stream: Any, *, block: bool) -> None:
        """Set ``count`` elements of ``width`` bytes; the host waits only for host memory."""
        address, nbytes = int(dst), int(count) * width
        if address % width:
            raise invalid(f"dstDevice must be {width}-byte aligned, got {address:#x}")
        if count < 0 or not 0 <= int(value) < 1 << (8 * width):
            raise invalid(
                f"N must not be negative and the value fit in {width} bytes, got {count} and {value}"
            )
        place, where = self._place(address, nbytes, "dstDevice", on_device=True), self._stream(stream)
        if nbytes == 0:
            return
        pattern = int(value).to_bytes(width, "little")

        def fill(lo: int, hi: int, time_s: float) -> None:
            if place.device is None or place.memory is None:
                host_bytes(address, nbytes)[:] = np.frombuffer(pattern * count, np.uint8)
            else:
                place.memory.fill(place.at, nbytes, pattern)
                self._touch(place.device, place.at, nbytes, write=True)
            self._tell(place, lo, hi, time_s)

        device = where.context.device
        spec, host = device.profile.device, device.profile.host
        rate = spec.peak_memory_gbps * 1e9 * device.profile.dram.write_efficiency
        seconds = host.copy_startup_us * 1e-6 + nbytes / rate
        operation = self._submit(
            where,
            f"memset of {nbytes} bytes on {where.name}",
            begin=lambda start_s: Transfer([nbytes], start_s, lambda _, at_s: at_s + seconds, fill),
            gap_s=host.kernel_gap_us * 1e-6,
            host_cost_s=self._launch_cost_s(device),
        )
        if block and place.device is None:
            self._finish(operation)


def _rate_within(device: DeviceState, dst: Place) -> float:
    """Bytes per second inside a device, where every byte is read and written, or inside the host."""
    host, spec = device.profile.host, device.profile.device
    if dst.device is None:
        return (host.pcie_pinned_gbps if dst.pinned else host.pcie_pageable_gbps) * 1e9
    return spec.peak_memory_gbps * 1e9 * host.copy_device_efficiency / 2


def _engine(device: DeviceState, dst: Place, src: Place) -> Unit:
    """One copy engine per direction to the host; the rest, or the last, for what stays among devices."""
    engines = device.copy_engines
    if src.device is None:
        return engines[0]
    if dst.device is None:
        return engines[1 % len(engines)]
    rest = engines[2:] or engines[-1:]
    return rest[dst.device.ordinal % len(rest)]
