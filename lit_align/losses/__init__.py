"""Losses as functions of tensors, and the dispatchers that pick them by name.

Preference losses are a list. Policy losses are put together from independent choices: surrogate,
ratio level, aggregation, advantage, correction, KL estimator.
"""

from lit_align.losses.advantages import (
    ADVANTAGES,
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
)
from lit_align.losses.aggregation import AGGREGATIONS, window_counts
from lit_align.losses.cache import TensorCache
from lit_align.losses.correction import (
    CORRECTIONS,
    Mismatch,
    geometric_mask,
    icepop,
    mismatch,
    tis,
    tis_sequence,
)
from lit_align.losses.dispatch import DPOConfig, DPOLossType, compute_loss
from lit_align.losses.grpo import (
    ExperimentConfig,
    GRPOConfig,
    GRPOTerms,
    advantages,
    aggregate,
    compute_grpo_loss,
    correction_weights,
    grpo_terms,
    policy_ratio,
)
from lit_align.losses.kl import KL_ESTIMATORS, kl_estimator
from lit_align.losses.pass_at_k import pass_at_k, pass_hat_k, standard_error
from lit_align.losses.policy import SURROGATES, PolicyLoss
from lit_align.losses.preference import (
    PREFERENCE_LOSSES,
    PairLoss,
    dpo_loss,
    simpo_loss,
    wpo_loss,
    wpo_weights,
)
from lit_align.losses.ratio import RATIOS
from lit_align.losses.variants import Variant, Variants

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "PREFERENCE_LOSSES",
    "RATIOS",
    "SURROGATES",
    "DPOConfig",
    "DPOLossType",
    "ExperimentConfig",
    "GRPOConfig",
    "GRPOTerms",
    "Mismatch",
    "PairLoss",
    "PolicyLoss",
    "TensorCache",
    "Variant",
    "Variants",
    "advantages",
    "aggregate",
    "batch_std",
    "compute_grpo_loss",
    "compute_loss",
    "correction_weights",
    "dpo_loss",
    "geometric_mask",
    "group_mean",
    "group_mean_std",
    "grpo_terms",
    "icepop",
    "kl_estimator",
    "leave_one_out",
    "mismatch",
    "pass_at_k",
    "pass_hat_k",
    "policy_ratio",
    "simpo_loss",
    "standard_error",
    "tis",
    "tis_sequence",
    "window_counts",
    "wpo_loss",
    "wpo_weights",
]
