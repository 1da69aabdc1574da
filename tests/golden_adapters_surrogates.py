"""How our code answers the golden cases of soft, sequence-level and covariance surrogates.

Also those of what modifies a loss: token filters and the entropy bonus; and KL estimators.
"""

from collections.abc import Callable
from typing import Any

import torch
from golden_adapters_policy import AGGREGATION_OF_TRL, config, fractions, kl_of, trl, verl_options
from golden_cases import Case, Result
from torch import Tensor

from lit_align.losses import (
    FILTERS,
    GRPOConfig,
    GRPOTerms,
    aggregate,
    correction_weights,
    grpo_terms,
    kept_tokens,
    policy_ratio,
    token_losses,
    window_counts,
)

Adapter = Callable[[Case], Result]

# For a project's "no bound": every bound of ours is a finite number.
UNBOUNDED = 1e18
NAMES_OF_VERL = {"k1+": "k1_plus", "k3+": "k3_plus", "abs": "absolute"}

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
SURROGATES_LEFT_OUT = {
    "metrics/vespo/phi_seq_mean": "the mean weight of vespo is not reported",
}


def terms_of(
    args: GRPOConfig, given: dict[str, Tensor], **others: Tensor | None
) -> tuple[GRPOTerms, Tensor | None]:
    """Everything that a surrogate, a filter or a bonus may read is given to it; the entropy."""
    new, old, mask = given["new_logprobs"], given["old_logprobs"], given["mask"].bool()
    reference = given["ref_logprobs"] if args.reads_reference else None
    gains = given["advantages"].unsqueeze(-1).expand(new.shape)
    context = {"old_logprobs": old, "mask": mask} | others
    sampler, entropy, weights = (
        context.pop(name, None) for name in ("sampler_logprobs", "entropy", "tis_weights")
    )
    kept = kept_tokens(
        args,
        new_logprobs=new,
        advantages=gains,
        sampler_logprobs=sampler,
        entropy=entropy,
        **context,
    )
    ratio = policy_ratio(args, new, old, mask)
    return grpo_terms(new, ratio, gains, reference, args, weights, kept, **context), entropy


def answer(
    args: GRPOConfig,
    case: Case,
    *,
    counts: dict[str, float] | None = None,
    **others: Tensor | None,
) -> Result:
    """The loss, and what was clipped."""
    given = case.tensors()
    terms, entropy = terms_of(args, given, **others)
    mask = given["mask"].bool()
    window = window_counts(mask, torch.arange(len(mask)))
    window |= {name: torch.tensor(count) for name, count in (counts or {}).items()}
    loss = aggregate(args, token_losses(args, terms, entropy), mask, window)
    return Result({"loss": loss} | fractions(args, terms.policy, mask), loss, given)


def rows(case: Case) -> dict[str, float]:
    """TRL counts rows with or without tokens, and tokens as it was told to."""
    counts = {"window_rows": float(len(case.raw["inputs"]["mask"]))}
    if "num_items_in_batch" in case.params:
        counts["window_tokens"] = float(case.params["num_items_in_batch"])
    return counts


def trl_clip(case: Case, **options: Any) -> GRPOConfig:
    """Its PPO loss with one thing besides."""
    return config(
        "clip",
        aggregation=AGGREGATION_OF_TRL[case.params["loss_type"]],
        clip_lower=case.params["epsilon_low"],
        clip_higher=case.params["epsilon_high"],
        **options,
    )


def sapo(case: Case) -> Result:
    args = config(
        "sapo",
        aggregation="sequence_mean",
        tau_positive=case.params["sapo_temperature_pos"],
        tau_negative=case.params["sapo_temperature_neg"],
    )
    return answer(args, case, counts=rows(case))


def vespo(case: Case) -> Result:
    sides = {"positive": "pos", "negative": "neg"}
    options = {
        f"{name}_{side}": case.params[f"vespo_{name}_{theirs}"]
        for side, theirs in sides.items()
        for name in ("k", "lambda")
    }
    weights = case.tensors().get("importance_sampling_ratio")
    return answer(config("vespo", **options), case, counts=rows(case), tis_weights=weights)


