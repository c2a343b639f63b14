"""The SM clock while a point was measured: ratio of two clocks of one SM, and what the driver says about
throttling."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
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


#: How long the GPU rests before a sample on a reduced clock is repeated, and how long in all: a GPU whose
#: clock stays low must not turn minutes into hours.
REST_S = 0.2
MAX_RESTS_S = 20.0

#: nvidia-smi can take a second on a machine with many GPUs, so it is asked this often at most.
ASK_EVERY_S = 15.0


@dataclass(slots=True)
class ClockWatch:
    """Remembers the fastest SM clock of a device and says which samples ran slower."""

    fastest_mhz: float = 0.0
    rests_left_s: float = MAX_RESTS_S
    reasons: str = ""
    asked_at: float = float("-inf")

    def throttled(self, mhz: float | None) -> bool:
        """Whether a sample at ``mhz`` ran on a reduced clock; unknown counts as not."""
        if mhz is None:
            return False
        self.fastest_mhz = max(self.fastest_mhz, mhz)
        return mhz < THROTTLE_SHARE * self.fastest_mhz

    def rest(self) -> bool:
        """Let the GPU cool before a sample is repeated; False when it has rested enough for one run."""
        if self.rests_left_s <= 0.0:
            return False
        self.rests_left_s -= REST_S
        time.sleep(REST_S)
        return True

    def settle(self, mhz: float | None) -> bool:
        """Whether a sample that is kept ran on a reduced clock. If so, that clock is the new reference: rests
        have not brought the old one back."""
        if mhz is None or not self.throttled(mhz):
            return False
        self.fastest_mhz = mhz
        return True

    def ask(self, uuid: str) -> str:
        """What :func:`throttle_reasons` says, asked anew every ``ASK_EVERY_S`` seconds."""
        now = time.monotonic()
        if now - self.asked_at >= ASK_EVERY_S:
            self.reasons = throttle_reasons(uuid)
            self.asked_at = now
        return self.reasons


def throttle_reasons(uuid: str) -> str:
    """SM clock and active clock-event reasons of a real GPU as nvidia-smi prints them; empty when it cannot
    be asked. ``uuid`` in 32 hexadecimal digits."""
    program = shutil.which("nvidia-smi")
    if program is None or not uuid:
        return ""
    query = "--query-gpu=clocks.sm,clocks_event_reasons.active"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits", "-i", smi_name(uuid)],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def smi_name(uuid: str) -> str:
    """How nvidia-smi writes a GPU's 16-byte UUID: ``GPU-`` and 8-4-4-4-12 hexadecimal digits."""
    digits = uuid.replace("-", "").lower()
    return re.sub(r"^(.{8})(.{4})(.{4})(.{4})(.{12})$", r"GPU-\1-\2-\3-\4-\5", digits)
