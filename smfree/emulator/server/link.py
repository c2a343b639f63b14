"""The client's side of the wire: one lifeline per process, one connection per thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from smfree.emulator.driver import NotEmulated
from smfree.emulator.driver.base import calling_line
from smfree.emulator.server.channel import PROTOCOL, Channel, ChannelClosed, close_all, connect
from smfree.emulator.server.wire import WireError

_RAISED = {kind.__name__: kind for kind in (TypeError, ValueError, OverflowError, NotEmulated)}


class NodeLost(ConnectionError):
    """The process that serves the emulated node is gone, refused this one, or was never there."""


class NodeFailure(RuntimeError):
    """The emulator itself failed in the process that serves the node. Carries its traceback."""


class Link:
    """A client process's way to the node at ``address``. ``info``: what the server says of its node.

    Raises NodeLost when there is no server, or it belongs to another user.
    """

    def __init__(self, address: str, label: str = "") -> None:
        self.address = address
        self.pid = os.getpid()
        self.lost = ""
        """Why the server cannot be reached any more."""
        self._threads = threading.local()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._lifeline, answer = self._open({"protocol": PROTOCOL, "token": None, "label": label})
        self._token: str = answer["token"]
        self.server_pid: int = answer["pid"]
        self.info: dict[str, Any] = answer["node"]
        os.register_at_fork(after_in_child=_forget_in_child(weakref.ref(self)))

    def _open(self, greeting: dict[str, Any]) -> tuple[Channel, dict[str, Any]]:
        try:
            channel = connect(self.address)
            channel.send(greeting)
            answer, fds = channel.receive()
            close_all(fds)
        except (OSError, WireError) as error:
            raise NodeLost(
                f"no process serves an emulated node at {self.address!r} ({error}); start it anew"
            ) from None
        if "refused" in answer:
            channel.close()
            raise NodeLost(f"the process that serves {self.address!r} refused this one: {answer['refused']}")
        self._channels.add(channel)
        return channel, answer

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that attached."""
        return self.pid != os.getpid()

    def _take(self) -> Channel:
        """An idle connection of the calling thread. One is the rule; garbage collection can strike within a
        call, and what it frees takes a second one."""
        idle: list[Channel] | None = getattr(self._threads, "idle", None)
        if idle is None:
            idle = self._threads.idle = []
        if idle:
            return idle.pop()
        greeting = {"protocol": PROTOCOL, "token": self._token, "thread": threading.current_thread().name}
        return self._open(greeting)[0]

    def request(
        self, name: str, arguments: tuple[Any, ...], fds: Sequence[int] = (), into: memoryview | None = None
    ) -> tuple[Any, str, list[int]]:
        """Have the server carry out ``name``: what it returned, the report of a failure, descriptors.

        Raises NodeLost, what the emulated driver raised for a wrong argument, or NodeFailure.
        """
        if self.lost:
            raise NodeLost(self.lost)
        if self.forked:
            raise NodeLost("a driver does not survive a fork; start processes with the method 'spawn'")
        try:
            channel = self._take()
            try:
                channel.send((name, calling_line(), threading.active_count(), arguments), fds)
                reply, received = channel.receive(into)
            except (TypeError, OverflowError):
                self._threads.idle.append(channel)  # nothing was sent
                raise
            except BaseException:
                channel.close()  # half a message may be on its way
                raise
            self._threads.idle.append(channel)
        except (ChannelClosed, WireError, NodeLost) as error:
            self.lost = (
                f"the process that serves the emulated node (pid {self.server_pid}) is gone: {error}; {name} "
                "has no answer, and what was on its devices is lost. Start the node and its clients again"
            )
            raise NodeLost(self.lost) from None
        if isinstance(reply, dict):
            self.lost = (
                f"the process that serves the emulated node sent this one away: {reply.get('refused')}"
            )
            raise NodeLost(self.lost)
        kind, first, second = reply
        if kind == "error":
            close_all(received)
            raise _RAISED.get(first, NodeFailure)(second)
        return first, second, received

    def close(self) -> None:
        """Leave the node: the server ends what this process had there."""
        self.lost = self.lost or "this process has left the node"
        for channel in list(self._channels):
            channel.close()


def _forget_in_child(link: weakref.ref[Link]) -> Any:
    """A forked child must not keep its parent's connections open."""

    def forget() -> None:
        found = link()
        if found is not None:
            for channel in list(found._channels):
                channel.socket.close()

    return forget
