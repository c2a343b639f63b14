"""PTX around one mbarrier: the pieces that its tests put together."""

from __future__ import annotations

import numpy as np

from tests.emulator.exec_kit import execute

SHARED = """
.shared .align 8 .b64 full[2];
.shared .align 128 .b8 tile[4096];
"""

# Registers: %r20 = full[0], %r21 = full[1], %r22 = tile, %p1 = "thread 0". Data source: %rd1.
PROLOGUE = """
mov.u32 %r20, full;
add.u32 %r21, %r20, 8;
mov.u32 %r22, tile;
setp.eq.u32 %p1, %r2, 0;
"""


def init(count: int, *, other: int | None = None) -> str:
    """Thread 0 initialises full[0] (and full[1]); everyone may use them afterwards."""
    second = f"@%p1 mbarrier.init.shared::cta.b64 [%r21], {other};\n" if other else ""
    return f"{PROLOGUE}@%p1 mbarrier.init.shared::cta.b64 [%r20], {count};\n{second}bar.sync 0;\n"


def wait(parity: int | str, *, line: int = 90, barrier: str = "%r20", name: str = "W") -> str:
    """The usual loop around try_wait, at case.cu:LINE."""
    return f"""
    {name}:
    .loc 1 {line} 0
    mbarrier.try_wait.parity.shared::cta.b64 %p8, [{barrier}], {parity};
    @!%p8 bra {name};
    """


def load(nbytes: int, *, at: int = 0, line: int = 80) -> str:
    """Thread 0 issues one bulk load of ``nbytes`` into the tile."""
    return f"""
    add.u32 %r23, %r22, {at};
    add.s64 %rd20, %rd1, {at};
    .loc 1 {line} 0
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r23], [%rd20], {nbytes}, [%r20];
    """


READ = """
shl.b32 %r24, %r2, 2;
add.u32 %r24, %r24, %r22;
ld.shared.u32 %r25, [%r24];
st.global.u32 [%rd3], %r25;
"""
DATA = np.random.default_rng(11).integers(0, 1 << 32, 1024).astype(np.uint32)


def go(body: str, schedule: str, **more: object) -> np.ndarray:
    return execute(body, schedule=schedule, shared=SHARED, a=DATA, **more).out  # type: ignore[arg-type]