def gmpo(case: Case) -> Result:
    args = config(
        "gmpo",
        aggregation="sequence_mean",
        beta=case.params["beta"],
        log_clip_lower=case.params["epsilon_low"],
        log_clip_higher=case.params["epsilon_high"],
    )
    return answer(args, case, counts=rows(case))


def trl_rloo(case: Case) -> Result:
    args = config(
        "clip",
        ratio_level="sequence_product",
        aggregation="sequence_mean",
        clip_lower=case.params["epsilon_low"],
        clip_higher=case.params["epsilon_high"],
    )
    return answer(args, case, counts=rows(case))


def dppo(loss_fn: str) -> Adapter:
    def adapter(case: Case) -> Result:
        args = config(
            loss_fn,
            divergence_lower=case.params["clip_ratio_low"],
            divergence_higher=case.params["clip_ratio_high"],
            weight_cap=case.params["clip_ratio_c"],
            **verl_options(case),
        )
        policy = terms_of(args, case.tensors())[0].policy
        masked = policy.clipped_low | policy.clipped_high
        # What verl calls the lower clip is the cap, which is in no flag of ours.
        capped = (policy.losses != policy.unclipped) & ~masked
        return shown(
            answer(args, case),
            {"metrics/actor/pg_clipfrac": masked, "metrics/actor/pg_clipfrac_lower": capped},
            case,
        )

    return adapter


def shown(found: Result, flags: dict[str, Tensor], case: Case) -> Result:
    """With the share of tokens of each flag besides."""
    mask = case.tensors()["mask"].bool()
    shares = {name: flag[mask].double().mean() for name, flag in flags.items()}
    return found._replace(outputs={**found.outputs, **shares})


def prime_rl(case: Case) -> Result:
    """One completion, its sum; the squared log-ratio is k2 with the old policy for reference."""
    given = case.tensors()
    args = config(
        "dppo_tv",
        aggregation="sequence_sum",
        beta=2 * case.params["kl_tau"],
        kl_estimator="k2",
        divergence_lower=case.params["dppo_mask_low"],
        divergence_higher=case.params["dppo_mask_high"],
    )
    new, old, mask = (given[n][None] for n in ("new_logprobs", "old_logprobs", "mask"))
    mask = mask.bool()
    gains = torch.as_tensor(given["advantages"]).expand(new.shape)
    ratio = policy_ratio(args, new, old, mask)
    terms = grpo_terms(new, ratio, gains, old, args, old_logprobs=old, mask=mask)
    counts = window_counts(mask, torch.zeros(1).long())
    loss = aggregate(args, token_losses(args, terms), mask, counts)
    return Result({"loss": loss}, loss, given)


def dro(case: Case) -> Result:
    return answer(config("dro", dro_beta=case.params["dro_beta"], **verl_options(case)), case)


def clip_cov(case: Case) -> Result:
    """All candidates are drawn, whatever the lot."""
    args = config(
        "clip_cov",
        clip_lower=case.params["clip_ratio_low"],
        clip_higher=case.params["clip_ratio_high"],
        cov_share=case.params["clip_cov_ratio"],
        cov_lower=case.params["clip_cov_lb"],
        cov_upper=case.params["clip_cov_ub"],
        **verl_options(case),
    )
    given = case.tensors()
    draws = torch.zeros_like(given["new_logprobs"])
    policy = terms_of(args, given, draws=draws)[0].policy
    # verl counts the drawn as clipped, and not what the clip cuts.
    drawn = (policy.losses == 0) & (policy.clipped_low | policy.clipped_high)
    found = answer(args, case, draws=draws)
    return shown(found, {"metrics/actor/pg_clipfrac": drawn}, case)


def kl_cov(case: Case) -> Result:
    args = config(
        "kl_cov",
        cov_share=case.params["kl_cov_ratio"],
        cov_penalty=case.params["ppo_kl_coef"],
        **verl_options(case),
    )
    return answer(args, case)


def trl_top_entropy(case: Case) -> Result:
    args = trl_clip(
        case, token_filter="top_entropy", entropy_share=case.params["top_entropy_quantile"]
    )
    found = answer(args, case, counts=rows(case), entropy=case.tensors()["entropies"])
    return with_all_clips(found, case)


