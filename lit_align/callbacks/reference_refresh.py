"""A reference that follows the policy in training."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_align.callbacks.attached import policy_module
from lit_align.callbacks.save_policy import SavePolicy
from lit_align.errors import UserError
from lit_align.modules.frozen import FrozenReference
from lit_align.modules.moving import MovingReference
from lit_align.modules.policy import PolicyModule, refuse_other_settings


class ReferenceRefresh(L.Callback):
    """Moves the reference towards the policy now and then (TR-DPO).

        reference = alpha * policy + (1 - alpha) * reference,  every_n_steps optimizer steps apart

    It starts as the policy before the first step of the first run with this callback; a run that
    is resumed goes on with it, and needs the callback, set as it was.

    What is looked up with a reference that stays where it is, has to be computed here: each
    micro-batch costs a second forward pass, and `ReferenceCache`, if it is there, makes none over
    the data. What is trained is held twice, in memory and in checkpoints, which this makes larger
    by those weights: all of them, or those of an adapter (its factors are mixed, not their
    product). With weights in half precision (`bf16-true`, `16-true`) it is held in float32 besides,
    and checkpoints hold that, for a small `alpha` would be rounded away each time.

    Right after a move with `alpha=1` policy and reference agree and all rewards are 0: rewards of
    different steps are of different references, so choose the best policy by
    `val/ranking_accuracies`.

    In GRPO it is the reference of the KL term, and counts from the next rollout on.

    Args:
        alpha: share of the policy, in (0, 1]; 1: a copy, the hard update of the paper.
        every_n_steps: optimizer steps from one move to the next, at least 1.

    Source:
        Gorbatovski et al. 2024, arXiv:2404.09656, the soft and the hard update; both numbers at
        once, and their defaults, as TRL has them (`ref_model_mixup_alpha`, `ref_model_sync_steps`).
    """

    def __init__(self, alpha: float = 0.6, every_n_steps: int = 512) -> None:
        if type(alpha) not in (int, float) or not 0 < alpha <= 1:
            raise UserError(f"reference_refresh.alpha must be above 0 and at most 1, not {alpha!r}")
        if type(every_n_steps) is not int or every_n_steps < 1:
            raise UserError(
                "reference_refresh.every_n_steps must be a whole number of optimizer steps, "
                f"at least 1, not {every_n_steps!r}"
            )
        self.alpha = alpha
        self.every_n_steps = every_n_steps
        self.reference = MovingReference()
        self._module: PolicyModule | None = None
        self._usual: FrozenReference | None = None
        self._saved: dict[str, Any] | None = None
        self._moved_at = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the reference's place before the policy is loaded, sharded or moved."""
        module = policy_module(pl_module, self)
        _refuse_what_cannot_move(trainer, module)
        _warn_of_a_best_by_rewards(trainer)
        if module is not self._module:
            self._module, self.reference = module, MovingReference()
        if stage == TrainerFn.VALIDATING and self.reference.model is None:
            raise UserError(
                "ReferenceRefresh has no reference that has moved: that is part of a run, and only "
                "trainer.fit restores it from a checkpoint; validate there, or leave it out"
            )
        if stage == TrainerFn.FITTING:
            self._saved, self._moved_at = None, 0
        if module.live_reference is not self.reference:
            self._usual = module.live_reference
            module.live_reference = self.reference

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._step_back()

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        self._step_back()

    def _step_back(self) -> None:
        """A run of the same module without this callback is to have its usual reference."""
        if self._module is not None and self._module.live_reference is self.reference:
            self._module.live_reference = self._usual

    def state_dict(self) -> dict[str, Any]:
        if self.reference.model is None:
            return {}
        weights = self.reference.weights()
        return {"weights": weights, "moved_at": self._moved_at, "settings": self._settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note it for the module, which may be resumed without this callback."""
        if self.reference.model is not None:
            settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
            checkpoint["reference_moved_by"] = f"ReferenceRefresh({settings})"

    def _settings(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "every_n_steps": self.every_n_steps}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._usual is not None:
            self._usual.is_too_late = True
        self._tell(int(trainer.estimated_stepping_batches))
        if trainer.ckpt_path is None:
            return
        if self._saved is None:
            raise UserError(
                "this checkpoint was written without ReferenceRefresh and holds no reference: "
                "leave the callback out, as the run did that is to go on"
            )
        settings = self._settings()
        refuse_other_settings("ReferenceRefresh", self._saved.get("settings", settings), settings)
        self.reference.restore(trainer, self._saved["weights"])
        self._moved_at = self._saved["moved_at"]
        self._saved = None
        # Others may have written the checkpoint after the step and before this was told of it.
        self._move_if_due(trainer, pl_module)

    def _tell(self, steps: int) -> None:
        """Say how the reference moves, and if it never will."""
        never = f", which this run of {steps} never reaches" if self.every_n_steps > steps else ""
        rank_zero_info(
            f"reference: moves {self.alpha:g} of the way to the policy every {self.every_n_steps} "
            f"steps{never}"
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self._move_if_due(trainer, pl_module)
        moves = trainer.global_step // self.every_n_steps
        pl_module.log("train/reference_refreshes", float(moves))

    def _move_if_due(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Once after such a step, however many micro-batches follow it."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._moved_at:
            module = policy_module(pl_module, self)
            self.reference.move(trainer, module.policy, self.alpha)
            self._moved_at = step


def _refuse_what_cannot_move(trainer: L.Trainer, module: PolicyModule) -> None:
    if not module.loss.reads_reference:
        raise UserError(
            "ReferenceRefresh moves the reference, and this loss compares with none: choose one "
            "that does, such as dpo (or loss.beta above 0 for a loss of policies), or leave the "
            "callback out"
        )
    if module.reference is not None:
        raise UserError(
            "ReferenceRefresh starts from the policy before the first step: leave reference=... "
            "out, or the callback"
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
        raise UserError(
            f"ReferenceRefresh cannot mix weights as {type(trainer.strategy).__name__} holds them: "
            "choose strategy=ddp, or FullyShardedStrategy (strategy=fsdp)"
        )


def _warn_of_a_best_by_rewards(trainer: L.Trainer) -> None:
    """Of SavePolicy, which knows nothing of references."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SavePolicy) and (callback.best or "").startswith("val/rewards/"):
            rank_zero_warn(
                f"SavePolicy chooses the best policy by {callback.best}, but rewards of two steps "
                "may be of two references: choose it by something else, such as "
                "best_metric=val/ranking_accuracies"
            )
