"""What the two prefetching copies have in common: how far ahead, and how long the L2 keeps what they load."""

from __future__ import annotations

from enum import Enum

from kernels.common import check_whole, require

MAX_AHEAD = 1024


class Policy(Enum):
    """A hint of the loads to the L2, made by ``createpolicy`` (PTX ISA, "Cache Eviction Priority Hints")."""

    NORMAL = "normal"
    EVICT_FIRST = "evict first"
    EVICT_LAST = "evict last"


def check_ahead(ahead: int, num_stages: int, policy: Policy) -> None:
    """The prefetch distance, in tiles of a CTA, lies beyond the loads in flight. Raises ConfigError."""
    check_whole("ahead", ahead)
    require(
        ahead == 0 or num_stages <= ahead <= MAX_AHEAD,
        f"ahead is 0 (no prefetch) or {num_stages} (the tiles before are being loaded) to {MAX_AHEAD}",
        ahead,
        f"use {2 * num_stages}",
    )
    require(isinstance(policy, Policy), "policy is a Policy", policy, "use Policy.NORMAL")
