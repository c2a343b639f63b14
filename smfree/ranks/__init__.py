"""Ranks: several processes on one host that use one GPU each.

Importing this package initialises nothing: no driver call, no socket, no torch.
"""

from smfree.ranks.errors import (
    PeerLost,
    RankError,
    RankFailed,
    RendezvousMismatch,
    RendezvousTimeout,
)
from smfree.ranks.rendezvous import Rendezvous
from smfree.ranks.unix import UnixRendezvous

__all__ = [
    "PeerLost",
    "RankError",
    "RankFailed",
    "Rendezvous",
    "RendezvousMismatch",
    "RendezvousTimeout",
    "UnixRendezvous",
]
