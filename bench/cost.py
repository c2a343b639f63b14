"""What a configuration needs from the SM: registers, occupancy, instructions."""

from __future__ import annotations

from kernels.engine import CopyConfig
from smfree.cuda import Capabilities, Kernel
from smfree.measure.records import Cost


def cost_of(kernel: Kernel, config: CopyConfig, capabilities: Capabilities) -> Cost:
    """Registers and local bytes from the cubin; the CTAs per SM that they and the shared memory allow."""
    fit = kernel.occupancy(config.threads, config.shared_bytes)
    return Cost(
        registers=kernel.registers,
        local_bytes=kernel.local_bytes,
        ctas_per_sm=fit,
        occupancy=fit * config.threads / capabilities.max_threads_per_sm,
    )
