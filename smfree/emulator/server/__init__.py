"""One process serves an emulated node; the programs of its ranks are clients and share the devices.

``start("h100x8")`` starts the server, ``attach(address)`` gives a client process its driver.
"""

from smfree.emulator.server.client import RemoteDriver, attach
from smfree.emulator.server.link import NodeFailure, NodeLost
from smfree.emulator.server.start import NodeProcess, start

__all__ = ["NodeFailure", "NodeLost", "NodeProcess", "RemoteDriver", "attach", "start"]
