"""The other end of a worker: a process that runs reward functions and can be killed.

It must start fast, so nothing here may import torch. It ends with the trainer, however that ends:
when the pipe closes, or, where a function never lets go of the interpreter, when the time that a
call may compute is long over.
"""

import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lit_align.rewards.calls import Failed, Mark, RewardFunction, outcome


class Load(NamedTuple):
    """Keep a function under a name; answered by None, or by what went wrong."""

    name: str
    pickled: bytes


class Call(NamedTuple):
    """Call a function that was loaded; answered by its outcome.

    Args:
        name: of the function.
        arguments: what it takes, by name.
        completions: how many there are.
        seconds: after which nobody waits for the answer.
    """

    name: str
    arguments: dict[str, Any]
    completions: int
    seconds: float


def main(handle: int) -> None:
    """Serve until the pipe closes.

    Args:
        handle: file descriptor of this end of the pipe.
    """
    pipe = Connection(os.dup(handle))  # the copy is closed in what functions start
    os.close(handle)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
    # Descriptor 1 is the trainer's standard error, for what C writes; this is for `print`.
    sys.stdout = sys.stderr
    functions: dict[str, RewardFunction] = {}
    own = os.getpid()
    while True:
        answer = _answer(functions, requests.get())
        if os.getpid() != own:  # a child that a function left behind must not answer as well
            os._exit(0)
        pipe.send_bytes(pickle.dumps(answer))


def _receive(pipe: Connection, requests: "queue.SimpleQueue[bytes]") -> None:
    """Pass on what comes in; a thread of its own, so that the end is seen during a call."""
    try:
        while True:
            requests.put(pipe.recv_bytes())
    finally:
        os.killpg(0, signal.SIGKILL)  # with all that functions started and left running


def _answer(functions: dict[str, RewardFunction], request: bytes) -> list[Mark] | Failed | None:
    try:
        message = pickle.loads(request)
        if isinstance(message, Load):
            functions[message.name] = pickle.loads(message.pickled)
            return None
    except Exception as error:
        what = f"raised {type(error).__name__} where it was unpickled: {error}"
        return Failed(what, may_be_one=False, is_setup=True)
    # The trainer kills a call in time. If it is gone, and the function holds the interpreter
    # in C, so that the thread above cannot see it, this signal ends the process.
    processors = os.cpu_count() or 1
    signal.setitimer(signal.ITIMER_PROF, (message.seconds + 5) * processors)
    result = outcome(functions[message.name], message.arguments, message.completions)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return result
