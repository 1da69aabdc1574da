"""How our code answers the golden cases of advantages, corrections and pass@k.

Some variants hold several functions, told apart by their options: `NAMED_BY` gives each the name
under which its adapter stands, "variant[options]".
"""

from collections.abc import Callable
from typing import Any

import torch
from golden_cases import Case, Result
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses import (
    CORRECTIONS,
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
    mismatch,
    pass_at_k,
)
from lit_align.ops import masked_mean

# For a project's "no bound": every bound of ours is a finite number.
UNBOUNDED = 1e18

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
ADVANTAGES_LEFT_OUT = {
    "metric_rho_*": "open-instruct's own statistics of the weights",
    "metrics/rollout_is_*": "verl's own statistics of the weights (README, R04)",
    "metrics/*ppl*": "perplexities of sampler and trainer are not reported",
    "metrics/chi2_*": "the chi-square distance of sampler and trainer is not reported",
}


def group_of(case: Case) -> Tensor:
    """The group of each reward: the case's own index, or equal runs of rows."""
    given = case.tensors()
    if "index" in given:
        return given["index"]
    return torch.arange(len(given["rewards"])) // int(given["num_generations"])


def of_groups(advantage: Callable[..., Tensor], *, scaled: bool = True) -> Callable[[Case], Result]:
    """An advantage; one that is scaled, with the project's own ddof and epsilon."""

    def adapter(case: Case) -> Result:
        names = {"std_ddof": "ddof", "epsilon": "std_eps"}
        options = {names[key]: value for key, value in case.params.items() if key in names}
        if advantage in {group_mean, leave_one_out}:
            options = {}
        return Result(
            {"advantages": advantage(case.tensors()["rewards"], group_of(case), **options)}
        )

    return adapter


def weights_of(case: Case, correction: str, **options: float) -> Tensor:
    """Our weights; those of no correction at all written out."""
    given = case.tensors()
    mask = given["mask"].bool()
    available = {
        "old_logprobs": given["old_logprobs"],
        "sampler_logprobs": given["inference_logprobs"],
        "mask": mask,
    }
    variant = CORRECTIONS[correction]
    weights = variant.fn(**{name: available[name] for name in variant.tensors}, **options)
    return torch.ones_like(mask, dtype=torch.float64) if weights is None else weights


def nothing_outside(weights: Tensor, case: Case) -> Tensor:
    """Outside the mask ours are 1, and these projects' 0."""
    return weights.where(case.tensors()["mask"].bool(), 0)


def open_instruct_off(case: Case) -> Result:
    return Result({"weights": weights_of(case, "none")})


def open_instruct_clamp(case: Case) -> Result:
    weights = weights_of(
        case,
        "tis",
        tis_floor=case.params["rho_clamp_lower_bound"],
        tis_cap=case.params["rho_clamp_upper_bound"] or UNBOUNDED,
    )
    return Result({"weights": nothing_outside(weights, case)})


def open_instruct_icepop(case: Case) -> Result:
    weights = weights_of(
        case,
        "icepop",
        icepop_lower=case.params["rho_mask_lower_bound"],
        icepop_upper=case.params["rho_mask_upper_bound"],
    )
    return Result({"weights": nothing_outside(weights, case)})


def trl_token(correction: str, lower: str, upper: str) -> Callable[[Case], Result]:
    """TRL's ratio of tokens, with its two bounds by our names."""

    def adapter(case: Case) -> Result:
        low, high = case.params["clip_min"], case.params["clip_max"]
        options = {lower: low or 0.0, upper: high or UNBOUNDED}
        weights = weights_of(case, correction, **options)
        on_response = nothing_outside(weights, case)
        return Result(
            {"importance_sampling_ratio": weights, "ratio_on_response_tokens": on_response}
        )

    return adapter


def trl_sequence_truncate(case: Case) -> Result:
    """One number per row: that of its first trained token."""
    low, high = case.params["clip_min"], case.params["clip_max"]
    weights = weights_of(case, "tis_sequence", tis_floor=low or 0.0, tis_cap=high or UNBOUNDED)
    first = case.tensors()["mask"].argmax(-1, keepdim=True)
    return Result({"importance_sampling_ratio": weights.gather(1, first)})


def verl_truncated(correction: str) -> Callable[[Case], Result]:
    """The cap is the threshold."""

    def adapter(case: Case) -> Result:
        weights = weights_of(case, correction, tis_cap=case.params["rollout_is_threshold"])
        return Result({"weights": nothing_outside(weights, case)})

    return adapter


def verl_icepop(case: Case) -> Result:
    lower, upper = map(float, case.params["rollout_is_threshold"].split("_"))
    weights = weights_of(case, "icepop", icepop_lower=lower, icepop_upper=upper)
    return Result({"weights": nothing_outside(weights, case)})


def verl_mismatch(case: Case) -> Result:
    given = case.tensors()
    mask = given["mask"].bool()
    found = mismatch(given["old_logprobs"], given["inference_logprobs"], mask)
    kl, k3_kl = (masked_mean(each.flatten(), mask.flatten()) for each in (found.k1, found.k3))
    return Result({"metrics": {"kl": kl, "k3_kl": k3_kl}})


def open_instruct_pass_at_k(case: Case) -> Result:
    """Its plain pass@1 and pass@n are the unbiased ones too."""
    correct = case.tensors()["correct"]
    prompts, samples = correct.shape
    counts = torch.full((prompts,), samples), correct.sum(-1)
    outputs = {}
    for name in case.raw["outputs"]:
        k = int(name.removeprefix("eval/pass_at_").removesuffix("_unbiased"))
        outputs[name] = pass_at_k(*counts, k).mean()
    return Result(outputs)


