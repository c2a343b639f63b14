"""Ranks of one process on an emulated node, whose kernels signal each other and poll."""

from __future__ import annotations

import ctypes
from typing import Any

from smfree.emulator.exec.launch import Launch
from tests.emulator.driver_kit import launch, load, ok, open_driver

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry work(.param .u64 mine, .param .u64 theirs)
{
.reg .pred %p<4>;
.reg .b32 %r<12>;
.reg .b64 %rd<12>;
ld.param.u64 %rd1, [mine];
ld.param.u64 %rd2, [theirs];
"""
POLL = """
POLL:
ld.acquire.sys.global.u32 %r1, [%rd1];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra POLL;
"""
SIGNAL = "st.release.sys.global.u32 [%rd2], 1;\n"
COUNTING = """
mov.u32 %r2, 0;
COUNT:
add.u32 %r2, %r2, 1;
ld.acquire.sys.global.u32 %r1, [%rd1];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra COUNT;
"""
MEET = SIGNAL + POLL
"""Tell the other one, then wait for it."""


class Ranks:
    """One host thread with a context, a flag and a stream on each of ``count`` devices."""

    def __init__(self, count: int, body: str = MEET, **settings: Any) -> None:
        self.driver = open_driver(*["h100"] * count, executor=Launch, **settings)
        driver, self.functions, self.flags = self.driver, [], []
        self.contexts = [ok(driver.cuDevicePrimaryCtxRetain(i)) for i in range(count)]
        self.streams = []
        for i in range(count):
            self.on(i)
            for j in range(count):
                if i != j:
                    ok(driver.cuCtxEnablePeerAccess(self.contexts[j], 0))
            self.functions.append(load(driver, f"{HEAD}{body}ret;\n}}\n".encode()))
            self.flags.append(int(ok(driver.cuMemAlloc(4))))
            self.streams.append(ok(driver.cuStreamCreate(1)))
            ok(driver.cuMemsetD32Async(self.flags[i], 0, 1, self.streams[i]))
        for i in range(count):
            self.synchronize(i)

    def on(self, rank: int) -> None:
        ok(self.driver.cuCtxSetCurrent(self.contexts[rank]))

    def launch(self, rank: int, peer: int, stream: Any = None, **shape: Any) -> None:
        """The kernel of ``rank``: it polls its own flag and sets that of ``peer``."""
        self.on(rank)
        params = ((self.flags[rank], self.flags[peer]), (ctypes.c_void_p, ctypes.c_void_p))
        where = self.streams[rank] if stream is None else stream
        ok(launch(self.driver, self.functions[rank], where, params, **shape), self.driver)

    def synchronize(self, rank: int) -> None:
        self.on(rank)
        ok(self.driver.cuStreamSynchronize(self.streams[rank]), self.driver)

    def value(self, rank: int) -> int:
        """What the flag of a rank holds."""
        word = bytearray(4)
        self.on(rank)
        ok(self.driver.cuMemcpyDtoH(word, self.flags[rank], 4), self.driver)
        return int.from_bytes(word, "little")
