"""What a run is about to do, before it does it."""

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_info

from lit_align.callbacks.attached import policy_module


class Plan(L.Callback):
    """Says in a few lines what is trained on how much, and how a step is put together.

    What is read, and how it is cut, the data module says itself (`describe_plan`).
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = policy_module(pl_module, self)
        sizes = [(p.numel(), p.requires_grad) for p in module.policy.parameters()]
        trained = sum(size for size, requires_grad in sizes if requires_grad)
        rank_zero_info(
            f"policy: {type(module.policy).__name__}, {trained:,} of {sum(n for n, _ in sizes):,} "
            f"parameters trained, {trainer.precision}; loss: {module.loss}"
        )
        described = getattr(getattr(trainer, "datamodule", None), "describe_plan", _steps)
        rank_zero_info(described(trainer))


def _steps(trainer: L.Trainer) -> str:
    """All there is to say of data that says nothing of itself."""
    return f"plan: {trainer.estimated_stepping_batches} steps"


class StepProgressBar(RichProgressBar):
    """Rich's bar, which names no last epoch where steps end the run, and counts them right."""

    @property
    def total_train_batches(self) -> int | float:
        # Lightning takes steps that are left for micro-batches, of which a step may have several.
        trainer = self.trainer
        if trainer.max_steps == -1:
            return trainer.num_training_batches
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, left)

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning writes max_epochs=-1 as the last of -2.
        return super()._get_train_description(current_epoch).replace("/-2", "")
