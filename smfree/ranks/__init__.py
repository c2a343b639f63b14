"""Ranks: processes of one host that use one GPU each, and what they tell each other on the host.

::

    def work(context):                                  # at the top level of a module
        handles = context.rendezvous.all_gather(handle, "ipc handles")
        ...
    spawn(work, 8, device="emu:h100x8")

    with join("cuda") as context:                       # or, under torchrun
        work(context)

Importing this package initialises nothing: no driver call, no socket, no torch.
"""

from smfree.ranks.context import RankContext
from smfree.ranks.environment import from_environment
from smfree.ranks.errors import (
    PeerLost,
    RankError,
    RankFailed,
    RendezvousMismatch,
    RendezvousTimeout,
)
from smfree.ranks.join import join
from smfree.ranks.rendezvous import Rendezvous
from smfree.ranks.spawn import spawn
from smfree.ranks.unix import UnixRendezvous

__all__ = [
    "PeerLost",
    "RankContext",
    "RankError",
    "RankFailed",
    "Rendezvous",
    "RendezvousMismatch",
    "RendezvousTimeout",
    "UnixRendezvous",
    "from_environment",
    "join",
    "spawn",
]
