"""Ranks as child processes: one function, run by each of them.

A rank that fails, is killed or hangs ends them all within seconds, and the caller gets the failure that was
first, not what it led to in the other ranks. Nothing outlives the call, nor the calling process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from smfree.cuda.choose import NODE_VARIABLE
from smfree.cuda.isolation import end_with_parent, how_it_ended
from smfree.ranks.context import RankContext
from smfree.ranks.environment import RANK, RENDEZVOUS, WORLD_SIZE
from smfree.ranks.errors import RankError, RankFailed, named
from smfree.ranks.gpus import Gpus
from smfree.ranks.unix import UnixRendezvous

_LOOK_S = 3600.0
"""The longest wait between two looks at the clock."""


def spawn(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str | None = "emu:h100x8",
    timeout_s: float = 120.0,
    grace_s: float = 5.0,
    several_per_gpu: bool = False,
    schedule: str = "timed",
    seed: int = 0,
    strict: str = "error",
    start_method: str = "spawn",
) -> list[Any]:
    """Call ``function(context, *args)`` in ``world_size`` processes; what each returned, by rank.

    ``context`` is a :class:`RankContext`: rank, world_size, rendezvous, and the rank's device, open: GPU
    number ``rank`` of those that ``device`` names (None: no device). ``several_per_gpu`` lets ranks share
    GPUs: for correctness, a bandwidth means nothing then. Emulated GPUs are served by one more process;
    ``schedule``, ``seed`` and ``strict`` are theirs. ``function`` lives at a module's top level, and
    everything that is passed can be pickled. ``timeout_s`` is also what the ranks' rendezvous allows a call.

    Raises RankFailed: a rank raised (its exception is the cause) or died, after which the others have
    ``grace_s`` to end by themselves; or not all had ended after ``timeout_s``. Raises RankError for what
    cannot be started, as by a script without ``if __name__ == "__main__":``, and for any start method but
    ``spawn``: a forked child can use neither CUDA nor the
    threads of this process (case D12).
    """
    _check(world_size, timeout_s, start_method)
    work = _pickled(function, args)
    gpus = None if device is None else Gpus.of(device)
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if gpus is not None:
            gpus.check(world_size, several_per_gpu)
            if gpus.emulated:
                environment[NODE_VARIABLE] = stack.enter_context(
                    _serve(gpus, world_size, schedule, seed, strict)
                )
        name = secrets.token_hex(16)
        environment |= {RENDEZVOUS: name, WORLD_SIZE: str(world_size)}
        task = _Task(work, world_size, name, gpus, environment, timeout_s)
        launch = stack.enter_context(_Launch(task))
        return launch.results(timeout_s, grace_s)


def _check(world_size: int, timeout_s: float, start_method: str) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RankError(
            "spawn was called while a rank's process imported the script that calls it; call it below "
            "if __name__ == '__main__':"
        )
    if start_method != "spawn":
        raise RankError(
            f"ranks are started with the method spawn (got {start_method!r}): a process forked after CUDA "
            "was initialised cannot use it, and one forked before inherits locks of threads that it has not; "
            "leave start_method out"
        )
    if not isinstance(world_size, int) or world_size < 1:
        raise RankError(f"there is at least one rank (got world_size {world_size!r}); use a whole number")
    if not timeout_s > 0:
        raise RankError(f"timeout_s is a positive number of seconds (got {timeout_s!r}); inf: no limit")


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What every rank calls. Raises RankError naming what cannot travel."""
    try:
        return pickle.dumps((function, args))
    except Exception as error:  # whatever a class does when it is pickled
        what = "everything that a rank's function gets is pickled, and this cannot be"
        if not _pickles(function):
            what = "a rank's function lives at a module's top level, so that its process can import it"
        raise RankError(f"{what} ({type(error).__name__}: {error})") from error


