"""Every family of opcode handlers: importing them fills the opcode table."""

from __future__ import annotations

from smfree.emulator.exec import (
    approx,
    arith,
    async_ops,
    bits,
    cluster_ops,
    convert,
    matrix,
    memory_ops,
    multimem_ops,
    sync_ops,
    warp,
)

OPCODE_FAMILIES = (
    approx,
    arith,
    async_ops,
    bits,
    cluster_ops,
    convert,
    matrix,
    memory_ops,
    multimem_ops,
    sync_ops,
    warp,
)
