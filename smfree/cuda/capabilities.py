"""What a device can do. A capability, never a GPU's name, decides what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls

GENERATIONS = {
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere",
    (8, 7): "ampere",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (11, 0): "blackwell",
    (12, 0): "blackwell",
    (12, 1): "blackwell",
}


def arch_for(compute_capability: tuple[int, int]) -> str:
    """The architecture to compile for: ``(8, 0)`` gives ``sm_80``, ``(9, 0)`` gives ``sm_90a``.

    From 9.0 on the arch-specific ``a`` variant is used: wgmma, setmaxnreg and tcgen05 exist only there (PTX
    ISA, "Module Directives: .target"), and the code runs on this very device.
    """
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compute_capability_of(arch: str) -> tuple[int, int]:
    """``sm_90a`` gives ``(9, 0)``, ``sm_120a`` gives ``(12, 0)``. Raises ValueError for anything else."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit() or len(digits) < 2:
        raise ValueError(f"an architecture is written sm_NN, sm_NNa or sm_NNf (got {arch!r}); try sm_90a")
    return int(digits[:-1]), int(digits[-1])


@dataclass(frozen=True)
class Capabilities:
    """Limits and features of one device, all from ``cuDeviceGetAttribute``; sizes in bytes, clocks in MHz.

    ``peak_memory_gbps`` is 2 x memory clock x bus width (GB = 1e9 bytes), 0 where the driver hides the clock.
    """

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_shared_bytes_per_block: int
    shared_bytes_per_sm: int
    reserved_shared_bytes_per_cta: int
    registers_per_sm: int
    registers_per_block: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    max_grid: tuple[int, int, int]
    max_block: tuple[int, int, int]
    l2_bytes: int
    memory_bytes: int
    sm_clock_mhz: float
    memory_clock_mhz: float
    memory_bus_bits: int
    cooperative_launch: bool

    @property
    def arch(self) -> str:
        """Architecture to compile for, for example ``sm_90a``."""
        return arch_for(self.compute_capability)

    @property
    def generation(self) -> str:
        """``ampere``, ``hopper``, ``blackwell``; ``ccMAJOR.MINOR`` for one that is not listed."""
        major, minor = self.compute_capability
        return GENERATIONS.get(self.compute_capability, f"cc{major}.{minor}")

    @property
    def has_cp_async(self) -> bool:
        """``cp.async``: sm_80 and up."""
        return self.compute_capability >= (8, 0)

    @property
    def has_mbarrier(self) -> bool:
        """``mbarrier``: sm_80 and up (``try_wait`` and ``expect_tx`` come with :attr:`has_tma`)."""
        return self.compute_capability >= (8, 0)

    @property
    def has_tma(self) -> bool:
        """``cp.async.bulk`` and tensor copies: sm_90 and up."""
        return self.compute_capability >= (9, 0)

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters: sm_90 and up."""
        return self.compute_capability >= (9, 0)

    @property
    def has_programmatic_launch(self) -> bool:
        """Programmatic dependent launch: sm_90 and up."""
        return self.compute_capability >= (9, 0)

    @property
    def has_wide_access(self) -> bool:
        """32-byte global loads and stores per thread (``ld.global.v8.b32``): sm_100 and up."""
        return self.compute_capability >= (10, 0)

    @property
    def peak_memory_gbps(self) -> float:
        """Peak DRAM bandwidth in GB/s (1e9 bytes), 0.0 where the driver does not tell."""
        return 2 * self.memory_clock_mhz * 1e6 * self.memory_bus_bits / 8 / 1e9


def read_capabilities(calls: Calls, handle: Any) -> Capabilities:
    """Ask the driver for everything that :class:`Capabilities` holds."""

    def get(name: str) -> int:
        attribute = getattr(calls.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(calls("cuDeviceGetAttribute", attribute, handle, attribute=name))

    name = calls("cuDeviceGetName", 256, handle)
    return Capabilities(
        name=name.split(b"\0", 1)[0].decode() if isinstance(name, bytes) else str(name),
        compute_capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
        num_sms=get("MULTIPROCESSOR_COUNT"),
        max_shared_bytes_per_block=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_bytes_per_sm=get("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        reserved_shared_bytes_per_cta=get("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        registers_per_sm=get("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        registers_per_block=get("MAX_REGISTERS_PER_BLOCK"),
        max_threads_per_block=get("MAX_THREADS_PER_BLOCK"),
        max_threads_per_sm=get("MAX_THREADS_PER_MULTIPROCESSOR"),
        max_ctas_per_sm=get("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        max_grid=(get("MAX_GRID_DIM_X"), get("MAX_GRID_DIM_Y"), get("MAX_GRID_DIM_Z")),
        max_block=(get("MAX_BLOCK_DIM_X"), get("MAX_BLOCK_DIM_Y"), get("MAX_BLOCK_DIM_Z")),
        l2_bytes=get("L2_CACHE_SIZE"),
        memory_bytes=int(calls("cuDeviceTotalMem", handle)),
        sm_clock_mhz=get("CLOCK_RATE") / 1e3,
        memory_clock_mhz=get("MEMORY_CLOCK_RATE") / 1e3,
        memory_bus_bits=get("GLOBAL_MEMORY_BUS_WIDTH"),
        cooperative_launch=bool(get("COOPERATIVE_LAUNCH")),
    )
