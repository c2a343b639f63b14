"""How a host thread queues work and waits for it: by running what is queued, and judging what cannot run.

Nothing happens on a node but in some host thread that waits. When nothing can go on, it depends on who could
still act. Another thread, another process, the host memory that is polled: then the wait is limited in wall
time, and says for whom it waited. Nobody: then waits inside of kernels time out, and if that changes nothing
either, it is a deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from smfree.emulator import deadlocks
from smfree.emulator.driver.capturing import CaptureRules
from smfree.emulator.driver.errors import CUresult, Refusal, fault_code
from smfree.emulator.errors import EmulationError
from smfree.emulator.node import DeviceState, Fault
from smfree.emulator.process import Context
from smfree.emulator.streams import Activity, Operation, Room, Stream, Unit, WaitValue

QUEUE_LIMIT = 1024
"""Operations a stream holds before the host has to wait, about as many as a GPU's driver queues (assumed)."""


class Queueing(CaptureRules):
    """Submission and waiting, for the groups of calls."""

    def _check_fault(self, context: Context) -> None:
        raise NotImplementedError

    def _submit(
        self,
        stream: Stream,
        label: str,
        action: Callable[[float], float] | None = None,
        *,
        begin: Callable[[float], Activity] | None = None,
        ended: Callable[[Operation], None] | None = None,
        unit: Unit | None = None,
        room: Room | None = None,
        gap_s: float = 0.0,
        after: tuple[Operation, ...] = (),
        wait: WaitValue | None = None,
        host_cost_s: float = 0.0,
    ) -> Operation:
        """Queue work; the host is busy for ``host_cost_s`` and the work starts after that at the earliest."""
        if self.process.captures:
            if stream.legacy:
                self._refuse_implicit(stream)
            if stream.capture is not None:
                graph_gap_s = stream.context.device.profile.host.graph_gap_us * 1e-6 if gap_s else 0.0
                return self._write_down(
                    stream, label, after,
                    lambda target, before: self._submit(
                        target, label, action, begin=begin, ended=ended, unit=unit,
                        room=room and room.again(), gap_s=graph_gap_s, after=before,
                        wait=wait and wait.again(),
                    ),
                )  # fmt: skip
        if room is not None:  # a kernel, also of a graph
            stream.context.launches += 1
        if len(stream.queue) >= QUEUE_LIMIT:
            self._finish(stream.queue[0])
        self._spend(host_cost_s)

        def failed(error: EmulationError, now_s: float) -> None:
            self._fail(stream.context, fault_code(error), f"{error}\n  in {label}", now_s)

        operation = Operation(
            stream, label, self.process.host_time_s, action, begin, ended, failed, unit, room, gap_s, after,
            wait,
        )  # fmt: skip
        self.node.timeline.submit(operation)
        self.node.lock.notify_all()
        return operation

    def _spend(self, seconds: float) -> None:
        """The host is busy for so long."""
        if self.node.clocked:
            self.process.host_time_s += seconds

    def _launch_cost_s(self, device: DeviceState) -> float:
        return device.profile.host.launch_us * 1e-6

    def _catch_up(self) -> None:
        """Let happen what would have happened by now on the modelled clock."""
        self.node.timeline.run_until(self.process.host_time_s)
        self.node.lock.give_way()

    def _finish(self, *operations: Operation | None) -> None:
        """Block the host until the operations have ended; report a fault or an endless wait."""
        for operation in operations:
            if operation is not None:
                self._finish_one(operation)
        self.node.timeline.look(self.process.host_time_s)

    def _finish_one(self, operation: Operation) -> None:
        node, process = self.node, self.process
        timeline, news, waited_s, pause_s = node.timeline, -1, 0.0, 0.0005
        while not operation.done:
            if timeline.step():
                node.lock.give_way()
                continue
            if timeline.news != news:  # polling and time-outs are none
                news, waited_s, pause_s = timeline.news, 0.0, 0.0005
            outside = self._who_could_act()
            if outside and waited_s < node.host_wait_limit_s:
                with node.waiting():
                    node.lock.wait(pause_s)
                waited_s += pause_s
                pause_s = min(pause_s * 2, 0.05)
                timeline.look(process.host_time_s)
            elif not timeline.last_resort():
                if outside:
                    raise self._endless(operation, waited_s, outside)
                self._deadlock(operation)
        process.host_time_s = max(process.host_time_s, operation.end_s)
        self._check_fault(operation.stream.context)
        self._check_lost(operation)

    def _check_lost(self, operation: Operation) -> None:
        """Refuse to take an operation for done that waits for work which never ended."""
        if operation.lost is None:
            return
        self._check_fault(operation.lost)
        raise Refusal(
            CUresult.CUDA_ERROR_EXTERNAL_DEVICE,
            f"{operation.label} on {operation.stream.name} never ran: {operation.lost} ended before the work "
            "that it waits for. Real hardware may wait for ever",
        )

    def _who_could_act(self) -> list[str]:
        """Who, besides this thread, could still make something happen: only by writing what is polled."""
        if not self.node.timeline.polls():
            return []
        found = self.node.others(threading.get_ident())
        if self.node.timeline.polled_by_host():
            found.append("the host, which may write the memory that is polled")
        return found

    def _endless(self, operation: Operation, waited_s: float, outside: list[str]) -> Refusal:
        return Refusal(
            CUresult.CUDA_ERROR_TIMEOUT,
            f"{operation.label} on {operation.stream.name} has not ended: the host waited {waited_s:.1f} s "
            "for what nothing that is queued or running does. Real hardware would hang here.\n  "
            + "\n  ".join(deadlocks.stuck(self.node))
            + f"\nOnly others could still end this: {'; '.join(outside)}. Have it done before synchronising, "
            "or raise Node(host_wait_limit_s=...).",
        )

    def _deadlock(self, operation: Operation) -> None:
        """Nobody can do anything any more: every context with work that cannot go on fails."""
        report = deadlocks.report(self.node)
        stuck = {id(each.stream.context): each.stream.context for each in self.node.timeline.running}
        stuck[id(operation.stream.context)] = operation.stream.context
        for context in stuck.values():
            self._fail(context, CUresult.CUDA_ERROR_LAUNCH_TIMEOUT, report, self.process.host_time_s)

    def _synchronize(self, context: Context) -> None:
        """Wait for everything queued in a context."""
        self._finish(*(stream.last for stream in self.node.timeline.streams_of(context)))

    def _fail(self, context: Context, code: Any, report: str, now_s: float) -> None:
        """Kill a context: every later call returns ``code``; its work is dropped."""
        if context.fault is None:
            context.fault = Fault(int(code), report)
            context.process.report = report
        self.node.timeline.drop(context, now_s)
