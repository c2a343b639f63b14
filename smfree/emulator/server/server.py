"""The process that serves a node: accepts clients, gives each a session, and ends when it should.

The first connection of a client process is its lifeline: it carries one greeting, and when it closes, the
client is gone. Every thread of the client that calls the driver has a connection of its own, so that a call
that blocks blocks no other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.node import Node
from smfree.emulator.server.channel import PROTOCOL, Channel, ChannelClosed, check_peer, close_all, listen
from smfree.emulator.server.session import Session
from smfree.emulator.server.shared import SharedHostMemory
from smfree.emulator.server.wire import WireError

GREETING_TIMEOUT_S = 10.0
_ACCEPT_AGAIN_S = 0.01
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that steps kernels may keep the interpreter from one that answers a call."""


class Server:
    """Serves one node on an abstract socket.

    ``host_wait_limit_s`` bounds waits for another process. ``clients``: how many processes will attach (0:
    nobody knows). While some are missing, nothing is a deadlock: they could still act.
    """

    def __init__(
        self,
        profiles: list[str],
        *,
        schedule: str,
        seed: int,
        strict: str,
        host_wait_limit_s: float,
        clients: int = 0,
        address: str = "",
    ) -> None:
        self.host = SharedHostMemory()
        self.node = Node(
            profiles, schedule, seed, strict, host_wait_limit_s=host_wait_limit_s, host=self.host
        )
        self.address = address or f"smfree-node-{secrets.token_hex(8)}"
        self._listener = listen(self.address)
        self._sessions: dict[str, Session] = {}
        self._closed = False
        self._expected = clients
        self._pids: set[int] = set()
        self.node.open_to_others = True
        self._changed = threading.Condition()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def run(self) -> None:
        """Accept clients until the listening socket is closed."""
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor left for one more client
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._greet, args=(Channel(connection),), daemon=True).start()

    def wait_until_empty(self) -> None:
        """Return when no client is there; new ones may still come meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sessions)

    def nobody_is_missing(self) -> None:
        """Whoever will attach has attached."""
        with self.node.lock:
            self.node.open_to_others = False
            self.node.lock.notify_all()

    def close(self) -> None:
        """Accept nobody any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ------------------------------------------------------------------------------------------- clients

    def _greet(self, channel: Channel) -> None:
        """Find out who connects; what greets wrongly is sent away."""
        try:
            pid = check_peer(channel.socket)
            channel.socket.settimeout(GREETING_TIMEOUT_S)
            greeting, fds = channel.receive()
            close_all(fds)
            channel.socket.settimeout(None)
            if not isinstance(greeting, dict) or greeting.get("protocol") != PROTOCOL:
                raise WireError(f"a client of another version of smfree (this one speaks {PROTOCOL})")
            if (token := greeting.get("token")) is None:
                self._lifeline(channel, pid, str(greeting.get("label") or ""))
            elif type(token) is str:
                threading.current_thread().name = str(greeting.get("thread"))
                self._serve(channel, token)
            else:
                raise WireError("a token is text")
        except WireError as error:
            with contextlib.suppress(ChannelClosed):
                channel.send({"refused": str(error)})
        except (OSError, ChannelClosed):
            pass
        finally:
            channel.close()

    def _lifeline(self, channel: Channel, pid: int, label: str) -> None:
        """A new client process, until it is gone."""
        session = Session(self.node, self.host, f"{label} (pid {pid})" if label else f"process {pid}")
        token = secrets.token_hex(16)
        with self._changed:
            self._sessions[token] = session
            self._pids.add(pid)
            if len(self._pids) == self._expected:
                self.nobody_is_missing()
        try:
            channel.send({"token": token, "pid": os.getpid(), "node": self._describe(session)})
            with contextlib.suppress(ChannelClosed):
                channel.receive()  # nothing ever comes, until the end
        finally:
            session.end()
            with self._changed:
                del self._sessions[token]
                self._changed.notify_all()

    def _describe(self, session: Session) -> dict[str, Any]:
        return {
            "label": str(session.driver.process),
            "profiles": [device.profile.key for device in self.node.devices],
            "schedule": self.node.schedule,
            "seed": self.node.seed,
            "strict": str(self.node.strict),
            "cuda": int(cuda.CUDA_VERSION),
        }

    def _serve(self, channel: Channel, token: str) -> None:
        """One thread of a client: its calls, one after the other."""
        session = self._sessions.get(token)
        if session is None:
            raise WireError("the client is not known here, or has ended")
        session.channels.add(channel)
        try:
            channel.send({})
            while True:
                request, fds = channel.receive()
                try:
                    reply, out = session.answer(request, fds)
                finally:
                    close_all(fds)
                try:
                    channel.send(reply, out)
                except (TypeError, OverflowError) as error:  # nothing was sent
                    channel.send(("error", "TypeError", f"{request[0]}: {error}"))
                finally:
                    close_all(out)
        finally:
            session.channels.discard(channel)
