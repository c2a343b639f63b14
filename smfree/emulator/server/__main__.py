"""``python -m smfree.emulator.server --node h100x8``: serve an emulated node to other processes.

Prints the address, which goes into ``SMFREE_NODE``, and serves until interrupted. With ``--lifeline`` a
parent holds the other end of standard input: a byte means "end with the last client", end of file "end now".
"""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
import threading

from smfree.emulator import profile
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.node import TIMED, Strict
from smfree.emulator.server.server import Server

_PARENT_CHECK_S = 0.5


def profiles_of(text: str) -> list[str]:
    """``h100x8`` as eight profile names. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([a-z0-9_]+?)(?:x([1-9][0-9]?))?", text)
    if found is None or found[1] not in profile.names():
        raise argparse.ArgumentTypeError(f"{text!r} is no node; for example {profile.names()[0]}x8")
    return [found[1]] * int(found[2] or 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m smfree.emulator.server", description=__doc__)
    parser.add_argument("--node", type=profiles_of, required=True, help="PROFILE or PROFILExN")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default=TIMED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", choices=[str(choice) for choice in Strict], default=str(Strict.ERROR))
    parser.add_argument("--address", default="", help="name of the abstract socket (default: a new one)")
    parser.add_argument("--wait-limit", type=float, default=60.0, help="seconds to wait for another process")
    parser.add_argument("--clients", type=int, default=0, help="processes that will attach (0: unknown)")
    parser.add_argument("--lifeline", action="store_true", help="end with the parent")
    options = parser.parse_args()
    server = Server(
        options.node,
        schedule=options.schedule,
        seed=options.seed,
        strict=options.strict,
        host_wait_limit_s=options.wait_limit,
        clients=options.clients,
        address=options.address,
    )
    if options.lifeline:
        threading.Thread(target=_watch_parent, args=(server, os.getppid()), daemon=True).start()
    print(server.address, flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        return 130
    return 0


def _watch_parent(server: Server, parent: int) -> None:
    """End at once with the parent, or, once it says so, with the last client."""
    stdin, ending = sys.stdin.fileno(), False
    while True:
        if select.select([stdin], [], [], _PARENT_CHECK_S)[0]:
            if not os.read(stdin, 1):
                os._exit(1)
            if not ending:
                ending = True
                threading.Thread(target=_end_when_empty, args=(server,), daemon=True).start()
        if os.getppid() != parent:
            os._exit(1)


def _end_when_empty(server: Server) -> None:
    server.nobody_is_missing()
    server.wait_until_empty()
    server.close()


if __name__ == "__main__":
    os._exit(main())  # threads may still be busy for clients that are gone
