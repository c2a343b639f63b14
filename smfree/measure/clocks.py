"""The SM clock while a point was measured: ratio of two clocks of one SM, and what the driver says about
throttling."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

#: %globaltimer ticks every 32 ns to 1 us; below this many nanoseconds the ratio means nothing.
MIN_RATIO_NS = 20_000

#: A sample whose clock is below this share of the fastest seen on the device is dropped and repeated.
THROTTLE_SHARE = 0.97


def clock_ratio_mhz(cycles: float, nanoseconds: float) -> float | None:
    """SM clock in MHz = delta clock64 / delta globaltimer; None when the window is too short for the
    timer's tick."""
    if nanoseconds < MIN_RATIO_NS or cycles <= 0:
        return None
    return cycles / nanoseconds * 1e3


@dataclass(slots=True)
class ClockWatch:
    """Remembers the fastest SM clock of a device and says which samples ran slower."""

    fastest_mhz: float = 0.0

    def throttled(self, mhz: float | None) -> bool:
        """Whether a sample at ``mhz`` ran on a reduced clock; unknown counts as not."""
        if mhz is None:
            return False
        self.fastest_mhz = max(self.fastest_mhz, mhz)
        return mhz < THROTTLE_SHARE * self.fastest_mhz


def throttle_reasons(uuid: str) -> str:
    """Active clock-event reasons of a real GPU as nvidia-smi prints them; empty when it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None or not uuid:
        return ""
    query = "--query-gpu=clocks.sm,clocks_event_reasons.active"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits", "-i", uuid],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
