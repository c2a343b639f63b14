"""Which GPU is whose among the ranks of one host."""

from __future__ import annotations

from dataclasses import dataclass

from smfree.cuda.choose import DEFAULT_PROFILE, DeviceSpec, Kind, parse_spec, real_devices
from smfree.cuda.device import Device
from smfree.ranks.errors import RankError


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one host's ranks: ``count`` devices that ``spec`` names."""

    spec: DeviceSpec
    count: int

    @classmethod
    def of(cls, text: str | None) -> Gpus:
        """Parse a device string and count. ``auto`` is all real GPUs, else one emulated GPU."""
        spec = parse_spec(text)
        if spec.kind is Kind.AUTO:
            reason, _ = real_devices()
            emulated = DeviceSpec(Kind.EMULATED, profile=DEFAULT_PROFILE)
            spec = emulated if reason else DeviceSpec(Kind.CUDA)
        if spec.ordinals is not None:
            return cls(spec, len(spec.ordinals))
        if spec.kind is Kind.EMULATED:
            return cls(spec, spec.count)
        reason, count = real_devices()
        return cls(spec, count)  # without a GPU, opening one says why

    @property
    def emulated(self) -> bool:
        """Whether a node server has to be started."""
        return self.spec.kind is Kind.EMULATED

    @property
    def node(self) -> str:
        """The node of emulated GPUs: ``h100x8``."""
        return f"{self.spec.profile}x{self.spec.count}"

    def check(self, ranks: int, several_per_gpu: bool) -> None:
        """Refuse more ranks than GPUs unless they may share."""
        if self.count and ranks > self.count and not several_per_gpu:
            more = f"name more GPUs (emu:{self.spec.profile}x{ranks})" if self.emulated else "use fewer ranks"
            raise RankError(
                f"{self.spec} has {self.count} GPUs for {ranks} ranks; {more}, or let them share with "
                "several_per_gpu=True, which tests correctness only"
            )

    def open(self, local_rank: int) -> Device:
        """The GPU of a rank; they take turns."""
        return Device.open(str(self.spec), ordinal=local_rank % max(1, self.count))
