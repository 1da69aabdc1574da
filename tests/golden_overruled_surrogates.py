"""Where golden cases of surrogates, filters, advantages and rejection must differ from us."""

from collections.abc import Callable

import torch
from golden_adapters_advantages import group_of
from golden_adapters_weights import kept
from golden_cases import Case


def is_extreme(case: Case) -> bool:
    return "/extreme/" in case.id


def rounding_decides(case: Case) -> bool:
    """Whether an entropy is the quantile itself, and below it in another precision."""
    given, mask = case.tensors(), case.tensors()["mask"].bool()
    entropy = given["entropies"].detach()[mask]
    place = 1 - case.params["top_entropy_quantile"]
    exact, rounded = entropy.quantile(place), entropy.float().quantile(place).double()
    return bool(((entropy >= exact) != (entropy >= rounded)).any())


def is_discounted(case: Case) -> bool:
    return case.params["gamma"] != 1


def counts_rewards(case: Case) -> bool:
    """Whether as many rewards are 0 as are in groups that agree."""
    rewards, groups = case.tensors()["rewards"], group_of(case)
    teaching = sum(
        int((groups == group).sum())
        for group in groups.unique()
        if len(rewards[groups == group].unique()) > 1
    )
    return bool(teaching) and teaching != int(rewards.count_nonzero())


def rewards_differ(case: Case) -> bool:
    return len(case.tensors()["rewards_per_func"].unique(dim=0)) > 1


def inverse_bounds_differ(case: Case) -> bool:
    """Whether bounds on 1 / rho keep something else than those on rho."""
    name, threshold = case.params["rollout_rs"], case.params["rollout_rs_threshold"]
    if "," in name or not name.endswith("_k1"):
        return False
    lower, upper = map(float, threshold.split("_"))
    over = name.removesuffix("_k1").replace("seq_", "sequence_")
    right, inverse = (
        kept(case, "ratio_bounds", bound_over=over, ratio_lower=low, ratio_upper=high)
        for low, high in ((lower, upper), (1 / upper, 1 / lower))
    )
    return not torch.equal(right, inverse)


def has_a_row_without_tokens(case: Case) -> bool:
    return not case.tensors()["mask"].bool().any(-1).all()


# Variants that DISAGREEMENTS.md overrules in part: where they must differ from us.
SURROGATES_OVERRULED_WHERE: dict[str, Callable[[Case], bool]] = {
    "gdpo_verl": rewards_differ,
    "gmpo": lambda case: is_extreme(case) or has_a_row_without_tokens(case),
    "gpg_advantage": counts_rewards,
    "kl_cov": is_extreme,
    "reinforce_plus_plus_openrlhf": is_discounted,
    "reinforce_plus_plus_verl": is_discounted,
    "trl_high_entropy_mask": rounding_decides,
    "verl_rejection_mask": inverse_bounds_differ,
}
