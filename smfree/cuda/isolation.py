"""Run something that may fault, hang or take its context down in a process of its own.

A kernel fault makes a CUDA context unusable for good, and a hung kernel never returns; in a child process
either is a result among others.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Ending(StrEnum):
    """How an isolated call ended."""

    RETURNED = "returned"
    RAISED = "raised"
    TIMED_OUT = "timed out"
    DIED = "died"


@dataclass(frozen=True)
class Outcome:
    """``value`` of a call that returned; ``text`` says what happened to one that did not."""

    ending: Ending
    value: Any = None
    text: str = ""


def run_isolated(function: Callable[..., Any], *args: Any, timeout_s: float) -> Outcome:
    """Call ``function(*args)`` in a new process (spawned: nothing of this process' CUDA state is inherited).

    ``function``, ``args`` and the result are pickled, so the function lives at a module's top level. Never
    raises for what happens in the child: a hang, a crash and an exception are outcomes. The child does not
    outlive this process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            return Outcome(Ending.TIMED_OUT, text=f"{function.__name__} did not end within {timeout_s:g} s")
        ending, value, text = receiver.recv()
        return Outcome(Ending(ending), value, text)
    except EOFError:
        process.join(timeout=5)
        return Outcome(Ending.DIED, text=f"{function.__name__} {how_it_ended(process.exitcode)}")
    finally:
        receiver.close()
        if process.is_alive():
            process.kill()
        process.join(timeout=5)


def how_it_ended(exitcode: int | None) -> str:
    """What the exit code of a process says of its end."""
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended its process with exit code {exitcode}"


def _call(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end_with_parent()
    try:
        sender.send((Ending.RETURNED.value, function(*args), ""))
    except Exception as error:  # the call's, or that its result cannot be pickled
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        sender.send((Ending.RAISED.value, None, text))
    sender.close()


def end_with_parent() -> None:
    """In a child of multiprocessing: die when the parent does, also while native code runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the thread that started the child
    threading.Thread(target=_kill_after, args=(parent,), daemon=True).start()


def _kill_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
