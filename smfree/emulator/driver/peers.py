"""Several devices of one process: who may use whose memory, and copies between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import Needs, entry
from smfree.emulator.driver.copies import CopyCalls
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.memory import Place
from smfree.emulator.node import DeviceState
from smfree.emulator.process import Context
from smfree.emulator.streams import Stream

_ORDER_DURING_CALL, _ORDER_LAST = 2, 3
_FAIL_INDEX = "failIdx" in (getattr(getattr(cuda, "cuMemcpyBatchAsync", None), "__doc__", "") or "")
"""CUDA 12's cuMemcpyBatchAsync also returns the index of the copy that failed."""
_NO_INDEX = 2**64 - 1


def can_access(device: DeviceState, peer: DeviceState) -> bool:
    """Whether kernels of one device can use memory of another: both of one major compute capability."""
    same = device.profile.device.compute_major == peer.profile.device.compute_major
    return device is not peer and same


class PeerCalls(CopyCalls):
    """cuDeviceCanAccessPeer, cuDeviceGetP2PAttribute, cuCtx*PeerAccess, cuMemcpyPeer*, cuMemcpyBatchAsync."""

    @entry(1, Needs.INIT)
    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        return int(can_access(self._device_at(dev), self._device_at(peerDev)))

    @entry(1, Needs.INIT)
    def cuDeviceGetP2PAttribute(self, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
        src, dst = self._device_at(srcDevice), self._device_at(dstDevice)
        if src is dst:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_DEVICE,
                f"srcDevice and dstDevice are both {src.ordinal}; give two",
            )
        match attrib.name.removeprefix("CU_DEVICE_P2P_ATTRIBUTE_"):
            case "ACCESS_SUPPORTED" | "NATIVE_ATOMIC_SUPPORTED":
                return int(can_access(src, dst))
            case "PERFORMANCE_RANK":  # all pairs are linked alike
                return 0
            case "CUDA_ARRAY_ACCESS_SUPPORTED" | "ACCESS_ACCESS_SUPPORTED":  # there are no arrays here
                return 0
            case "ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED":
                return 0
        raise invalid(f"the emulator has no answer for {attrib.name}")

    # -------------------------------------------------------------------------------------------- access

    @entry(0)
    def cuCtxEnablePeerAccess(self, peerContext: Any, Flags: int) -> None:
        context, peer = self._context(), self._context_of(peerContext)
        if int(Flags) != 0:
            raise invalid(f"Flags must be 0, got {Flags}")
        if peer is context:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CONTEXT,
                f"the current context, of device {context.ordinal}, is the peer itself; make the context "
                "that wants access current",
            )
        if not can_access(context.device, peer.device):
            raise Refusal(
                CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                f"device {context.ordinal} ({context.device.profile.device.name}) cannot access memory of "
                f"device {peer.ordinal} ({peer.device.profile.device.name}); ask cuDeviceCanAccessPeer first",
            )
        if peer.ordinal in context.peers:
            raise Refusal(
                CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
                f"access from device {context.ordinal} (current) to device {peer.ordinal} is enabled "
                "already; nothing is wrong, go on",
            )
        context.peers.add(peer.ordinal)

    @entry(0)
    def cuCtxDisablePeerAccess(self, peerContext: Any) -> None:
        context, peer = self._context(), self._context_of(peerContext)
        if peer.ordinal not in context.peers:
            raise Refusal(
                CUresult.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
                f"access from device {context.ordinal} (current) to device {peer.ordinal} is not enabled (it "
                "is one-directional)",
            )
        context.peers.remove(peer.ordinal)

    # -------------------------------------------------------------------------------------------- copies

    @entry(0)
    def cuMemcpyPeer(
        self, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int
    ) -> None:
        """Ordered with everything in both contexts: behind what is queued, before what follows."""
        dst, src = self._pair(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
        contexts = {self._context_of(dstContext), self._context_of(srcContext)}
        self._copy_between(contexts, dst, src, int(ByteCount), self._stream(0))

    @entry(0)
    def cuMemcpyPeerAsync(
        self, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
    ) -> None:
        stream = self._stream(hStream)
        dst, src = self._pair(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
        self._copy(dst, src, int(ByteCount), stream, block=False)

    def _pair(self, dst: Any, to: Any, src: Any, origin: Any, nbytes: int) -> tuple[Place, Place]:
        return (
            self._of_context("dstDevice", int(dst), nbytes, self._context_of(to)),
            self._of_context("srcDevice", int(src), nbytes, self._context_of(origin)),
        )

    def _of_context(self, role: str, address: int, nbytes: int, context: Context) -> Place:
        """The device memory at ``address``, which must be of ``context`` or opened by it."""
        place = self._place(address, int(nbytes), role, on_device=True)
        opened = self.process.space.find(address)
        if place.device is not context.device and (opened is None or opened.start not in context.imports):
            where = "the host" if place.device is None else f"device {place.device.ordinal}"
            raise invalid(
                f"{role} {address:#x} is memory of {where}, its context that of device {context.ordinal}; "
                "give the context that allocated it"
            )
        return place

    if hasattr(cuda, "cuMemcpyBatchAsync"):  # since CUDA 12.8

        @entry(int(_FAIL_INDEX))
        def cuMemcpyBatchAsync(
            self,
            dsts: Any,
            srcs: Any,
            sizes: Any,
            count: int,
            attrs: Any,
            attrsIdxs: Any,
            numAttrs: int,
            hStream: Any,
        ) -> Any:
            """Copies between the same two memories run one after the other, those that differ at once."""
            stream = self._stream(hStream)
            if stream.legacy:
                raise invalid("hStream must not be the legacy default stream; create one")
            if stream.capture is not None:
                raise self._break(
                    stream.capture,
                    CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                    f"cuMemcpyBatchAsync while {stream.name} captures; a graph has no such node, use "
                    "cuMemcpyAsync",
                )
            orders = _orders(dsts, srcs, sizes, int(count), attrs, attrsIdxs, int(numAttrs))
            copies = [
                (
                    self._place(int(dsts[i]), int(sizes[i]), f"dsts[{i}]"),
                    self._source(int(srcs[i]), int(sizes[i]), i, order),
                    int(sizes[i]),
                )
                for i, order in enumerate(orders)
            ]
            _check_independent(copies)
            self._submit_batch(copies, stream)
            return _NO_INDEX if _FAIL_INDEX else None

    def _submit_batch(self, copies: Sequence[tuple[Place, Place, int]], stream: Stream) -> None:
        """Between two marks in ``stream``, in one lane per pair of memories."""
        begin = self._submit(stream, f"begin of a batch of {len(copies)} copies")
        lanes = []
        for dst, src, nbytes in copies:
            lane = stream.context.lane(stream, (dst.device, src.device))
            if lane not in lanes:
                lanes.append(lane)
                self._submit(lane, "wait for the batch's turn", after=(begin,))
            self._copy(dst, src, nbytes, lane, block=False)
        ends = tuple(lane.last for lane in lanes if lane.last is not None)
        self._submit(stream, "end of a batch", after=ends)

    def _source(self, address: int, nbytes: int, index: int, order: int) -> Place:
        place = self._place(address, nbytes, f"srcs[{index}]")
        if order != _ORDER_DURING_CALL:
            return place
        if place.device is not None:
            raise unsupported(
                f"srcs[{index}] is device memory with CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, which is "
                "not emulated; use CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"
            )
        return Place(address)  # read now, like pageable memory


def _orders(
    dsts: Sequence[Any], srcs: Sequence[Any], sizes: Sequence[Any], count: int,
    attrs: Sequence[Any], starts: Sequence[Any], num_attrs: int,
) -> list[int]:  # fmt: skip
    """The access order of each copy; every rule on the arrays of a batch."""
    for name, values in (("dsts", dsts), ("srcs", srcs), ("sizes", sizes)):
        if len(values or ()) < count:
            raise invalid(f"count is {count}, {name} has {len(values or ())} entries")
    for name, values in (("attrs", attrs), ("attrsIdxs", starts)):
        if len(values or ()) < num_attrs:
            raise invalid(f"numAttrs is {num_attrs}, {name} has {len(values or ())} entries")
    if not 1 <= num_attrs <= count:
        raise invalid(f"numAttrs must be 1..count, got {num_attrs} for {count} copies")
    bounds = [int(start) for start in starts[:num_attrs]] + [count]
    if bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise invalid(f"attrsIdxs must begin with 0 and rise below count ({count}), got {bounds[:-1]}")
    orders = []
    for k in range(num_attrs):
        order = int(attrs[k].srcAccessOrder)
        if not 1 <= order <= _ORDER_LAST:
            raise invalid(
                f"attrs[{k}].srcAccessOrder must be one of CU_MEMCPY_SRC_ACCESS_ORDER_*, got {order}"
            )
        orders += [order] * (bounds[k + 1] - bounds[k])
    return orders


def _check_independent(copies: Sequence[tuple[Place, Place, int]]) -> None:
    """Refuse a batch in which one copy writes what another reads or writes: CUDA leaves it undefined."""
    ranges = [
        (
            place.device.ordinal if place.device is not None else -1,
            place.at or place.address,
            nbytes,
            i,
            writes,
        )
        for i, (dst, src, nbytes) in enumerate(copies)
        for place, writes in ((dst, True), (src, False))
        if nbytes
    ]
    ranges.sort()
    reach: dict[bool, tuple[int, int, int]] = {}  # by writes: device, end and index of the farthest so far
    for device, start, nbytes, i, writes in ranges:
        for other_writes, (where, end, j) in reach.items():
            if where == device and start < end and i != j and (writes or other_writes):
                raise invalid(
                    f"copies {min(i, j)} and {max(i, j)} of the batch overlap and one of them writes; the "
                    "copies of a batch run in any order: put dependent ones into two batches"
                )
        if writes not in reach or (device, start + nbytes) > reach[writes][:2]:
            reach[writes] = device, start + nbytes, i
