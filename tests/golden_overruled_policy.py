"""Where golden cases of policy losses must differ from us: bounds, and what counts as clipped."""

from collections.abc import Callable

from golden_cases import Case
from torch import Tensor

from lit_align.losses.kl import MAX_LOG_RATIO as KL_BOUND
from lit_align.losses.ratio import MAX_LOG_RATIO as RATIO_BOUND


def trained(case: Case, name: str) -> Tensor:
    """How far the log-probs are from the others of that name, at trained tokens."""
    given = {key: tensor.detach() for key, tensor in case.tensors().items()}
    return (given["new_logprobs"] - given[name])[given["mask"].bool()]


def charged(case: Case) -> Tensor:
    """The log-ratios of trained tokens whose advantage is negative: there no clip bounds them."""
    bad = case.tensors()["advantages"].detach()[:, None] < 0
    mask = case.tensors()["mask"].bool()
    return trained(case, "old_logprobs")[bad.expand(mask.shape)[mask]]


def passes_our_bound(case: Case) -> bool:
    """Whether a ratio that counts is too large for us, or a log-ratio to the reference."""
    given, is_trl = case.params, case.variant != "open_instruct_dapo"
    capped = given.get("delta") or given.get("loss_type") == "cispo" or case.variant == "gspo"
    ratio = not capped and bool((charged(case) > RATIO_BOUND).any())
    far = bool(given["beta"]) and bool((trained(case, "ref_logprobs").abs() > KL_BOUND).any())
    return ratio or (is_trl and far)


def is_cut_at_delta(case: Case) -> bool:
    """Whether the second of two clips acts."""
    delta = case.params["delta"]
    return bool(delta) and bool((charged(case).exp() > delta).any())


def either(case: Case) -> bool:
    return passes_our_bound(case) or is_cut_at_delta(case)


def has_padding_that_counts(case: Case) -> bool:
    """Whether a row with an advantage is shorter than the batch is wide."""
    given = case.raw["inputs"]
    rows = zip(given["mask"], given["advantages"], strict=True)
    return any(advantage and not all(row) for row, advantage in rows)


# Variants that DISAGREEMENTS.md overrules in part: where they must differ from us.
POLICY_OVERRULED_WHERE: dict[str, Callable[[Case], bool]] = {
    **dict.fromkeys(("open_instruct_dapo", "gspo", "trl_cispo"), passes_our_bound),
    **dict.fromkeys(("trl_bnpo", "trl_dr_grpo", "trl_luspo"), passes_our_bound),
    **dict.fromkeys(("trl_dapo", "trl_grpo"), either),
    "luspo_token__liger": has_padding_that_counts,
}
