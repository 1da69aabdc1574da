"""How our code answers the golden cases of advantages over a batch, and of combined corrections.

What a project does in one function is here a correction's weights times what a filter keeps.
"""

from collections.abc import Callable
from math import isnan
from typing import Any

import torch
from golden_adapters_advantages import UNBOUNDED, group_of, nothing_outside, of_groups, weights_of
from golden_cases import Case, Result
from small_samples import sample
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses import (
    FILTERS,
    GRPOConfig,
    best_of_group,
    best_of_group_std,
    gdpo,
    gpg,
    group_mean_std,
    leave_one_out,
    leave_one_out_normalised,
    length_weighted,
    optimal_token_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from lit_align.losses.advantages import batch_std
from lit_align.losses.reward_table import RewardTable, deviation
from lit_align.modules.advantages import shaped_rewards
from lit_align.rewards import RewardSuite, in_process

Adapter = Callable[[Case], Result]

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
WEIGHTS_LEFT_OUT = {
    "returns": "there are no returns per token: a completion has one reward and one advantage",
    "masked_fraction": "verl's own statistic of what it rejects",
    "seq_masked_fraction": "the same of rows",
}


# Advantages


def over_tokens(values: Tensor, case: Case) -> Tensor:
    """The advantage of a completion at each of its tokens, and 0 elsewhere."""
    given = case.tensors()
    mask = given.get("response_mask", given.get("action_mask"))
    return values.unsqueeze(-1) * mask


def rewards_of(case: Case) -> Tensor:
    """One reward per completion; verl has it at a token."""
    given = case.tensors()
    return given["rewards"] if "rewards" in given else given["token_level_rewards"].sum(-1)


def lengths_of(case: Case) -> Tensor:
    given = case.tensors()
    return given.get("response_mask", given.get("action_mask")).sum(-1)


def whitened(ddof: int) -> Adapter:
    def adapter(case: Case) -> Result:
        found = reinforce_pp(rewards_of(case), lengths_of(case), ddof=ddof)
        return Result({"advantages": over_tokens(found, case)})

    return adapter


def whitened_baseline(ddof: int) -> Adapter:
    def adapter(case: Case) -> Result:
        groups = group_of(case)
        found = reinforce_pp_baseline(rewards_of(case), groups, lengths_of(case), ddof=ddof)
        return Result({"advantages": over_tokens(found, case)})

    return adapter


def of_remax(case: Case) -> Result:
    found = remax(rewards_of(case), case.tensors()["reward_baselines"])
    return Result({"advantages": over_tokens(found, case)})


def of_positions(case: Case) -> Result:
    given = case.tensors()
    found = optimal_token_baseline(
        rewards_of(case),
        group_of(case),
        given["old_log_probs"],
        given["sum_pi_squared"].log(),
        given["response_mask"].bool(),
    )
    return Result({"advantages": found})


def kl_in_the_reward(case: Case) -> Result:
    given, beta = case.tensors(), case.params["kl_coeff"]
    loss = GRPOConfig(advantage="group_mean", kl_in="reward", kl_estimator="k1", beta=beta)
    columns = (given[name].tolist() for name in ("scores", "logprobs", "ref_logprobs"))
    samples = [
        sample(0, number, reward=reward, old_logprobs=old, ref_logprobs=ref)
        for number, (reward, old, ref) in enumerate(zip(*columns, strict=True))
    ]
    return Result({"rewards": shaped_rewards(loss, samples)})


def of_lengths(case: Case) -> Result:
    given = case.tensors()
    return Result(
        {"advantages": length_weighted(given["rewards"], group_of(case), given["lengths"])}
    )


def of_gpg(case: Case) -> Result:
    return Result({"advantages": gpg(case.tensors()["rewards"], group_of(case))})


def of_the_best(case: Case) -> Result:
    given, groups = case.tensors()["rewards"], group_of(case)
    if not case.params["norm_adv_by_std_in_grpo"]:
        return Result({"advantages": best_of_group(given, groups)})
    found = best_of_group_std(given, groups, std_eps=case.params["epsilon"])
    return Result({"advantages": found})


def named_group_of(case: Case) -> Tensor:
    given = case.tensors()
    return torch.arange(len(given["rewards_per_func"])) // int(given["num_generations"])


def of_gdpo(case: Case) -> Result:
    rewards = case.tensors()["rewards_per_func"]
    weights = torch.tensor(case.params["reward_weights"])
    found = gdpo(rewards, weights, named_group_of(case))
    if "response_mask" in case.tensors():
        return Result({"advantages": over_tokens(found, case)})
    return Result({"advantages": found})


def summed(case: Case) -> Tensor:
    """The weighted sum, as a suite makes it; NaN where no reward applies."""
    columns = case.tensors()["rewards_per_func"].unbind(1)

    def reward(column: Tensor) -> Callable[..., Any]:
        return in_process(lambda **_: [None if isnan(r) else r for r in column.tolist()])

    names = [f"reward_{n}" for n in range(len(columns))]
    weights = dict(zip(names, case.params["reward_weights"], strict=True))
    functions = {name: reward(column) for name, column in zip(names, columns, strict=True)}
    suite = RewardSuite(functions, weights)
    texts = [""] * len(columns[0])
    total = suite.score(texts, texts, [[0]] * len(texts), {}).total
    return torch.tensor([float("nan") if t is None else t for t in total], dtype=torch.float64)


def of_sums(advantage: Callable[..., Tensor]) -> Adapter:
    def adapter(case: Case) -> Result:
        return Result({"advantages": advantage(summed(case), named_group_of(case))})

    return adapter


def trl_nan_rewards(case: Case) -> Result:
    if case.params["multi_objective_aggregation"] == "normalize_then_sum":
        return of_gdpo(case)
    return of_sums(group_mean_std)(case)


def mean_and_deviation(case: Case) -> Result:
    given = case.tensors()
    table = RewardTable.of(given["scores"], given["group_index"])
    spread = deviation(table.rewards, case.params["std_ddof"])
    means = table.rewards.nanmean(-1)
    return Result({"mean": means, "std": spread[:, 0], "count": table.scored[:, 0]})


def nanstd(case: Case) -> Result:
    table = RewardTable.of_one(case.tensors()["x"])
    return Result({"std": deviation(table.rewards, case.params["std_ddof"])[0, 0]})


# Corrections


def with_logprobs(case: Case) -> Case:
    """A public test gives rho itself, of a sampler to whom everything is certain."""
    given = case.raw["inputs"]
    if "rho" not in given:
        return case
    old = torch.tensor(given["rho"], dtype=torch.float64).log().tolist()
    return Case({**case.raw, "inputs": {**given, "old_logprobs": old}}, case.file)


def kept(case: Case, token_filter: str, **options: Any) -> Tensor:
    """What a filter keeps."""
    given = case.tensors()
    available = {
        "old_logprobs": given["old_logprobs"],
        "sampler_logprobs": given["inference_logprobs"],
        "mask": given["mask"].bool(),
        "advantages": given.get("advantages"),
    }
    variant = FILTERS[token_filter]
    return variant.fn(**{name: available[name] for name in variant.tensors}, **options)


def trl_sequence_mask(case: Case) -> Result:
    """One number per row, that of its first trained token; NaN where ours refuses to answer."""
    low, high = case.params["clip_min"], case.params["clip_max"]
    try:
        weights = weights_of(
            case, "sequence_mask", sequence_lower=low or 0.0, sequence_upper=high or UNBOUNDED
        )
    except UserError:
        weights = torch.full_like(case.tensors()["old_logprobs"], torch.nan)
    first = case.tensors()["mask"].argmax(-1, keepdim=True)
    return Result({"importance_sampling_ratio": weights.gather(1, first)})


def verl_icepop_sequence(case: Case) -> Result:
    lower, upper = map(float, case.params["rollout_is_threshold"].split("_"))
    weights = weights_of(case, "sequence_mask", sequence_lower=lower, sequence_upper=upper)
    return Result({"weights": nothing_outside(weights, case)})


def verl_normalised(correction: str) -> Adapter:
    def adapter(case: Case) -> Result:
        weights = weights_of(case, correction, tis_cap=case.params["rollout_is_threshold"])
        return Result({"weights": nothing_outside(weights, case)})

    return adapter


def open_instruct(correction: str, token_filter: str = "none", **bounds: str) -> Adapter:
    """Weights that are clamped or not, times a filter whose bounds are its rho_mask_*."""

    def adapter(case: Case) -> Result:
        case, given = with_logprobs(case), case.params
        weights = weights_of(
            case,
            correction,
            tis_floor=given["rho_clamp_lower_bound"],
            tis_cap=given["rho_clamp_upper_bound"] or UNBOUNDED,
        )
        if token_filter != "none":
            options = {name: given.get(key, key) for name, key in bounds.items()}
            weights = weights * kept(case, token_filter, **options)
        return Result({"weights": nothing_outside(weights, case)})

    return adapter


LOWER, UPPER = "rho_mask_lower_bound", "rho_mask_upper_bound"
LEVELS = {"token": "token", "seq": "sequence"}


def rejected(case: Case, name: str, threshold: str) -> Tensor:
    """What one of verl's criteria keeps: token_k1, seq_mean_k3, ..."""
    *level, kind = name.split("_")
    over = "_".join([LEVELS[level[0]], *level[1:]])
    if kind == "k1":
        lower, upper = map(float, threshold.split("_"))
        bounds = {"ratio_lower": lower, "ratio_upper": upper}
        return kept(case, "ratio_bounds", bound_over=over, **bounds)
    return kept(case, f"{kind}_bound", bound_over=over, divergence_bound=float(threshold))


def verl_rejection(case: Case) -> Result:
    """Several criteria are met one by one."""
    names = case.params["rollout_rs"].split(",")
    thresholds = str(case.params["rollout_rs_threshold"]).split(",")
    met = [rejected(case, n, t) for n, t in zip(names, thresholds, strict=True)]
    mask = torch.stack([*met, case.tensors()["mask"].bool()]).all(0)
    return Result({"response_mask": mask.double()})


WEIGHTS_ADAPTERS: dict[str, Adapter] = {
    "gdpo": of_gdpo,
    "gdpo_verl": of_gdpo,
    "gpg_advantage": of_gpg,
    "group_mean_std": mean_and_deviation,
    "grpo_passk": of_the_best,
    "icepop_verl_sequence": verl_icepop_sequence,
    "kl_shaped_rewards": kl_in_the_reward,
    "leave_one_out_normalized": of_groups(leave_one_out_normalised),
    "multi_reward_rloo": of_sums(leave_one_out),
    "multi_reward_sum_then_normalize": of_sums(group_mean_std),
    "multi_reward_sum_then_normalize_batch": of_sums(batch_std),
    "nanstd": nanstd,
    "open_instruct_rho[mask clamp]": open_instruct(
        "tis", "ratio_bounds", ratio_lower=LOWER, ratio_upper=UPPER
    ),
    "open_instruct_rho[sequence clamp]": open_instruct("tis_geometric"),
    "open_instruct_rho[sequence mask]": open_instruct(
        "tis_geometric",
        "ratio_bounds",
        bound_over="sequence_mean",
        ratio_lower=LOWER,
        ratio_upper=UPPER,
    ),
    "open_instruct_rho[tv mask clamp]": open_instruct(
        "tis", "total_variation", tv_lower=LOWER, tv_upper=UPPER
    ),
    "open_instruct_rho[tv mask]": open_instruct(
        "tis", "total_variation", tv_lower=LOWER, tv_upper=UPPER
    ),
    "opo_advantage": of_lengths,
    "reinforce_plus_plus_baseline_openrlhf": whitened_baseline(0),
    "reinforce_plus_plus_baseline_verl": whitened_baseline(1),
    "reinforce_plus_plus_openrlhf": whitened(0),
    "reinforce_plus_plus_verl": whitened(1),
    "optimal_token_baseline": of_positions,
    "remax": of_remax,
    "tir_optimal_token_baseline": of_positions,
    "trl_nan_rewards": trl_nan_rewards,
    "trl_sequence_mask": trl_sequence_mask,
    "verl_rejection_mask": verl_rejection,
    "verl_rollout_is_sequence[normalised]": verl_normalised("tis_sequence_normalised"),
    "verl_rollout_is_token[normalised]": verl_normalised("tis_normalised"),
}
