"""The result of a run: the policy as a Hugging Face folder."""

import math
import os
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lit_align.callbacks.attached import policy_module
from lit_align.errors import UserError
from lit_align.modules.ranks import is_sharded
from lit_align.policies import save_policy


class SavePolicy(L.Callback):
    """Writes the final policy to `model` and, if asked, the best so far to `model-best`.

    Each is a folder that `from_pretrained` loads, tokenizer included.

    Args:
        folder: where the two folders lie.
        best: a validation metric, such as `val/rewards/accuracies`; None: no best policy.
        mode: whether the best is the largest or the smallest.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if mode not in ("max", "min"):
            raise UserError(f"mode must be max or min, not {mode!r}")
        self.folder = Path(folder).absolute()
        self.best = best
        self.mode = mode
        self.best_score: float | None = None
        self._saved = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self.best_score = None
            self._saved = False

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.best is None or trainer.state.fn != TrainerFn.FITTING:
            return
        score = self._score(trainer)
        # One rank decides for all: every rank has to take part in saving, or none.
        if not trainer.sanity_checking and trainer.strategy.broadcast(self._is_better(score)):
            self.best_score = score
            self._save(trainer, pl_module, "model-best")
            rank_zero_info(f"best policy so far: {self.best} = {score:.4f}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_final(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A run that is resumed after its last step has nothing to train, and no end of training.
        if not self._saved:
            self._save_final(trainer, pl_module)

    def _save_final(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module, "model")
        self._saved = True
        rank_zero_info(f"the final policy is in {self.folder / 'model'}")
        if self.best_score is not None and (self.folder / "model-best").is_dir():
            rank_zero_info(
                f"the best one ({self.best} = {self.best_score:.4f}) is in "
                f"{self.folder / 'model-best'}"
            )

    def _score(self, trainer: L.Trainer) -> float:
        """The monitored metric; a wrong name is found by the sanity check already."""
        metrics = trainer.callback_metrics
        if self.best not in metrics:
            raise UserError(
                f"SavePolicy cannot find the best policy by '{self.best}': validation logs "
                f"{', '.join(sorted(metrics)) or 'nothing'}; "
                "choose one of those as callbacks.save_policy.best, or null for no best policy"
            )
        return float(metrics[self.best])

    def _is_better(self, score: float) -> bool:
        if math.isnan(score) or self.best_score is None:
            return not math.isnan(score)
        return score > self.best_score if self.mode == "max" else score < self.best_score

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> None:
        module = policy_module(pl_module, self)
        weights: dict[str, Any] | None = None
        if is_sharded(module.policy):
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(module.policy, options=whole)
        if trainer.is_global_zero:
            save_policy(module.policy, module.tokenizer, self.folder / name, state_dict=weights)
        trainer.strategy.barrier()