def _unpickled(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """In the rank's process, which imports what it shall call. Raises RankError where it cannot."""
    try:
        function, args = pickle.loads(work)
    except (ImportError, AttributeError) as error:
        raise RankError(
            f"a rank's process imports what it shall call, and cannot ({type(error).__name__}: {error}); put "
            "it into a file that can be imported there: what was typed at a prompt, or given by python -c, "
            "cannot"
        ) from error
    return function, args


def _pickles(thing: object) -> bool:
    try:
        pickle.dumps(thing)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _serve(gpus: Gpus, world_size: int, schedule: str, seed: int, strict: str) -> Iterator[str]:
    from smfree.emulator.server import start

    with start(gpus.node, schedule=schedule, seed=seed, strict=strict, clients=world_size) as node:
        yield node.address


@dataclass(frozen=True)
class _Task:
    """What every rank needs to know."""

    work: bytes
    """The pickled function and its arguments: what goes wrong with them in a rank is the rank's failure."""
    world_size: int
    name: str
    gpus: Gpus | None
    environment: dict[str, str]
    timeout_s: float


# --- in the child ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """How a rank failed. ``text``: in full. ``follows``: because another was lost, so it is not the first."""

    how: str
    text: str
    follows: bool = False
    error: BaseException | None = None


def _rank(task: _Task, rank: int, launcher: Connection, stacks: Connection) -> None:
    """Run one rank and tell the launcher how it ended."""
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    os.environ.update(task.environment | {RANK: str(rank)})
    context: RankContext | None = None
    try:
        rendezvous = UnixRendezvous(
            task.name, rank, task.world_size, timeout_s=task.timeout_s, launcher=launcher
        )
        context = RankContext(rank, task.world_size, rank, rendezvous)
        if task.gpus is not None:
            context.open(task.gpus)
        function, args = _unpickled(task.work)
        value = function(context, *args)
        launcher.send(("returned", value))
    except BaseException as error:
        failure = _described(error)
        launcher.send(("raised", failure))
        if context is not None:
            context.close(failure.how.removeprefix("failed: "))
        raise SystemExit(1) from None
    context.close()


def _described(error: BaseException) -> _Failure:
    text = "".join(traceback.format_exception(error)).rstrip()
    follows = any(base.__name__ == "PeerLost" for base in type(error).__mro__)
    carried: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception with arguments of its own
        carried = None
    first = traceback.format_exception_only(error)[0].splitlines()[0]
    return _Failure(f"failed: {first}", f"failed: {text}", follows, carried)


# --- in the parent -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Child:
    rank: int
    process: SpawnProcess
    messages: Connection
    stacks: Connection
    ended: int
    """A pid file descriptor: multiprocessing's own sentinel is held open by forked children of the rank."""
    value: Any = None
    returned: bool = False
    failure: _Failure | None = None
    alive: bool = True
    killed: bool = False
    """By us."""


@dataclass(eq=False)
class _Launch:
    """The running ranks. A context manager that kills what is left."""

    task: _Task
    children: list[_Child] = field(default_factory=list)
    failures: list[_Child] = field(default_factory=list)
    """In the order in which they were seen."""
    _first_at: float = 0.0

    def __enter__(self) -> _Launch:
        try:
            for rank in range(self.task.world_size):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.alive:
                child.process.kill()
        for child in self.children:
            child.process.join()
            child.process.close()
            child.messages.close()
            child.stacks.close()
            os.close(child.ended)
        self.children.clear()

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        stacks, stacks_there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(self.task, rank, there, stacks_there), name=f"smfree rank {rank}"
        )
        process.start()
        there.close()
        stacks_there.close()
        self.children.append(_Child(rank, process, here, stacks, _end_of(process)))

    def results(self, timeout_s: float, grace_s: float) -> list[Any]:
        """Wait for all; their values, or RankFailed."""
        deadline = time.monotonic() + timeout_s
        late: RankFailed | None = None
        killed = False
        while running := [child for child in self.children if child.alive]:
            self._take(running, None if killed else max(0.0, deadline - time.monotonic()))
            if self.failures:
                deadline = min(deadline, self._first_at + grace_s)
            if time.monotonic() >= deadline and not killed:
                killed = True
                running = [child for child in self.children if child.alive]
                if running and not self.failures:
                    late = self._late(running, timeout_s)
                for child in running:
                    child.process.kill()
                    child.killed = True
        if late is not None:
            raise self._with_results(late)
        if self.failures:
            self._raise_first()
        return [child.value for child in self.children]

    def _take(self, running: list[_Child], left_s: float | None) -> None:
        """Wait for messages and ends and take them in: ends first, as others may follow from them."""
        sources: list[Any] = [child.messages for child in running if not child.messages.closed]
        sources += [child.ended for child in running]
        ready = wait(sources, None if left_s is None else min(left_s, _LOOK_S))
        for child in sorted(running, key=lambda child: child.ended not in ready):
            if child.messages in ready or child.ended in ready:
                self._hear(child)
            if child.ended in ready:
                child.process.join()
                child.alive = False
                if child.failure is None and not child.killed:
                    self._note_exit(child)

    def _note_exit(self, child: _Child) -> None:
        """A process that ended without a failure that it told."""
        how = how_it_ended(child.process.exitcode)
        if not child.returned:
            self._fail(child, _Failure(how, how))
        elif child.process.exitcode != 0:
            self._fail(child, _Failure(f"returned, then {how}", f"returned, then {how}"))

    def _hear(self, child: _Child) -> None:
        try:
            while not child.messages.closed and child.messages.poll():
                kind, what = child.messages.recv()
                if kind == "returned":
                    child.value, child.returned = what, True
                else:
                    self._fail(child, what)
        except (EOFError, ConnectionError):
            child.messages.close()
        except Exception as error:  # a value that cannot be read here
            how = f"returned what cannot be unpickled here: {type(error).__name__}: {error}"
            self._fail(child, _Failure(how, how))

    def _fail(self, child: _Child, failure: _Failure) -> None:
        """Note a failure and tell the other ranks."""
        child.failure = failure
        self._first_at = self._first_at or time.monotonic()
        self.failures.append(child)
        for other in self.children:
            if other is not child and other.alive and not other.messages.closed:
                with contextlib.suppress(OSError):
                    other.messages.send((child.rank, failure.how))

    def _late(self, running: list[_Child], timeout_s: float) -> RankFailed:
        """Who has not ended, and where each is now."""
        busy = [child for child in running if not child.returned] or running
        for child in busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        text = f"{named(child.rank for child in busy)} did not end within {timeout_s:g} s"
        for child in busy:
            stack = os.read(child.stacks.fileno(), 1 << 16).decode() if child.stacks.poll() else ""
            stack = stack.rstrip() or "  (it has not begun, or its interpreter does not answer)"
            text += f"\nrank {child.rank} is at:\n{stack}"
        return RankFailed(text, busy[0].rank)

    def _raise_first(self) -> None:
        """The failure that was first, as far as can be told: one that does not follow from another."""
        first = next((child for child in self.failures if child.failure and not child.failure.follows), None)
        first = first or self.failures[0]
        assert first.failure is not None
        text = f"rank {first.rank} of {len(self.children)} {first.failure.text}"
        for child in self.failures:
            if child is not first and child.failure is not None:
                text += f"\nthen rank {child.rank} {child.failure.how}"
        raise self._with_results(RankFailed(text, first.rank)) from first.failure.error

    def _with_results(self, error: RankFailed) -> RankFailed:
        error.results = {child.rank: child.value for child in self.children if child.returned}
        return error


def _end_of(process: SpawnProcess) -> int:
    """A descriptor that is readable once the process has ended."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # an old kernel
        return os.dup(process.sentinel)