def with_all_clips(found: Result, case: Case) -> Result:
    """TRL counts clipped tokens before it filters: those of the loss without the filter."""
    plain = trl(case).outputs
    clips = {name: value for name, value in plain.items() if name.startswith("metrics/clip_ratio")}
    return found._replace(outputs={**found.outputs, **clips})


def high_entropy_mask(case: Case) -> Result:
    """On the tokens: outside, TRL's is false."""
    given = case.tensors()
    mask, share = given["mask"].bool(), 1 - case.params["threshold_quantile"]
    kept = FILTERS["top_entropy"].fn(given["entropies"], mask, entropy_share=share)
    return Result({"entropy_mask": kept.where(mask, False).long()})


def trl_off_policy(case: Case) -> Result:
    args = trl_clip(
        case,
        token_filter="off_policy_sequence",
        off_policy_delta=case.params["off_policy_mask_threshold"],
    )
    sampler = case.tensors()["sampling_logprobs"]
    return with_all_clips(answer(args, case, counts=rows(case), sampler_logprobs=sampler), case)


def off_policy_mask(case: Case) -> Result:
    """One number per row, that of its first trained token."""
    given = case.tensors()
    new, mask = given["new_logprobs"], given["mask"].bool()
    kept = FILTERS["off_policy_sequence"].fn(
        new,
        new,
        given["advantages"].expand(new.shape),
        mask,
        given["sampling_logprobs"],
        off_policy_delta=case.params["threshold"],
    )
    first = mask.long().argmax(-1, keepdim=True)
    return Result({"keep": kept.gather(1, first).long()})


def entropy_bonus(case: Case) -> Result:
    args = trl_clip(case, entropy_bonus=case.params["entropy_coef"])
    return answer(args, case, counts=rows(case), entropy=case.tensors()["entropies"])


def openrlhf_correction(**filtered: Any) -> Adapter:
    """Weights of tokens between two bounds, or tokens of completions between them."""

    def adapter(case: Case) -> Result:
        lower, upper = case.params["threshold"]
        bounds = {"tis_floor": lower, "tis_cap": upper}
        if filtered:
            bounds = {"tis_cap": UNBOUNDED, "ratio_lower": lower, "ratio_upper": upper}
        args = config(
            "clip",
            clip_lower=case.params["clip_eps_low"],
            clip_higher=case.params["clip_eps_high"],
            correction="tis",
            **bounds,
            **filtered,
        )
        given = case.tensors()
        sampler, mask = given["rollout_logprobs"], given["mask"].bool()
        weights = correction_weights(args, given["old_logprobs"], sampler, mask)
        return answer(args, case, sampler_logprobs=sampler, tis_weights=weights)

    return adapter


def verl_kl(case: Case) -> Result:
    given = case.tensors()
    name = NAMES_OF_VERL[case.params["kl_penalty"]]
    estimate = kl_of(given, name, ("new_logprobs", "ref_logprobs"))
    return Result({"kl": estimate}, estimate.sum(), given)


SURROGATES_ADAPTERS: dict[str, Adapter] = {
    "clip_cov": clip_cov,
    "dppo_kl": dppo("dppo_kl"),
    "dppo_tv": dppo("dppo_tv"),
    "dro": dro,
    "gmpo": gmpo,
    "high_entropy_mask": high_entropy_mask,
    "kl_cov": kl_cov,
    "off_policy_mask": off_policy_mask,
    "openrlhf_is_correction[seq-mask-tis]": openrlhf_correction(
        token_filter="ratio_bounds", bound_over="sequence_mean"
    ),
    "openrlhf_is_correction[tis]": openrlhf_correction(),
    "prime_rl_dppo_tv_kl": prime_rl,
    "trl_entropy_bonus": entropy_bonus,
    "trl_high_entropy_mask": trl_top_entropy,
    "trl_off_policy_sequence_mask": trl_off_policy,
    "trl_rloo": trl_rloo,
    "trl_sapo": sapo,
    "trl_vespo": vespo,
    "verl_kl_abs": verl_kl,
    "verl_kl_straight_through": verl_kl,
}
