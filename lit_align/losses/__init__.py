"""Losses as functions of tensors, and the dispatcher that picks one by name."""

from lit_align.losses.cache import TensorCache
from lit_align.losses.dispatch import DPOConfig, DPOLossType, compute_loss
from lit_align.losses.preference import (
    PREFERENCE_LOSSES,
    PairLoss,
    dpo_loss,
    simpo_loss,
    wpo_loss,
    wpo_weights,
)
from lit_align.losses.variants import Variant, Variants

__all__ = [
    "PREFERENCE_LOSSES",
    "DPOConfig",
    "DPOLossType",
    "PairLoss",
    "TensorCache",
    "Variant",
    "Variants",
    "compute_loss",
    "dpo_loss",
    "simpo_loss",
    "wpo_loss",
    "wpo_weights",
]
