"""What the callbacks here expect to find in a Trainer, and what they say if they do not."""

import lightning as L

from lit_align.data import PreferenceDataModule
from lit_align.errors import UserError
from lit_align.modules import DPOModule


def dpo_module(module: L.LightningModule, callback: L.Callback) -> DPOModule:
    """The module, which must be one that holds a policy and a preference loss."""
    if isinstance(module, DPOModule):
        return module
    raise UserError(f"{type(callback).__name__} serves a DPOModule, not a {type(module).__name__}")


def preference_data(trainer: L.Trainer, callback: L.Callback) -> PreferenceDataModule:
    """The data of this run, whose rows can be read outside the training loop too."""
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, PreferenceDataModule):
        return data
    raise UserError(
        f"{type(callback).__name__} reads the rows of a PreferenceDataModule, and this Trainer has "
        f"{'none' if data is None else f'a {type(data).__name__}'}: pass "
        "datamodule=PreferenceDataModule(...) to trainer.fit, or leave the callback out"
    )
