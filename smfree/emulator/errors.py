"""What the emulated GPU reports: one exception per family of broken rule.

Every message states the rule, the value that broke it and the remedy. Vectorised components raise with
``index``, the position of the offending lane in their argument arrays; the executor adds CTA, thread, PTX
line and source line through :meth:`EmulationError.locate`.
"""

from __future__ import annotations

from enum import StrEnum


class Severity(StrEnum):
    """``ERROR``: hardware corrupts, faults or hangs. ``STRICT``: the ISA forbids it, hardware forgives."""

    ERROR = "error"
    STRICT = "strict"


class EmulationError(Exception):
    """A kernel broke a rule of the machine.

    ``rule`` is a short stable name for tests and tables ("mbarrier.overflow"), ``message`` the full sentence.
    """

    def __init__(
        self, message: str, *, rule: str = "", index: int | None = None, severity: Severity = Severity.ERROR
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rule = rule
        self.index = index
        self.severity = severity
        self.where: str | None = None

    def locate(self, where: str) -> EmulationError:
        """Add the place (CTA, thread, PTX and source line); the innermost caller wins."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        return f"{self.message}\n  at {self.where}" if self.where else self.message


class MemoryFault(EmulationError):
    """An access outside an allocation, misaligned, or to bytes nobody wrote."""


class BarrierFault(EmulationError):
    """An mbarrier or hardware barrier used against its rules."""


class CopyFault(EmulationError):
    """An asynchronous copy issued or used against its rules."""


class Deadlock(EmulationError):
    """No lane can run and no asynchronous operation is pending. The message is the report."""


class Unsupported(EmulationError):
    """The emulator does not model this; refusing beats guessing."""


class PtxError(EmulationError):
    """The PTX text is wrong, or uses what the emulator does not know. Carries the PTX line."""

    def __init__(self, message: str, *, line: int = 0, rule: str = "ptx", source: str | None = None) -> None:
        at = f"PTX line {line}" + (f" ({source})" if source else "") if line else ""
        super().__init__(f"{at}: {message}" if at else message, rule=rule)
        self.line = line
