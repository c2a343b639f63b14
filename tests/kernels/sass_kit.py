"""What tests look for in SASS."""

from __future__ import annotations

from collections.abc import Sequence

from smfree.cuda.sass import SassInstruction


def poll_turns(found: Sequence[SassInstruction]) -> list[Sequence[SassInstruction]]:
    """One turn of every wait for a peer: from the load of the abort word to the branch back."""
    turns = []
    loads = [at for at, one in enumerate(found) if one.opcode == "LDG.E.STRONG.SYS"]
    for first, second in zip(loads[::2], loads[1::2], strict=True):
        branches = [at for at in range(second, len(found)) if found[at].stem == "BRA" and found[at].guard]
        turns.append(found[first : branches[1] + 1])  # the first leaves, the second goes round
    return turns
