"""The clock: a first-order cost model of one GPU, not a cycle simulator.

All times are float64 SM cycles since the start of the launch. Every method takes arrays over requests (one
per warp, or one per bulk copy) and returns arrays of the same length. See docs/emulator.md, "The clock".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smfree.emulator.profile import Profile

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]


class Clock:
    """Server state of one launch: what is busy until when."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.clock_mhz = profile.device.sm_clock_mhz
        self.alu_latency = profile.issue.dependent_cycles
        self.bar_sync_cycles = profile.sync.bar_sync_cycles
        self.mbarrier_arrive_cycles = profile.sync.mbarrier_arrive_cycles
        self.mbarrier_wait_hit_cycles = profile.sync.mbarrier_wait_hit_cycles
        self.mbarrier_wait_wake_cycles = profile.sync.mbarrier_wait_wake_cycles
        self.fence_cycles = {
            "cta": profile.sync.fence_cta_cycles,
            "gpu": profile.sync.fence_gpu_cycles,
            "sys": profile.sync.fence_sys_cycles,
            "proxy": profile.sync.fence_proxy_cycles,
        }

    def reset(self) -> None:
        """Forget all server state: a new launch starts at cycle 0."""

    def issue(self, sm: I8, t: F8, instructions: float) -> F8:
        raise NotImplementedError

    def shared(self, sm: I8, t: F8, wavefronts: I8) -> F8:
        raise NotImplementedError

    def global_load(self, sm: I8, t: F8, nbytes: I8, sectors: I8, hit_bytes: I8, *, path: str = "lsu") -> F8:
        raise NotImplementedError

    def global_store(self, sm: I8, t: F8, nbytes: I8, sectors: I8, miss_bytes: I8) -> tuple[F8, F8]:
        raise NotImplementedError

    def bulk_load(
        self, sm: I8, t: F8, nbytes: I8, hit_bytes: I8, requests: I8, *, tensor: bool = False
    ) -> F8:
        raise NotImplementedError

    def bulk_store(
        self, sm: I8, t: F8, nbytes: I8, miss_bytes: I8, requests: I8, *, tensor: bool = False
    ) -> tuple[F8, F8]:
        raise NotImplementedError


class L2:
    """Which 128-byte lines of the arena are in L2: first in, first out, by bytes."""

    def __init__(self, profile: Profile, arena_lines: int) -> None:
        raise NotImplementedError

    def touch(self, line_ids: I8, write: bool) -> NDArray[np.bool_]:
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError
