"""How our code answers the golden cases of policy losses, aggregations and KL estimators.

A project's loss is a choice on each of our axes; where it counts otherwise than we do (all rows of
a batch, or an expected number of tokens), our function is given that project's counts.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from golden_cases import Case, Result
from torch import Tensor

from lit_align.losses import (
    KL_ESTIMATORS,
    GRPOConfig,
    GRPOTerms,
    PolicyLoss,
    aggregate,
    compute_grpo_loss,
    correction_weights,
    grpo_terms,
    kl_estimator,
    policy_ratio,
    window_counts,
)
from lit_align.ops import masked_mean

Adapter = Callable[[Case], Result]

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
POLICY_LEFT_OUT = {
    "metrics/cispo_clip_ratio": "TRL counts tokens of positive advantage only; the cap cuts all",
    "metrics/actor/ppo_kl": "minus the mean of the bounded log-ratio; ours is not bounded",
    "clip_ratio": "OpenRLHF counts tokens that its correction has left out as well",
    "ppo_kl": "as metrics/actor/ppo_kl",
    "vllm_kl": "OpenRLHF's own statistic of the sampler's mismatch",
    "metrics/clip_ratio/low_min": "the least over processes; ours are summed over them",
    "metrics/clip_ratio/high_max": "the same for the largest",
}

AGGREGATION_OF_TRL = {
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant_length",
    "grpo": "sequence_mean",
    "luspo": "sequence_sum",
}
AGGREGATION_OF_VERL = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
NAMES_OF_VERL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def config(loss_fn: str, **options: Any) -> GRPOConfig:
    """Of the options those that are not None; its one warning is tested elsewhere."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "k1 in the loss")
        return GRPOConfig(loss_fn, **{n: v for n, v in options.items() if v is not None})


def terms_of(args: GRPOConfig, given: dict[str, Tensor], weights: Tensor | None) -> GRPOTerms:
    """From log-probs to the terms of each token; advantages are repeated over the row."""
    new, mask = given["new_logprobs"], given["mask"].bool()
    ratio = policy_ratio(args, new, given["old_logprobs"], mask)
    advantages = given["advantages"].unsqueeze(-1).expand(new.shape)
    reference = given["ref_logprobs"] if args.reads_reference else None
    return grpo_terms(new, ratio, advantages, reference, args, weights)


def result(
    args: GRPOConfig,
    case: Case,
    weights: str | Tensor | None = None,
    counts: dict[str, float] | None = None,
) -> Result:
    """Loss, terms and clip fractions; `counts` are those in which a project departs from ours."""
    given = case.tensors()
    mask = given["mask"].bool()
    weights = given.get(weights) if isinstance(weights, str) else weights
    policy, kl = terms_of(args, given, weights)
    window = window_counts(mask, torch.arange(len(mask)))
    window |= {name: torch.tensor(count) for name, count in (counts or {}).items()}
    loss = aggregate(args, policy.losses + args.beta * kl, mask, window)
    shown = {
        "loss": loss,
        "pg_loss_per_token": policy.losses.where(mask, 0.0),
        "kl_per_token": kl.where(mask, 0.0),
        "pg_masked_mean": over_tokens(policy.losses, mask),
        "kl_masked_mean": over_tokens(kl, mask),
        "metrics/kl": over_tokens(kl, mask),
    }
    return Result(shown | fractions(args, policy, mask), loss, given)


def over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(values.flatten(), mask.flatten())


def fractions(args: GRPOConfig, policy: PolicyLoss, mask: Tensor) -> dict[str, Tensor]:
    """How much is clipped, in the precision in which each project counts it."""
    low, high = policy.clipped_low, policy.clipped_high
    worse = policy.clipped > policy.unclipped if args.loss_fn != "cispo" else low | high
    cut = policy.losses < torch.maximum(policy.unclipped, policy.clipped)
    found = {
        "clipfrac_masked_mean": over_tokens((low | high).float(), mask),
        "metrics/actor/pg_clipfrac": over_tokens(worse.double(), mask),
        "metrics/actor/pg_clipfrac_lower": over_tokens(cut.double(), mask),
    }
    for name, flags in {"low": low, "high": high, "region": low | high}.items():
        # Of a ratio per completion TRL counts completions, those without tokens too.
        whole = args.ratio_level != "token"
        counted = flags[:, 0].double().mean() if whole else over_tokens(flags.float(), mask)
        found[f"metrics/clip_ratio/{name}_mean"] = counted
    return found


def open_instruct(case: Case) -> Result:
    given = case.params
    args = config(
        given["loss_fn"],
        clip_lower=given["clip_lower"],
        clip_higher=given["clip_higher"],
        beta=given["beta"],
        kl_estimator=given["kl_estimator"],
    )
    denominator = given["loss_denominator"]
    counts = {} if denominator == "token" else {"window_tokens": float(denominator)}
    return result(args, case, "rho_weights", counts)


def trl(case: Case) -> Result:
    """Any of its losses: rows are counted with or without tokens, and tokens as it was told to."""
    given = case.params
    loss_type, delta = given["loss_type"], given.get("delta")
    cispo, length = loss_type == "cispo", given.get("max_completion_length")
    args = config(
        "cispo" if cispo else "two_sided" if delta else "clip",
        ratio_level=given.get("importance_sampling_level", "token"),
        aggregation=AGGREGATION_OF_TRL[loss_type],
        # The cap itself, where ours is what it exceeds 1 by.
        clip_higher=given["epsilon_high"] - cispo,
        clip_lower=None if cispo else given["epsilon_low"],
        delta=delta,
        max_completion_length=length if loss_type == "dr_grpo" else None,
        beta=given.get("beta", 0.0),
        kl_estimator="ratio_k3" if given.get("use_bias_correction_kl") else "k3",
    )
    counts = {"window_rows": float(len(case.raw["inputs"]["mask"]))}
    if loss_type in {"dapo", "cispo"}:
        counts["window_tokens"] = float(given["num_items_in_batch"])
    weights = case.tensors().get("importance_sampling_ratio")
    if weights is not None and weights.shape[-1] == 1:
        weights = weights.expand(case.tensors()["mask"].shape)
    return result(args, case, weights, counts)


def verl_options(case: Case) -> dict[str, Any]:
    """How it aggregates: a constant length is the width of the batch if it was not told one."""
    aggregation = AGGREGATION_OF_VERL[case.params["loss_agg_mode"]]
    if aggregation != "constant_length":
        return {"aggregation": aggregation}
    length = case.params["loss_scale_factor"] or len(case.raw["inputs"]["mask"][0])
    return {"aggregation": aggregation, "max_completion_length": length}


def verl_counts(case: Case) -> dict[str, float]:
    """Of the older commit, which sums over rows where the newer one takes their mean."""
    return {"window_rows": 1.0} if "verl_b178a3c" in case.variant else {}


def dual_clip(case: Case) -> Result:
    args = config(
        "dual_clip",
        clip_lower=case.params["clip_ratio_low"],
        clip_higher=case.params["clip_ratio_high"],
        dual_clip=case.params["clip_ratio_c"],
        **verl_options(case),
    )
    return result(args, case, "rollout_is_weights", verl_counts(case))


def verl_gspo(case: Case) -> Result:
    args = config(
        "clip",
        ratio_level="sequence_token",
        aggregation="sequence_mean",
        clip_lower=case.params["clip_ratio_low"],
        clip_higher=case.params["clip_ratio_high"],
    )
    return result(args, case, "rollout_is_weights")


def verl_cispo(case: Case) -> Result:
    args = config(
        "cispo",
        clip_higher=case.params["clip_ratio_high"],
        weight_floor=1 - case.params["clip_ratio_low"],
        **verl_options(case),
    )
    return result(args, case)


def gpg(case: Case) -> Result:
    return result(config("reinforce", **verl_options(case)), case)


def luspo_liger(case: Case) -> Result:
    args = config(
        "clip",
        aggregation="sequence_sum",
        clip_lower=case.params["epsilon_low"],
        clip_higher=case.params["epsilon_high"],
    )
    return result(args, case, counts={"window_rows": float(len(case.raw["inputs"]["mask"]))})


def openrlhf_icepop(case: Case) -> Result:
    given, (lower, upper) = case.tensors(), case.params["threshold"]
    args = config(
        "clip",
        clip_lower=case.params["clip_eps_low"],
        clip_higher=case.params["clip_eps_high"],
        correction="icepop",
        icepop_lower=lower,
        icepop_upper=upper,
    )
    sampler, mask = given["rollout_logprobs"], given["mask"].bool()
    return result(args, case, correction_weights(args, given["old_logprobs"], sampler, mask))


