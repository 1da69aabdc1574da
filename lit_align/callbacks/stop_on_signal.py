"""An end that somebody asks for: after the step that is being made, and with a checkpoint."""

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and some launchers send a signal twice at once.
ONE_AND_THE_SAME = 1.0  # seconds


class StopOnSignal(L.Callback):
    """Ends a run after the optimizer step that Ctrl-C or SIGTERM comes in, with a checkpoint.

    The checkpoint is `last.ckpt` in the folder of the Trainer's `ModelCheckpoint`, or in
    `checkpoints` below `default_root_dir` if it has none. A run resumed from it ends as if nothing
    had happened. Then the run ends as it would have without this callback: Lightning makes an exit
    of `KeyboardInterrupt` and of `SIGTERMException`. A second signal ends it at once.

    The step is finished first: the rest of a rollout that is being written, all micro-batches, or
    the validation that is under way. A validation that is due only after the step is left out, in
    the resumed run as well. After the last step of a run nothing is stopped.

    With several ranks one that gets the signal is enough. After each step they agree whether to go
    on, which costs a reduction of one number; so all end at the same one. Lightning itself would
    start a broadcast within the signal handler, in the midst of whatever the ranks are exchanging.

    Put it behind the callbacks that do something after validation, such as `SavePolicy`, so that
    they have done it when the checkpoint is written.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._asked_at = 0.0
        self._step = 0
        self._owner = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._asked, self._owner = 0, os.getpid()
        # Python runs handlers in the main thread only, and lets no other thread set them.
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                # However the run ends, Lightning puts back what was there before it.
                signal.signal(each, partial(self._hear, trainer))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        # While gradients are accumulated there is no step to stop after.
        if trainer.global_step == self._step or _is_last_step(trainer):
            return
        if asked := self._asked_of_any(trainer):
            # Lightning gives the step's metrics to the loggers only after this hook.
            trainer._logger_connector.update_train_step_metrics()
            _stop(trainer, asked)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        # Lightning may validate while gradients are accumulated, too.
        is_in_fit = is_in_fit and trainer.global_step > self._step
        if is_in_fit and not _is_last_step(trainer) and (asked := self._asked_of_any(trainer)):
            _stop(trainer, asked)

    def _hear(self, trainer: L.Trainer, number: int, frame: Any) -> None:
        """The handler of both signals."""
        if os.getpid() != self._owner:
            _in_a_fork(number)
        elif not self._asked:
            self._asked, self._asked_at = number, time.monotonic()
            if trainer.is_global_zero:
                # Not print: the signal may have come in the midst of one.
                os.write(2, b"\nstopping after this optimizer step; once more to stop at once\n")
        elif time.monotonic() - self._asked_at > ONE_AND_THE_SAME:
            # Waiting for this rank, the others would not end.
            if kill := getattr(trainer.strategy.launcher, "kill", None):
                kill(signal.SIGKILL)
            _end(number)

    def _asked_of_any(self, trainer: L.Trainer) -> int:
        """The signal that this rank or another has got; 0 for none."""
        if trainer.world_size == 1:
            return self._asked
        asked = torch.tensor(self._asked, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(asked, reduce_op="max"))


def save_last(trainer: L.Trainer) -> str:
    """Write `last.ckpt`, in place of the one that is there; all ranks take part.

    Returns:
        Its path.
    """
    keepers = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
    keeper = next(keepers, None)
    folder = str(Path(trainer.default_root_dir) / "checkpoints")
    if keeper is not None and keeper.dirpath is not None:
        folder = str(keeper.dirpath)
    last = f"{folder}/{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"
    if keeper is not None:
        # Part of the state that is saved: a resumed run overwrites the file it came from.
        keeper.last_model_path = last
    if "://" in folder:
        trainer.save_checkpoint(last, weights_only=False)
        return last
    # `last.ckpt` may be a link to a checkpoint that has to stay as it is, or a folder.
    unfinished = f"{last}.unfinished"
    trainer.save_checkpoint(unfinished, weights_only=False)
    if trainer.is_global_zero:
        _put_in_place(Path(unfinished), Path(last))
    trainer.strategy.barrier()
    return last


def _put_in_place(written: Path, last: Path) -> None:
    if last.is_dir() and not last.is_symlink():
        shutil.rmtree(last)
    elif written.is_dir():
        last.unlink(missing_ok=True)
    written.replace(last)


def _stop(trainer: L.Trainer, number: int) -> NoReturn:
    rank_zero_info(f"stopped after step {trainer.global_step}: {save_last(trainer)}")
    _end(number)


def _is_last_step(trainer: L.Trainer) -> bool:
    """Whether the run is at its end anyway."""
    by_steps = 0 < trainer.max_steps <= trainer.global_step
    is_last_epoch = 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1
    return by_steps or (is_last_epoch and trainer.is_last_batch)


def _end(number: int) -> NoReturn:
    """End as the signal would where nobody listens, with the exit code that shells give it."""
    leave_ranks_unwatched()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SIGTERMException(128 + number)


def leave_ranks_unwatched() -> None:
    """Keep Lightning from killing this process, exit code and all, once it finds a rank ended."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            vars(thread)["_child_processes"] = []


def _in_a_fork(number: int) -> None:
    """In a process that reads data for this one: Ctrl-C ends it too soon, SIGTERM is meant."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
