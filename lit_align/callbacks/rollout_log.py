"""What the policy wrote: all of it in files, some of it on the screen."""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_align.callbacks.attached import acting_module
from lit_align.callbacks.rollout_table import rendered, telling
from lit_align.errors import UserError
from lit_align.rollout import Rollout, Sample


class RolloutLog(L.Callback):
    """Writes every rollout and every validation to a file, and shows a few completions.

    `rollout-000012.jsonl` holds a completion a line, with its token ids, the sampler's log-probs,
    rewards and advantage, those that were filtered out (`left_out`) included, and those that others
    are only compared with (`greedy`, sample -1): `ReplayEngine` trains from such a folder.
    `validation-step-000080.jsonl` holds what the validation of a fit was answered after 80 steps. A
    resumed run writes a file that it comes to again as it was.

    Args:
        folder: where the files lie.
        every_n_rollouts: how often some of a rollout's completions are shown.
        rows: how many are; 0: none. Of one prompt after another it is the completion that did best
            and the one that did worst.
    """

    def __init__(
        self, folder: str | os.PathLike[str], every_n_rollouts: int = 10, rows: int = 4
    ) -> None:
        for name, value, least in (("every_n_rollouts", every_n_rollouts, 1), ("rows", rows, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(
                    f"rollout_log.{name} must be a whole number of at least {least}, not {value!r}"
                )
        self.folder = Path(folder).absolute()
        self.every_n_rollouts = every_n_rollouts
        self.rows = rows
        self._written: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        acting_module(pl_module, self)
        self._written = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is None and any(self.folder.glob("rollout-*.jsonl")):
            rank_zero_warn(
                f"{self.folder} holds rollouts of another run: those of this one will lie among "
                "them, and a replay of the folder would read both"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rollout = acting_module(pl_module, self).rollout
        # A run that was resumed within a rollout does not have its texts; the file is there.
        if rollout is None or rollout.number == self._written or not trainer.is_global_zero:
            return
        self._written = rollout.number
        _write(self.folder / f"rollout-{rollout.number:06d}.jsonl", _rollout_rows(rollout))
        if self.rows and rollout.number % self.every_n_rollouts == 0:
            _show(trainer, rendered(rollout, telling(rollout, self.rows)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A check of a few batches is no validation; and a Trainer that only validates does not
        # know after which step.
        is_part = trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf")
        if is_part or trainer.state.fn != TrainerFn.FITTING or not trainer.is_global_zero:
            return
        step = trainer.global_step
        samples = acting_module(pl_module, self).evaluation.samples
        rows = ({"version": step} | _of_sample(sample) for sample in samples)
        _write(self.folder / f"validation-step-{step:06d}.jsonl", rows)


def _rollout_rows(rollout: Rollout) -> Iterable[dict[str, Any]]:
    """A rollout as its file has it: what is trained on, then what was left out, or is greedy."""
    parts: tuple[tuple[list[Sample], dict[str, bool]], ...] = (
        (rollout.samples, {}),
        (rollout.left_out, {"left_out": True}),
        (rollout.greedy, {"greedy": True}),
    )
    for samples, kind in parts:
        for sample in samples:
            whose = {"number": rollout.number, "version": rollout.version, "group": sample.group}
            yield whose | _of_sample(sample) | {"advantage": _number(sample.advantage)} | kind


def _of_sample(sample: Sample) -> dict[str, Any]:
    return {
        "row": sample.row,
        "sample": sample.number,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "prompt_ids": sample.prompt_ids,
        "completion_ids": sample.completion_ids,
        "finish_reason": sample.finish_reason,
        "logprobs": sample.sampler_logprobs,
        "rewards": {name: _number(value) for name, value in sample.rewards.items()},
        "reward": _number(sample.reward),
    }


def _number(value: float | None) -> float | None:
    """The value as JSON knows numbers, which are finite: no reward is null."""
    return None if value is None or not math.isfinite(value) else float(value)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Put the whole file in place at once: nobody reads half of it."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    # Half a surrogate pair is no character; the escape that stands for it is JSON's own.
    unfinished.write_bytes(text.encode("utf-8", "backslashreplace"))
    unfinished.replace(path)


def _show(trainer: L.Trainer, text: str) -> None:
    """Print above the progress bar, if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", True):
        bar.print(text)
    else:
        sys.stdout.write(f"{text}\n")