def aggregated(values: Tensor, mask: Tensor, case: Case, options: dict[str, Any]) -> Tensor:
    """Losses that are there already."""
    counts = window_counts(mask.bool(), torch.arange(len(mask)))
    counts |= {name: torch.tensor(count) for name, count in verl_counts(case).items()}
    return aggregate(config("clip", **options), values, mask.bool(), counts)


def agg_loss(case: Case) -> Result:
    given = case.tensors()
    loss = aggregated(given["loss_mat"], given["mask"], case, verl_options(case))
    return Result({"loss": loss})


def open_instruct_mean(case: Case) -> Result:
    given = case.tensors()
    kind = "token_mean" if case.params["axis"] in {None, "None"} else "sequence_mean"
    value = aggregated(given["values"], given["mask"], case, {"aggregation": kind})
    return Result({"value": value})


def token_terms(case: Case) -> Result:
    """Where the cap acts, of tokens without rows."""
    given = {name: tensor.detach() for name, tensor in case.tensors().items()}
    args = config("cispo", clip_higher=case.params["clip_higher"])
    policy, _ = grpo_terms(
        given["new_logprobs"],
        given["ratio"],
        given["advantages"],
        None,
        args,
        given["rho_weights"],
    )
    return Result({"clipfrac": policy.clipped_high.double()})


def kl(names: tuple[str, str] = ("new_logprobs", "ref_logprobs")) -> Adapter:
    """The estimator that the case names, in whatever way it does."""

    def adapter(case: Case) -> Result:
        given = case.tensors()
        named = case.params.get("kl_estimator", case.params.get("kl_penalty"))
        estimate = kl_of(given, NAMES_OF_VERL.get(named, named), names)
        return Result({"kl": estimate}, estimate.sum(), given)

    return adapter


def kl_of(given: dict[str, Tensor], name: Any, names: tuple[str, str]) -> Tensor:
    """Through the one function where there is a ratio to be had."""
    new, reference = (given[key] for key in names)
    if "old_logprobs" not in given:
        return kl_estimator(name).fn(new, reference)
    args = config("clip", kl_estimator=name, beta=1.0)
    ratio = policy_ratio(args, new, given["old_logprobs"], torch.ones_like(new).bool())
    *_, estimate = compute_grpo_loss(new, ratio, torch.zeros_like(new), reference, args)
    return estimate


def trl_k3(case: Case) -> Result:
    given = case.tensors()
    mean = KL_ESTIMATORS["k3"].fn(given["new_logprobs"], given["ref_logprobs"]).mean()
    return Result({"mean_kl": mean, "metric_kl": mean}, mean, given)


# Variants that hold several functions: what tells them apart.
POLICY_NAMED_BY: dict[str, Callable[[Case], str]] = {
    "openrlhf_is_correction": lambda case: case.params["type"]
}

POLICY_ADAPTERS: dict[str, Adapter] = {
    "agg_loss": agg_loss,
    "agg_loss__verl_b178a3c_sum_norm": agg_loss,
    "gpg": gpg,
    "gspo": trl,
    "gspo_dapo_normalised": trl,
    "gspo_luspo_normalised": trl,
    "gspo_token": trl,
    "kl_estimator_0": kl(),
    "kl_estimator_1": kl(),
    "kl_estimator_2": kl(),
    "kl_estimator_3": kl(),
    "luspo_token__liger": luspo_liger,
    "oi_masked_mean": open_instruct_mean,
    "oi_masked_mean_axis1": open_instruct_mean,
    "open_instruct_cispo": open_instruct,
    "open_instruct_dapo": open_instruct,
    "open_instruct_token_terms": token_terms,
    "openrlhf_is_correction[icepop]": openrlhf_icepop,
    "openrlhf_kl": kl(("log_probs", "log_probs_base")),
    "ppo_dual_clip": dual_clip,
    "ppo_dual_clip__verl_b178a3c_sum_norm": dual_clip,
    "trl_bnpo": trl,
    "trl_cispo": trl,
    "trl_dapo": trl,
    "trl_dr_grpo": trl,
    "trl_grpo": trl,
    "trl_k3": trl_k3,
    "trl_luspo": trl,
    "verl_cispo": verl_cispo,
    "verl_gspo": verl_gspo,
    "verl_kl_kl": kl(),
    "verl_kl_low_var_kl": kl(),
    "verl_kl_mse": kl(),
}
