"""What the callbacks here expect to find in a Trainer, and what they say if they do not."""

from typing import TypeVar

import lightning as L

from lit_align.data import PreferenceDataModule
from lit_align.errors import UserError
from lit_align.modules.acting import ActingModule
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.policy import PolicyModule

Module = TypeVar("Module", bound=L.LightningModule)


def policy_module(module: L.LightningModule, callback: L.Callback) -> PolicyModule:
    """The module, which must be one that holds a policy, however that is trained."""
    return _checked(module, PolicyModule, callback, "modules that train a policy (DPO, GRPO, KTO)")


def acting_module(module: L.LightningModule, callback: L.Callback) -> ActingModule:
    """The module, which must be one that writes completions."""
    return _checked(module, ActingModule, callback, "a module that writes completions (GRPO)")


def comparing_module(
    module: L.LightningModule, callback: L.Callback, instead: str
) -> ComparingModule:
    """The module, which must be one that learns from answers in the data.

    Args:
        module: of this run.
        callback: that needs it.
        instead: what other modules have in its place.
    """
    return _checked(module, ComparingModule, callback, "a DPOModule or UnpairedModule", instead)


def answered_data(trainer: L.Trainer, callback: L.Callback) -> PreferenceDataModule:
    """The data of this run, whose rows can be read outside the training loop too."""
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, PreferenceDataModule):
        return data
    raise UserError(
        f"{type(callback).__name__} reads the rows of a PreferenceDataModule or "
        f"UnpairedDataModule, and this Trainer has "
        f"{'none' if data is None else f'a {type(data).__name__}'}: pass "
        "datamodule=PreferenceDataModule(...) to trainer.fit, or leave the callback out"
    )


def _checked(
    module: L.LightningModule, kind: type[Module], callback: L.Callback, served: str, *more: str
) -> Module:
    if isinstance(module, kind):
        return module
    told = f"{type(callback).__name__} serves {served}, not a {type(module).__name__}"
    raise UserError("; ".join([f"{told}: leave the callback out", *more]))
