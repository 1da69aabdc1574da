"""Processes that run reward functions under a deadline, and are killed when it passes."""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lit_align.rewards.calls import Failed, Mark, outcome
from lit_align.rewards.packed import Packed
from lit_align.rewards.worker import Call, Load

START_SECONDS = 60.0
"""Time for a worker to start and to import what a function needs; calls have their own."""


class Worker:
    """One process, started when it is first needed and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._owner = 0
        self._loaded: set[str] = set()

    def ready(self, packed: Packed) -> None:
        """Start the process and send the function, unless both was done before.

        Raises:
            UserError: if the function does not get there.
        """
        if not self._is_up():
            self.end()
            self._start()
        if packed.name not in self._loaded:
            self._load(packed)

    def call(
        self, packed: Packed, arguments: Mapping[str, Any], completions: int, seconds: float
    ) -> list[Mark] | Failed:
        """The outcome of one call, or that it took longer than `seconds` or ended the process."""
        try:
            message = cloudpickle.dumps(Call(packed.name, dict(arguments), completions, seconds))
        except Exception as error:
            raise packed.refused(f"is given columns that cannot be pickled ({error})") from error
        result: list[Mark] | Failed = self._exchange(message, seconds)
        return result

    def _is_up(self) -> bool:
        """Whether there is a process, of this one's own: a forked trainer starts its own."""
        process = self._process
        return process is not None and self._owner == os.getpid() and process.poll() is None

    def _start(self) -> None:
        ours, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
            f"from lit_align.rewards.worker import main; main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what functions print goes to standard error
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is for the trainer; and children die with it
            )
        self._pipe, self._owner, self._loaded = ours, os.getpid(), set()

    def _load(self, packed: Packed) -> None:
        """Send the function: by name where a worker can import it, else its module's code."""
        failure = self._exchange(pickle.dumps(Load(packed.name, packed.pickled())), START_SECONDS)
        if isinstance(failure, Failed) and self._process and packed.pickle_module():
            message = pickle.dumps(Load(packed.name, packed.pickled()))
            failure = self._exchange(message, START_SECONDS)
        if isinstance(failure, Failed):
            raise packed.refused(f"cannot be loaded there: it {failure.what}")
        self._loaded.add(packed.name)

    def _exchange(self, message: bytes, seconds: float) -> Any:
        """Send a message and wait for the answer; a `Failed` if none comes."""
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(message)
            if self._pipe.poll(seconds):
                return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return Failed(f"ended its process ({self._ending()})")
        except BaseException:  # such as Ctrl-C: the answer would come to the next question
            self.end()
            raise
        self.end()
        return Failed(f"took longer than {seconds:.3g} s and was stopped")

    def _ending(self) -> str:
        """Wait for a process that has closed its pipe, and say how it ended."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        self.end()
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the process and all that it started; a call that waits for it ends."""
        process = self._process
        if process is not None and self._owner == os.getpid():
            # ProcessLookupError, or on some systems PermissionError: it has ended by itself.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and forget it; not while another thread waits for it."""
        self.kill()
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is not None and pipe is not None and self._owner == os.getpid():
            pipe.close()
            process.wait()


class Here:
    """What a worker does, in this process: nothing to start, and no deadline."""

    def ready(self, packed: Packed) -> None:
        """Nothing to do."""

    def call(
        self, packed: Packed, arguments: Mapping[str, Any], completions: int, seconds: float
    ) -> list[Mark] | Failed:
        """The outcome of one call, however long it takes."""
        return outcome(packed.function, arguments, completions)


class Pool:
    """As many workers as may run at once; any thread may ask for one.

    Args:
        size: workers, at least 1.
    """

    def __init__(self, size: int) -> None:
        self._workers = [Worker() for _ in range(size)]
        # The one used last is taken first: those never needed never start.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker to oneself; waits until one is idle."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all workers; calls that wait for one fail. Later ones start anew."""
        for worker in self._workers:
            worker.kill()
        ended = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._idle.get_nowait())
                ended[-1].end()
        for worker in reversed(ended):
            self._idle.put(worker)
