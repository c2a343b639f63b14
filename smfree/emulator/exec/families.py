"""Every family of opcode handlers: importing this module fills the opcode table."""

from smfree.emulator.exec import (  # noqa: F401
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
