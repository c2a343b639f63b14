"""The clock: a first-order cost model of one GPU, not a cycle simulator.

All times are float64 SM cycles since the start of the launch. Every method takes arrays over requests (one
per warp, or one per bulk copy) and returns arrays of the same length. Nothing here is a measurement: see
docs/emulator.md, "The clock", for what is modelled and what is not.

A transfer passes three queues: its engine on its SM, the L2 and, for what misses, DRAM. Bytes stream through
them, so a transfer ends when the slowest of the three has passed its last byte, plus the latency.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smfree.emulator.errors import Unsupported
from smfree.emulator.l2 import L2
from smfree.emulator.profile import Profile
from smfree.emulator.servers import ServerBank
from smfree.emulator.specs import SECTOR_BYTES, EngineSpec, TmaSpec

__all__ = ["L2", "Clock"]

F8 = NDArray[np.floating[Any]]
I8 = NDArray[np.int64]


class Clock:
    """What every queue of the GPU has promised in the running launch.

    ``sm`` is the SM of each request (0 .. num_sms-1), ``t`` its arrival in cycles. Requests of one call and
    of several calls may come in any order of time; see :mod:`smfree.emulator.servers`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        device, sync = profile.device, profile.sync
        self.clock_mhz = device.sm_clock_mhz
        self.alu_latency = profile.issue.dependent_cycles
        self.bar_sync_cycles = sync.bar_sync_cycles
        self.mbarrier_arrive_cycles = sync.mbarrier_arrive_cycles
        self.mbarrier_wait_hit_cycles = sync.mbarrier_wait_hit_cycles
        self.mbarrier_wait_wake_cycles = sync.mbarrier_wait_wake_cycles
        links = profile.cluster
        self.cluster_store_cycles = links.store_latency_cycles if links else 0.0
        self.cluster_barrier_cycles = links.barrier_cycles if links else sync.bar_sync_cycles
        self.fence_cycles = {
            "cta": sync.fence_cta_cycles,
            "cluster": sync.fence_gpu_cycles,
            "gpu": sync.fence_gpu_cycles,
            "sys": sync.fence_sys_cycles,
            "proxy": sync.fence_proxy_cycles,
        }
        self._issue_rate = float(profile.issue.schedulers_per_sm)
        self._wavefront_cycles = 128.0 / profile.shared.bytes_per_cycle
        peak = device.peak_memory_gbps * 1e3 / device.sm_clock_mhz  # DRAM bytes per SM cycle
        self._read_cycles_per_byte = 1.0 / (peak * profile.dram.read_efficiency)
        self._write_cycles_per_byte = 1.0 / (peak * profile.dram.write_efficiency)
        self._turn_cycles_per_byte = profile.dram.turnaround / peak
        sms = device.num_sms
        self._cluster = ServerBank(2 * sms if links else 0)  # ports of the asking, then of the asked SMs
        self._schedulers = ServerBank(sms)
        self._shared = ServerBank(sms)
        self._lsu = ServerBank(sms)
        self._store = ServerBank(sms)
        self._tma = ServerBank(sms)
        self._tensor = ServerBank(sms)
        self._l2 = ServerBank(1)
        self._dram = ServerBank(1)
        self._dram_read = self._dram_written = 0.0
        self.origin_ns = 0.0

    def reset(self, origin_ns: float = 0.0) -> None:
        """Forget all promises: a new launch starts at cycle 0, which is ``origin_ns`` of the node's clock."""
        self.origin_ns = origin_ns
        self._cluster.reset()
        for bank in (self._schedulers, self._shared, self._lsu, self._store, self._tma, self._l2, self._dram):
            bank.reset()
        self._tensor.reset()
        self._dram_read = self._dram_written = 0.0

    def seconds(self, cycles: float) -> float:
        """Modelled seconds of ``cycles`` SM cycles."""
        return cycles / (self.clock_mhz * 1e6)

    def issue(self, sm: I8, t: F8, instructions: float) -> F8:
        """When each of n warps has issued a straight run of ``instructions``.

        A warp alone takes ``issue.dependent_cycles`` for each; the SM issues one per scheduler and cycle.
        """
        slots = np.full(len(t), instructions / self._issue_rate)
        return np.maximum(self._schedulers.serve(sm, t, slots), t + instructions * self.alu_latency)

    def mma(self, sm: I8, t: F8, multiply_adds: float) -> F8:
        """When each warp's matrix product of so many multiply-adds of .f16 is in registers."""
        spec = self.profile.issue
        work = np.full(len(t), multiply_adds / spec.mma_fma_per_cycle)
        return np.maximum(self._tensor.serve(sm, t, work), t + spec.mma_latency_cycles)

    def shared(self, sm: I8, t: F8, wavefronts: I8) -> F8:
        """When the results of shared-memory requests of ``wavefronts`` each are in registers (or stored)."""
        done = self._shared.serve(sm, t, wavefronts * self._wavefront_cycles)
        return done + (self.profile.shared.latency_cycles - self._wavefront_cycles)

    def global_load(self, sm: I8, t: F8, nbytes: I8, sectors: I8, hit_bytes: I8, *, path: str = "lsu") -> F8:
        """When the data of warp-wide loads is there: in registers (``"lsu"``) or in shared (``"cp.async"``).

        ``nbytes`` are the bytes the lanes asked for, ``sectors`` the distinct 32-byte sectors, ``hit_bytes``
        the part of ``32 * sectors`` found in L2. A request that misses in part pays the DRAM latency.
        """
        engine = self.profile.cp_async if path == "cp.async" else self.profile.lsu
        moved = sectors * float(SECTOR_BYTES)
        missed = np.where(hit_bytes >= nbytes, 0.0, np.maximum(moved - hit_bytes, 0.0))
        latency = self._load_latency(missed) + engine.startup_cycles
        work = self._engine_cycles(engine, moved, latency)
        done = self._lsu.serve(sm, t, work)
        return np.maximum(done, self._memory(done - work, moved, missed, write=False)) + latency

    def global_store(self, sm: I8, t: F8, nbytes: I8, sectors: I8, miss_bytes: I8) -> tuple[F8, F8]:
        """``(accepted, performed)``: when the warp may go on, and when all of the GPU sees the data.

        ``miss_bytes`` are the written bytes whose lines were not in L2; they are charged to DRAM.
        """
        moved = sectors * float(SECTOR_BYTES)
        latency = self.profile.l2.write_latency_cycles
        work = self._engine_cycles(self.profile.lsu, moved, np.full(len(t), latency))
        done = self._store.serve(sm, t, work)
        performed = np.maximum(done, self._memory(done - work, moved, miss_bytes, write=True)) + latency
        return done, performed

    def cluster(self, sm: I8, peer: I8, t: F8, nbytes: I8, *, write: bool) -> F8:
        """When requests of SM ``sm`` for ``nbytes`` of the shared memory of SM ``peer`` are done.

        A load when its data is in registers, a ``write`` (store, arrival) when it is visible there. Each byte
        passes a port of both SMs; an SM that asks itself has its shared memory's latency.
        """
        links = self.profile.cluster
        if links is None:
            raise Unsupported(
                f"{self.profile.device.name} has no clusters: they need compute capability 9.0",
                rule="cluster.absent",
            )
        done = t + self.profile.shared.latency_cycles
        far = np.flatnonzero(sm != peer)
        if len(far):
            work = nbytes[far] / links.bytes_per_cycle
            sent = self._cluster.serve(sm[far], t[far], work)
            taken = self._cluster.serve(peer[far] + self.profile.device.num_sms, t[far], work)
            latency = links.store_latency_cycles if write else links.latency_cycles
            done[far] = np.maximum(sent, taken) - work + latency
        return done

    def bulk_load(
        self, sm: I8, t: F8, nbytes: I8, hit_bytes: I8, requests: I8, *, tensor: bool = False
    ) -> F8:
        """When bulk (or ``tensor``) copies to shared memory complete on their mbarriers.

        ``requests`` is how many requests the TMA unit handles for the copy: 1, or its instructions' number.
        Raises Unsupported when the profile has no TMA.
        """
        tma = self._require_tma()
        missed = np.maximum(nbytes - hit_bytes, 0) * 1.0
        latency = self._load_latency(missed) + tma.startup_cycles
        if tensor:
            latency = latency + tma.tensor_startup_cycles
        begin, done = self._tma_pass(tma, sm, t, nbytes, requests, latency)
        return np.maximum(done, self._memory(begin, nbytes * 1.0, missed, write=False)) + latency

    def bulk_store(
        self,
        sm: I8,
        t: F8,
        nbytes: I8,
        miss_bytes: I8,
        requests: I8,
        *,
        tensor: bool = False,
        reduces: bool = False,
    ) -> tuple[F8, F8]:
        """``(source_read, performed)`` of bulk (or ``tensor``) copies from shared memory.

        ``source_read`` is what ``cp.async.bulk.wait_group.read`` waits for, ``performed`` what the plain form
        waits for. One that ``reduces`` has the missing bytes read from DRAM first. Raises Unsupported when
        the profile has no TMA.
        """
        tma = self._require_tma()
        startup = tma.startup_cycles + (tma.tensor_startup_cycles if tensor else 0.0)
        latency = np.full(len(t), startup + self.profile.l2.write_latency_cycles)
        begin, done = self._tma_pass(tma, sm, t, nbytes, requests, latency)
        performed = np.maximum(done, self._memory(begin, nbytes * 1.0, miss_bytes, write=True)) + latency
        if reduces:
            fetched = self._memory(begin, np.zeros(len(t)), miss_bytes, write=False) + latency
            performed = np.maximum(performed, fetched + self._load_latency(miss_bytes * 1.0))
        return done + startup, performed

    def bulk_cluster(self, sm: I8, peer: I8, t: F8, nbytes: I8) -> tuple[F8, F8]:
        """``(source_read, complete)`` of bulk copies from SM ``sm`` to the shared memory of ``peer``.

        A copy streams through the TMA and through both ports; the slower one decides.
        """
        tma = self._require_tma()
        latency = np.full(len(t), float(tma.startup_cycles))
        begin, sent = self._tma_pass(tma, sm, t, nbytes, np.ones(len(t), np.int64), latency)
        first = self.cluster(sm, peer, begin, nbytes, write=True)
        assert self.profile.cluster is not None  # or that would have said so
        arrived = first + nbytes / self.profile.cluster.bytes_per_cycle
        return sent + latency, np.maximum(arrived, sent) + latency

    def _tma_pass(
        self, tma: TmaSpec, sm: I8, t: F8, nbytes: F8 | I8, requests: I8, latency: F8
    ) -> tuple[F8, F8]:
        """When each copy's first byte enters the memory system and its last byte has left the TMA unit.

        A copy holds the unit for its bytes or its requests, whichever takes longer; the last request's own
        slot delays those behind it, not its data.
        """
        moved = self._engine_cycles(tma, nbytes * 1.0, latency)
        work = np.maximum(moved, requests / tma.requests_per_cycle)
        begin = self._tma.serve(sm, t, work) - work
        stream = np.maximum(moved, nbytes / tma.request_bytes_per_cycle)
        return begin, begin + np.maximum(stream, (requests - 1) / tma.requests_per_cycle)

    # ---------------------------------------------------------------- traffic that leaves or enters the GPU

    def lsu_out(self, sm: I8, t: F8, moved: F8, latency: F8 | float, *, write: bool) -> tuple[F8, F8]:
        """``(begin, done)``: when the first byte of requests to elsewhere leaves its SM, and when the SM's
        port has passed the last. ``latency`` in cycles, there and back, bounds what is in flight."""
        work = self._engine_cycles(self.profile.lsu, moved, np.broadcast_to(latency, len(t)))
        done = (self._store if write else self._lsu).serve(sm, t, work)
        return done - work, done

    def tma_out(
        self, sm: I8, t: F8, nbytes: F8 | I8, latency: F8 | float, *, tensor: bool
    ) -> tuple[F8, F8, float]:
        """The same for one bulk copy each, and the engine's start-up, which every copy pays besides."""
        tma = self._require_tma()
        startup = tma.startup_cycles + (tma.tensor_startup_cycles if tensor else 0.0)
        whole = np.broadcast_to(latency, len(t)) + startup
        begin, done = self._tma_pass(tma, sm, t, nbytes, np.ones(len(t), np.int64), whole)
        return begin, done, startup

    def memory_at(self, t_ns: F8, moved: F8, missed: F8, *, write: bool) -> F8:
        """When this GPU's L2 and DRAM have passed bytes that reach them at ``t_ns`` of the node's clock."""
        per_ns = self.clock_mhz / 1e3
        t = np.maximum((t_ns - self.origin_ns) * per_ns, 0.0)
        return self._memory(t, moved, missed, write=write) / per_ns + self.origin_ns

    def memory_latency_ns(self, missed: F8, *, write: bool) -> F8:
        """What its memory adds to a load, or until a store is performed."""
        if write:
            return np.full(len(missed), self.profile.l2.write_latency_cycles * 1e3 / self.clock_mhz)
        return self._load_latency(missed) * 1e3 / self.clock_mhz

    def _require_tma(self) -> TmaSpec:
        if self.profile.tma is None:
            raise Unsupported(
                f"{self.profile.device.name} has no TMA: bulk and tensor copies need compute capability 9.0; "
                "use cp.async or plain loads",
                rule="tma.absent",
            )
        return self.profile.tma

    def _load_latency(self, missed: F8) -> F8:
        return np.where(missed > 0, self.profile.dram.latency_cycles, self.profile.l2.hit_latency_cycles)

    @staticmethod
    def _engine_cycles(engine: EngineSpec, moved: F8, latency: F8) -> F8:
        """Cycles of the engine: its rate, or the rate its bytes in flight allow at this latency."""
        return moved * np.maximum(1.0 / engine.bytes_per_cycle, latency / engine.max_bytes_in_flight)

    def _memory(self, t: F8, moved: F8, missed: F8 | I8, *, write: bool) -> F8:
        """When L2 and DRAM have passed the bytes of requests that reach them at ``t``."""
        zeros = np.zeros(len(t), dtype=np.int64)
        done = self._l2.serve(zeros, t, moved / self.profile.l2.bytes_per_cycle)
        total = float(missed.sum())
        if total <= 0.0:
            return done
        paired = min(self._dram_read, self._dram_written)
        if write:
            self._dram_written += total
            cost = self._write_cycles_per_byte
        else:
            self._dram_read += total
            cost = self._read_cycles_per_byte
        paired = min(self._dram_read, self._dram_written) - paired
        cost += self._turn_cycles_per_byte * paired / total
        which = np.flatnonzero(missed)
        late = self._dram.serve(zeros[: len(which)], t[which], missed[which] * cost)
        done[which] = np.maximum(done[which], late)
        return done
