"""Losses as functions of tensors, and the dispatchers that pick them by name.

Preference losses are a list. Policy losses are put together from independent choices: surrogate,
ratio level, aggregation, advantage, correction, token filter, KL estimator.
"""

from lit_align.losses.advantages import (
    ADVANTAGES,
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
    leave_one_out_normalised,
)
from lit_align.losses.advantages_batch import gdpo, gpg, reinforce_pp, reinforce_pp_baseline
from lit_align.losses.advantages_group import (
    best_of_group,
    best_of_group_std,
    length_weighted,
    mean_relative,
    remax,
)
from lit_align.losses.aggregation import AGGREGATIONS, window_counts
from lit_align.losses.cache import TensorCache
from lit_align.losses.correction import (
    CORRECTIONS,
    Mismatch,
    icepop,
    mismatch,
    tis,
)
from lit_align.losses.correction_sequence import (
    geometric_mask,
    sequence_mask,
    tis_geometric,
    tis_normalised,
    tis_sequence,
    tis_sequence_normalised,
)
from lit_align.losses.dispatch import DPOConfig, DPOLossType, compute_loss
from lit_align.losses.divergences import (
    chi_po_loss,
    dpo_alpha_loss,
    dpo_forward_kl_loss,
    dpo_js_loss,
)
from lit_align.losses.filters import FILTERS
from lit_align.losses.grpo import (
    ExperimentConfig,
    GRPOConfig,
    GRPOTerms,
    advantages,
    aggregate,
    compute_grpo_loss,
    correction_weights,
    grpo_terms,
    kept_tokens,
    policy_ratio,
    token_losses,
)
from lit_align.losses.kl import KL_ESTIMATORS, kl_estimator
from lit_align.losses.margins import discopop_loss, exo_pair_loss, hinge_loss, ipo_loss, robust_loss
from lit_align.losses.offsets import dpop_loss, odpo_loss, r_dpo_loss
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss
from lit_align.losses.pass_at_k import pass_at_k, pass_hat_k, standard_error
from lit_align.losses.pointwise import (
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    cal_dpo_loss,
    nca_pair_loss,
    sppo_hard_loss,
)
from lit_align.losses.policy import SURROGATES, PolicyLoss
from lit_align.losses.policy_covariance import clip_cov_loss, kl_cov_loss
from lit_align.losses.policy_divergence import dppo_kl_loss, dppo_tv_loss
from lit_align.losses.policy_sequence import gmpo_loss, vespo_loss
from lit_align.losses.policy_soft import dro_loss, sapo_loss
from lit_align.losses.preference import (
    dpo_loss,
    simpo_loss,
    wpo_loss,
    wpo_weights,
)
from lit_align.losses.ratio import RATIOS
from lit_align.losses.reference_free import (
    alphapo_loss,
    cpo_loss,
    orpo_loss,
    sft_loss,
    simper_loss,
    simpo_hinge_loss,
    slic_hf_loss,
)
from lit_align.losses.transport import aot_loss, aot_unpaired_loss
from lit_align.losses.variants import Variant, Variants

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "FILTERS",
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
    "alphapo_loss",
    "aot_loss",
    "aot_unpaired_loss",
    "apo_down_loss",
    "apo_zero_loss",
    "batch_std",
    "bco_pair_loss",
    "best_of_group",
    "best_of_group_std",
    "cal_dpo_loss",
    "chi_po_loss",
    "clip_cov_loss",
    "compute_grpo_loss",
    "compute_loss",
    "correction_weights",
    "cpo_loss",
    "discopop_loss",
    "dpo_alpha_loss",
    "dpo_forward_kl_loss",
    "dpo_js_loss",
    "dpo_loss",
    "dpop_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "dro_loss",
    "exo_pair_loss",
    "gdpo",
    "geometric_mask",
    "gmpo_loss",
    "gpg",
    "group_mean",
    "group_mean_std",
    "grpo_terms",
    "hinge_loss",
    "icepop",
    "ipo_loss",
    "kept_tokens",
    "kl_cov_loss",
    "kl_estimator",
    "leave_one_out",
    "leave_one_out_normalised",
    "length_weighted",
    "mean_relative",
    "mismatch",
    "nca_pair_loss",
    "odpo_loss",
    "orpo_loss",
    "pass_at_k",
    "pass_hat_k",
    "policy_ratio",
    "r_dpo_loss",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "robust_loss",
    "sapo_loss",
    "sequence_mask",
    "sft_loss",
    "simper_loss",
    "simpo_hinge_loss",
    "simpo_loss",
    "slic_hf_loss",
    "sppo_hard_loss",
    "standard_error",
    "tis",
    "tis_geometric",
    "tis_normalised",
    "tis_sequence",
    "tis_sequence_normalised",
    "token_losses",
    "vespo_loss",
    "window_counts",
    "wpo_loss",
    "wpo_weights",
]