def unbiased_pass_at_k(case: Case) -> Result:
    """Prompt by prompt: NaN where ours refuses to answer."""
    given = case.tensors()
    correct = given["num_correct"]
    samples = torch.as_tensor(given["num_samples"]).expand_as(correct)

    def answer(n: Tensor, c: Tensor) -> Tensor:
        try:
            return pass_at_k(n, c, case.params["k"])
        except UserError:
            return torch.full((1,), torch.nan)

    per_prompt = torch.cat(list(map(answer, samples.split(1), correct.split(1))))
    return Result({"per_prompt": per_prompt, "mean": per_prompt.mean()})


def open_instruct_options(case: Case) -> str:
    """What its correction of rho is made of."""
    params = case.params
    if not params["use_rho_correction"]:
        return "off"
    masked = params["rho_mask_lower_bound"] or params["rho_mask_upper_bound"]
    clamped = params["rho_clamp_lower_bound"] or params["rho_clamp_upper_bound"]
    options = {
        "sequence": params["rho_mask_sequence_level"],
        "tv": params["rho_mask_tv_divergence"],
        "mask": masked,
        "clamp": clamped or not masked,
    }
    return " ".join(option for option, on in options.items() if on)


def verl_options(case: Case) -> str:
    """Whether its weights are divided by their mean."""
    return "normalised" if case.params["rollout_is_batch_normalize"] else "plain"


NAMED_BY: dict[str, Callable[[Case], str]] = {
    "open_instruct_rho": open_instruct_options,
    "verl_rollout_is_sequence": verl_options,
    "verl_rollout_is_token": verl_options,
}


def a_group_has_one_member(case: Case) -> bool:
    return bool((group_of(case).unique(return_counts=True)[1] == 1).any())


def a_group_nearly_agrees(case: Case) -> bool:
    """Whether a floor of 0.001 under its standard deviation makes a difference."""
    rewards, group = case.tensors()["rewards"], group_of(case)
    deviations = torch.stack([rewards[group == number].std() for number in group.unique()])
    return bool(((deviations > 0) & (deviations < 1e-3)).any())


def a_log_ratio_passes_10(case: Case) -> bool:
    """Whether our bound of it shows: not where the case's own bounds stop it earlier."""
    given = case.tensors()
    log_ratio = (given["old_logprobs"] - given["inference_logprobs"])[given["mask"].bool()]
    high = case.params.get("clip_max", case.params.get("rollout_is_threshold"))
    above = log_ratio.max() > 10 and not high
    below = log_ratio.min() < -10 and not case.params.get("clip_min")
    return bool(above or below)


def is_alone_at_a_position(case: Case) -> bool:
    """Whether some position is reached by one completion of a group, and that has a reward."""
    given, group = case.tensors(), group_of(case)
    mask = given["response_mask"].bool()
    rewarded = (given["token_level_rewards"].sum(-1) != 0).unsqueeze(-1) & mask
    return any(
        bool(rewarded[group == number][:, mask[group == number].sum(0) == 1].any())
        for number in group.unique()
    )


def fewer_samples_than_k(case: Case) -> bool:
    return bool((torch.as_tensor(case.tensors()["num_samples"]) < case.params["k"]).any())


# Variants that DISAGREEMENTS.md overrules in part: where they must differ from us.
ADVANTAGES_OVERRULED_WHERE = {
    "group_norm_verl": a_group_has_one_member,
    "group_norm_verl_vectorized": a_group_nearly_agrees,
    "leave_one_out_verl_uneven": a_group_has_one_member,
    "optimal_token_baseline": is_alone_at_a_position,
    "tir_optimal_token_baseline": is_alone_at_a_position,
    "trl_token_mask": a_log_ratio_passes_10,
    "trl_token_truncate": a_log_ratio_passes_10,
    "unbiased_pass_at_k": fewer_samples_than_k,
    "verl_rollout_is_token": a_log_ratio_passes_10,
}

ADVANTAGES_ADAPTERS: dict[str, Callable[[Case], Any]] = {
    "batch_norm_trl": of_groups(batch_std),
    "group_centered": of_groups(group_mean, scaled=False),
    "group_norm_dr_grpo_repo": of_groups(group_mean_std),
    "group_norm_open_instruct": of_groups(group_mean_std),
    "group_norm_openrlhf": of_groups(group_mean_std),
    "group_norm_trl": of_groups(group_mean_std),
    "group_norm_verl": of_groups(group_mean_std),
    "group_norm_verl_vectorized": of_groups(group_mean_std),
    "icepop_verl_token": verl_icepop,
    "leave_one_out": of_groups(leave_one_out, scaled=False),
    "leave_one_out_verl_uneven": of_groups(leave_one_out, scaled=False),
    "open_instruct_pass_at_k": open_instruct_pass_at_k,
    "open_instruct_rho[clamp]": open_instruct_clamp,
    "open_instruct_rho[mask]": open_instruct_icepop,
    "open_instruct_rho[off]": open_instruct_off,
    "trl_sequence_truncate": trl_sequence_truncate,
    "trl_token_mask": trl_token("icepop", "icepop_lower", "icepop_upper"),
    "trl_token_truncate": trl_token("tis", "tis_floor", "tis_cap"),
    "unbiased_pass_at_k": unbiased_pass_at_k,
    "verl_offpolicy_metrics": verl_mismatch,
    "verl_rollout_is_sequence[plain]": verl_truncated("tis_sequence"),
    "verl_rollout_is_token[plain]": verl_truncated("tis"),
}
