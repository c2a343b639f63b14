"""What a client sees of the node beyond driver calls: its settings, its findings, its devices' records."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from smfree.emulator import errors
from smfree.emulator.counters import Counters
from smfree.emulator.node import TIMED, LaunchRecord, Strict
from smfree.emulator.profile import Profile
from smfree.emulator.profile import load as load_profile
from smfree.emulator.server.link import Link


class RemoteNode:
    """The served node, as far as another process may see it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.schedule: str = link.info["schedule"]
        self.seed: int = link.info["seed"]
        self.strict = Strict(link.info["strict"])
        self.devices = [
            RemoteDeviceState(link, ordinal, key) for ordinal, key in enumerate(link.info["profiles"])
        ]

    @property
    def clocked(self) -> bool:
        """Whether times mean anything: only under the timed schedule."""
        return self.schedule == TIMED

    @property
    def findings(self) -> list[errors.EmulationError]:
        """What ``strict="record"`` collected on the whole node, oldest first."""
        return [_finding(each) for each in self._link.request("findings", ())[0]]


class RemoteDeviceState:
    """One device of the served node."""

    def __init__(self, link: Link, ordinal: int, key: str) -> None:
        self._link = link
        self._key = key
        self.ordinal = ordinal
        self.l2 = RemoteL2(link, ordinal)

    @cached_property
    def profile(self) -> Profile:
        return load_profile(self._key)

    @property
    def last_launch(self) -> LaunchRecord | None:
        """The kernel that finished last on the device, whichever process launched it."""
        found = self._link.request("last_launch", (self.ordinal,))[0]
        if found is None:
            return None
        parts = {
            "counters": Counters(**found["counters"]),
            "findings": tuple(map(_finding, found["findings"])),
        }
        return LaunchRecord(**{**found, **parts})

    @property
    def counters(self) -> Counters:
        """Totals over every launch on the device."""
        return Counters(**self._link.request("counters", (self.ordinal,))[0])

    @property
    def trace(self) -> None:
        """Always None: see the setter."""
        return None

    @trace.setter
    def trace(self, trace: Any) -> None:
        if trace is not None:
            raise NotImplementedError(
                "a node served by another process records no trace; open its devices in one process "
                "(Device.open_all) without SMFREE_NODE"
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a device of a served node cannot be seen from here; only its profile, last_launch, "
            "counters and l2.flush() can"
        )


class RemoteL2:
    """The L2 cache of a device of the served node."""

    def __init__(self, link: Link, ordinal: int) -> None:
        self._link = link
        self._ordinal = ordinal

    def flush(self) -> None:
        """Empty it; what is dirty is written back."""
        self._link.request("flush_l2", (self._ordinal,))


def _finding(fields: dict[str, Any]) -> errors.EmulationError:
    kind = getattr(errors, fields["type"], errors.EmulationError)
    if not isinstance(kind, type) or not issubclass(kind, errors.EmulationError) or kind is errors.PtxError:
        kind = errors.EmulationError
    found = kind(fields["message"], rule=fields["rule"], severity=errors.Severity(fields["severity"]))
    return found if fields["where"] is None else found.locate(fields["where"])
