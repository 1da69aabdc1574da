"""What a run is about to do, before it does it."""

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_info

from lit_align.callbacks.attached import dpo_module, preference_data
from lit_align.modules.window import replica


class Plan(L.Callback):
    """Says in two lines what is trained on how much, and how a step is put together."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = dpo_module(pl_module, self)
        data = preference_data(trainer, self)
        sizes = [(p.numel(), p.requires_grad) for p in module.policy.parameters()]
        trained = sum(size for size, requires_grad in sizes if requires_grad)
        rank_zero_info(
            f"policy: {type(module.policy).__name__}, {trained:,} of {sum(n for n, _ in sizes):,} "
            f"parameters trained, {trainer.precision}; loss: {module.loss}"
        )
        pairs, (_, ranks) = len(data.train_rows), replica(trainer)
        step = data.batch_size * trainer.accumulate_grad_batches * ranks
        steps = trainer.estimated_stepping_batches
        rank_zero_info(
            f"plan: {steps} steps over {pairs:,} pairs ({steps * step / pairs:.2g} epochs), each "
            f"of {step}: {data.batch_size} per micro-batch x "
            f"{trainer.accumulate_grad_batches} accumulated x {ranks} ranks; "
            f"{len(data.val_rows):,} pairs to validate on"
        )


class StepProgressBar(RichProgressBar):
    """Rich's bar, which names no last epoch where steps end the run."""

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning writes max_epochs=-1 as the last of -2.
        return super()._get_train_description(current_epoch).replace("/-2", "")
