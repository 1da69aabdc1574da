"""Where the gradient of a policy loss comes from, counted token by token.

Every token of a completion is one of five: masked (its completion was cut for its length), without
advantage, dropped by the sampler correction, clipped, or active. The shares add up to 1, so what is
missing from `tokens/active` can be looked up.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_align.logprobs import ResponseLogprobs
from lit_align.losses import GRPOTerms, mismatch
from lit_align.ops import masked_sum

PARTS = ("masked", "no_advantage", "dropped", "clipped", "active")
PER_TOKEN = (
    "entropy",
    "kl",
    "ratio",
    "policy_loss",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
)
SAMPLER = ("sampling_logp_difference/mean", "importance_sampling_ratio/mean", "kl", "k3")
TOKEN_SUMS = (
    "tokens",
    "sampled_tokens",
    *PER_TOKEN,
    *(f"tokens/{part}" for part in PARTS),
    *(f"sampling/{name}" for name in SAMPLER),
)


def token_sums(
    batch: Mapping[str, Tensor],
    scored: ResponseLogprobs,
    terms: GRPOTerms,
    ratio: Tensor,
    weights: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over the trained tokens of a micro-batch, and how many tokens are which of five.

    Args:
        batch: `advantages` (B,) or `token_advantages` (B, T-1); maybe `masked_tokens` (B,),
            `sampler_logprobs` and `old_logprobs` (B, T-1), nats.
        scored: log-probs and entropy of the policy, and which tokens are trained.
        terms: of the loss.
        ratio: of new to old probabilities, (B, T-1).
        weights: of the sampler correction, (B, T-1), or None.

    Returns:
        Detached, () each; what the batch has no data for is left out.
    """
    mask = scored.mask
    policy = terms.policy
    clipped = policy.clipped_low | policy.clipped_high
    values = (
        scored.entropy,
        terms.kl,
        ratio,
        policy.losses,
        policy.clipped_low,
        policy.clipped_high,
        clipped,
    )
    sums = {
        name: masked_sum(value.detach().to(ratio.dtype), mask).sum()
        for name, value in zip(PER_TOKEN, values, strict=True)
        if value is not None
    }
    sums |= {"tokens": mask.sum()} | _parts(batch, mask, clipped, weights)
    if "sampler_logprobs" in batch:
        old = batch.get("old_logprobs", scored.logprobs)
        sums |= _against_the_sampler(old.detach(), batch["sampler_logprobs"], mask)
    return sums


def token_advantages(batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """Of each token its own advantage, or that of its completion, (B, T-1)."""
    if "token_advantages" in batch:
        return batch["token_advantages"]
    return batch["advantages"].unsqueeze(-1).expand_as(mask)


def _parts(
    batch: Mapping[str, Tensor], mask: Tensor, clipped: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Tokens of each kind; one that is of several counts as the first."""
    masked = batch.get("masked_tokens", torch.zeros_like(mask))
    counts = {"tokens/masked": masked.sum()}
    left = mask
    for name, belongs in (
        ("no_advantage", token_advantages(batch, mask) == 0),
        ("dropped", torch.zeros_like(mask) if weights is None else weights == 0),
        ("clipped", clipped),
    ):
        counts[f"tokens/{name}"] = (left & belongs).sum()
        left = left & ~belongs
    return counts | {"tokens/active": left.sum()}


def _against_the_sampler(old: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's."""
    found = mismatch(old, sampler.to(old.dtype), mask)
    values = (found.difference.abs(), found.ratio, found.k1, found.k3)
    sums = {
        f"sampling/{name}": masked_sum(value, mask).sum()
        for name, value in zip(SAMPLER, values, strict=True)
    }
    return sums | {"sampled_tokens": mask.sum()}


def token_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Means per token from the sums of many micro-batches and all ranks."""
    means = {name: sums[name] / sums["tokens"].clamp(min=1) for name in PER_TOKEN}
    parts = {name: sums[name] for name in (f"tokens/{part}" for part in PARTS)}
    everything = torch.stack([*parts.values()]).sum().clamp(min=1)
    means |= {name: count / everything for name, count in parts.items()}
    if sums["sampled_tokens"] > 0:
        means |= {
            f"sampling/{name}": sums[f"sampling/{name}"] / sums["sampled_tokens"]
            for name in SAMPLER
        }
    return means
