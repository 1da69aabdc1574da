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
    named = {name: v for name, v in zip(PER_TOKEN, values, strict=True) if v is not None}
    sums = _sums_of(named, mask) | {"tokens": mask.sum()} | _parts(batch, mask, clipped, weights)
    if "sampler_logprobs" in batch:
        old = batch.get("old_logprobs", scored.logprobs)
        sums |= _against_the_sampler(old.detach(), batch["sampler_logprobs"], mask)
    return sums


def _sums_of(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a mask, all at once."""
    stacked = torch.stack([value.detach() for value in values.values()])
    sums = masked_sum(stacked.flatten(1), mask.flatten().expand(len(values), -1))
    return dict(zip(values, sums.unbind(), strict=True))


def token_advantages(batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """Of each token its own advantage, or that of its completion, (B, T-1)."""
    if "token_advantages" in batch:
        return batch["token_advantages"]
    return batch["advantages"].unsqueeze(-1).expand_as(mask)


def _parts(
    batch: Mapping[str, Tensor], mask: Tensor, clipped: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Tokens of each kind; one that is of several counts as the first."""
    masked = batch.get("masked_tokens")
    kinds: dict[str, Tensor] = {}
    left = mask
    for name, belongs in (
        ("no_advantage", token_advantages(batch, mask) == 0),
        ("dropped", None if weights is None else weights == 0),
        ("clipped", clipped),
    ):
        kinds[name] = torch.zeros_like(mask) if belongs is None else left & belongs
        left = left if belongs is None else left & ~belongs
    kinds["active"] = left
    counts = torch.stack([*kinds.values()]).flatten(1).sum(-1)
    return {
        "tokens/masked": counts.new_zeros(()) if masked is None else masked.sum(),
        **{f"tokens/{name}": count for name, count in zip(kinds, counts.unbind(), strict=True)},
    }


def _against_the_sampler(old: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's."""
    found = mismatch(old, sampler.to(old.dtype), mask)
    values = (found.difference.abs(), found.ratio, found.k1, found.k3)
    names = [f"sampling/{name}" for name in SAMPLER]
    sums = _sums_of(dict(zip(names, values, strict=True)), mask)
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
