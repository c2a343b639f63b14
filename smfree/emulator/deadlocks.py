"""What a person reads when the work of a node cannot go on: who waits for what, and what never started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smfree.emulator.exec.report import DEADLOCK

if TYPE_CHECKING:
    from smfree.emulator.node import Node
    from smfree.emulator.streams import Operation

_MANY = 8


def report(node: Node) -> str:
    """The exact reason why nothing can happen any more on the whole node."""
    return "\n".join([DEADLOCK, *stuck(node)])


def stuck(node: Node) -> list[str]:
    """Every running kernel with what its threads wait for, every queued operation with why it did not start,
    and where nothing was launched."""
    timeline = node.timeline
    lines = []
    for operation in timeline.running:
        assert operation.activity is not None
        lines.append(f"{operation.label} ({operation.stream.context}):")
        lines += [f"  {line}" for line in operation.activity.stuck()]
    queued = [each for each in timeline.queued() if each.activity is None]
    waiting = [each for each in queued if each.label]
    lines += [_never_started(each) for each in waiting[:_MANY]]
    if len(waiting) > _MANY:
        lines.append(f"... and {len(waiting) - _MANY} more operations are queued")
    return lines + _idle(node)


def _never_started(operation: Operation) -> str:
    return f"{operation.label} ({operation.stream.context}) never started: {_why(operation)}"


def _why(operation: Operation) -> str:
    """What keeps a queued operation from starting."""
    stream = operation.stream
    behind = f"; {len(stream.queue) - 1} operations queued behind it" if stream.queue[0] is operation else ""
    before = next((each for each in operation.after if not each.done), None)
    if before is not None:
        return f"waits behind {before.label}"
    if operation.wait is not None and operation.wait.true_since_s is None:
        return f"{stream.name} {operation.wait.describe()}{behind}"
    if operation.unit is not None and operation.unit.holder is not None:
        return f"{operation.unit.name} is busy with {operation.unit.holder.label}"
    if operation.room is not None and operation.room.lacked:
        return operation.room.describe() + behind
    return "its turn has not come"


def _idle(node: Node) -> list[str]:
    """The contexts, beside those that are stuck, on which nothing is launched or which have failed."""
    busy = {id(each.stream.context) for each in node.timeline.queued()}
    lines = []
    for process in node.processes:
        contexts = [each for each in process.contexts.values() if each.active]
        if not any(each.launches for each in contexts):
            lines.append(f"{process} has launched nothing")
            continue
        for context in contexts:
            if context.fault is not None:
                lines.append(f"{context} has failed: {context.fault.report.splitlines()[0]}")
            elif id(context) not in busy:
                ended = (
                    f"all {context.launches} kernels launched there have ended" if context.launches else ""
                )
                lines.append(f"{context}: nothing runs; {ended or 'no kernel was launched there'}")
    return lines
