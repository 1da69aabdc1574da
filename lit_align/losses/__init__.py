"""Losses as functions of tensors, and the dispatchers that pick them by name.

Preference losses are a list. Policy losses are put together from independent choices: surrogate,
ratio level, aggregation, advantage, correction, token filter, KL estimator.
"""

from lit_align.losses.adaptive import beta_dpo_loss
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
from lit_align.losses.advantages_token import optimal_token_baseline
from lit_align.losses.aggregation import AGGREGATIONS, window_counts
from lit_align.losses.cache import TensorCache
from lit_align.losses.columns import PAIR_COLUMNS, WITHOUT_VALUE, check_columns, of_term, remark
from lit_align.losses.combination import (
    COMBINATIONS,
    CombinedConfig,
    pair_config,
    weighted_sum,
)
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
from lit_align.losses.dispatch import (
    DPOConfig,
    DPOLossType,
    cached_reference,
    compute_loss,
)
from lit_align.losses.divergences import (
    chi_po_loss,
    dpo_alpha_loss,
    dpo_forward_kl_loss,
    dpo_js_loss,
)
from lit_align.losses.entropy import ENTROPY_CONTROLS, EntropyBonus
from lit_align.losses.filters import FILTERS
from lit_align.losses.goals import cal_dpo_loss, sppo_hard_loss, sppo_soft_loss
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
    next_entropy_bonus,
    policy_ratio,
    token_losses,
)
from lit_align.losses.heads import ld_dpo_loss
from lit_align.losses.kl import KL_ESTIMATORS, kl_estimator
from lit_align.losses.likelihood import sft_loss, sft_whole_loss
from lit_align.losses.margins import discopop_loss, exo_pair_loss, hinge_loss, ipo_loss, robust_loss
from lit_align.losses.offsets import dpop_loss, odpo_loss, r_dpo_loss
from lit_align.losses.pair_config import PairConfig, Term
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss
from lit_align.losses.pass_at_k import pass_at_k, pass_hat_k, standard_error
from lit_align.losses.pointwise import (
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    nca_pair_loss,
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
    cpo_preference_loss,
    orpo_odds_ratio_loss,
    simper_loss,
    simpo_hinge_loss,
    slic_calibration_loss,
)
from lit_align.losses.running import RUNNING, Running, moments
from lit_align.losses.transport import aot_loss, aot_unpaired_loss
from lit_align.losses.unpaired import (
    UNPAIRED_LOSSES,
    UnpairedLoss,
    apo_zero_unpaired_loss,
    bco_loss,
    kto_loss,
    reference_point,
)
from lit_align.losses.unpaired_dispatch import UnpairedConfig, compute_unpaired_loss
from lit_align.losses.variants import Variant, Variants

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "COMBINATIONS",
    "CORRECTIONS",
    "ENTROPY_CONTROLS",
    "FILTERS",
    "KL_ESTIMATORS",
    "PAIR_COLUMNS",
    "PREFERENCE_LOSSES",
    "RATIOS",
    "RUNNING",
    "SURROGATES",
    "UNPAIRED_LOSSES",
    "WITHOUT_VALUE",
    "CombinedConfig",
    "DPOConfig",
    "DPOLossType",
    "EntropyBonus",
    "ExperimentConfig",
    "GRPOConfig",
    "GRPOTerms",
    "Mismatch",
    "PairConfig",
    "PairLoss",
    "PolicyLoss",
    "Running",
    "TensorCache",
    "Term",
    "UnpairedConfig",
    "UnpairedLoss",
    "Variant",
    "Variants",
    "advantages",
    "aggregate",
    "alphapo_loss",
    "aot_loss",
    "aot_unpaired_loss",
    "apo_down_loss",
    "apo_zero_loss",
    "apo_zero_unpaired_loss",
    "batch_std",
    "bco_loss",
    "bco_pair_loss",
    "best_of_group",
    "best_of_group_std",
    "beta_dpo_loss",
    "cached_reference",
    "cal_dpo_loss",
    "check_columns",
    "chi_po_loss",
    "clip_cov_loss",
    "compute_grpo_loss",
    "compute_loss",
    "compute_unpaired_loss",
    "correction_weights",
    "cpo_preference_loss",
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
    "kto_loss",
    "ld_dpo_loss",
    "leave_one_out",
    "leave_one_out_normalised",
    "length_weighted",
    "mean_relative",
    "mismatch",
    "moments",
    "nca_pair_loss",
    "next_entropy_bonus",
    "odpo_loss",
    "of_term",
    "optimal_token_baseline",
    "orpo_odds_ratio_loss",
    "pair_config",
    "pass_at_k",
    "pass_hat_k",
    "policy_ratio",
    "r_dpo_loss",
    "reference_point",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remark",
    "remax",
    "robust_loss",
    "sapo_loss",
    "sequence_mask",
    "sft_loss",
    "sft_whole_loss",
    "simper_loss",
    "simpo_hinge_loss",
    "simpo_loss",
    "slic_calibration_loss",
    "sppo_hard_loss",
    "sppo_soft_loss",
    "standard_error",
    "tis",
    "tis_geometric",
    "tis_normalised",
    "tis_sequence",
    "tis_sequence_normalised",
    "token_losses",
    "vespo_loss",
    "weighted_sum",
    "window_counts",
    "wpo_loss",
    "wpo_weights",
]
