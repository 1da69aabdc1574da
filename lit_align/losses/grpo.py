"""From a config to a policy loss: a function for each use of what the config chose."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.entropy import EntropyBonus
from lit_align.losses.grpo_config import ExperimentConfig as ExperimentConfig
from lit_align.losses.grpo_config import GRPOConfig as GRPOConfig
from lit_align.losses.kl import kl_estimator
from lit_align.losses.numerics import check_finite, full_precision
from lit_align.losses.policy import SURROGATES, PolicyLoss
from lit_align.ops import check_same_shape


class GRPOTerms(NamedTuple):
    """What a config makes of each token.

    Attributes:
        policy: the surrogate's terms, times the correction's weights.
        kl: estimate of KL(policy || reference), (B, T), nats; zeros without a reference. Neither
            weighted by the correction nor by beta.
    """

    policy: PolicyLoss
    kl: Tensor


def compute_grpo_loss(
    new_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    config: Any,
    tis_weights: Tensor | None = None,
    **others: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The policy loss that `config` names, token by token, and the KL beside it.

        loss per token = pg_loss_max + config.beta * kl

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        ratio: exp(new_logprobs - old_logprobs), (B, T), as `policy_ratio` makes it.
        advantages: per token, (B, T), constant.
        ref_logprobs: under the reference, (B, T), nats; None: there is none.
        config: a `GRPOConfig`, or any object with some of its attributes: `loss_fn`,
            `kl_estimator` and the surrogate's hyperparameters are read, and what it lacks has its
            default.
        tis_weights: correction of the sampler's mismatch, (B, T), >= 0; None: none.
        others: what else the surrogate's signature names, (B, T) each: `old_logprobs`, `mask`,
            `draws`.

    Returns:
        pg_losses: without the clip, (B, T), float32 or better, times tis_weights.
        pg_losses2: with the clip, likewise; of `cispo`, the same tensor.
        pg_loss_max: to be minimised, likewise.
        kl: per token, (B, T), nats, not weighted; zeros without a reference.

    Raises:
        ValueError: if shapes differ, a log-prob is not finite (fill padding with 0), a name is
            unknown, or the surrogate needs what is not given.
    """
    policy, kl = grpo_terms(
        new_logprobs, ratio, advantages, ref_logprobs, config, tis_weights, **others
    )
    return policy.unclipped, policy.clipped, policy.losses, kl


def grpo_terms(
    new_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    config: Any,
    tis_weights: Tensor | None = None,
    kept: Tensor | None = None,
    **others: Tensor,
) -> GRPOTerms:
    """What `compute_grpo_loss` returns, and where the clip acts.

    Args:
        new_logprobs: as there, like all that is not listed.
        ratio: as there.
        advantages: as there.
        ref_logprobs: as there.
        config: as there.
        tis_weights: as there. A surrogate that reads them itself is not multiplied by them.
        kept: tokens that have a policy term, (B, T) bool, as `kept_tokens` finds them; None: all.
        others: as there.

    Raises:
        ValueError: as there.
    """
    available = {"new_logprobs": new_logprobs, "ratio": ratio, "advantages": advantages}
    optional = {"ref_logprobs": ref_logprobs, "tis_weights": tis_weights, "kept": kept}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_same_shape(**available, **given, **others)
    logprobs = {n: t for n, t in {**available, **given}.items() if n.endswith("_logprobs")}
    check_finite(**logprobs)
    estimator = kl_estimator(getattr(config, "kl_estimator", 2))
    surrogate = SURROGATES[getattr(config, "loss_fn", "dapo")]
    policy: PolicyLoss = surrogate({**available, **given, **others}, config)
    if "tis_weights" not in surrogate.optional_tensors:
        policy = policy.weighted(tis_weights)
    kl = torch.zeros_like(full_precision(new_logprobs))
    if ref_logprobs is not None:
        kl = estimator({**available, **given}, config)
    return GRPOTerms(policy.weighted(kept), kl)


def policy_ratio(
    config: GRPOConfig, new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """The ratio of new to old probabilities at the config's level, (B, T); see `RATIOS`."""
    available = {"new_logprobs": new_logprobs, "old_logprobs": old_logprobs, "mask": mask}
    ratio: Tensor = config.variants["ratio_level"](available, config)
    return ratio


def aggregate(
    config: GRPOConfig, losses: Tensor, mask: Tensor, counts: Mapping[str, Tensor]
) -> Tensor:
    """This micro-batch's share of the window's loss, (); see `AGGREGATIONS`.

    Args:
        config: says how.
        losses: per token, (B, T).
        mask: trained tokens, (B, T) bool.
        counts: of the window, those that the aggregation reads; see `window_counts`.
    """
    available = {**counts, "losses": losses, "mask": mask}
    share: Tensor = config.variants["aggregation"](available, config)
    return share


def advantages(config: GRPOConfig, rewards: Tensor, groups: Tensor, **others: Tensor) -> Tensor:
    """The advantage of each completion, (N,), or of its tokens, (N, T); see `ADVANTAGES`.

    Args:
        config: says which.
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        others: what else the advantage's signature names: `lengths`, `rewards_by_name` with
            `reward_weights`, `greedy_rewards`, `old_logprobs` with `alignment` and `mask`.

    Raises:
        ValueError: if the advantage needs what is not given.
    """
    available = {"rewards": rewards, "groups": groups, **others}
    found: Tensor = config.variants["advantage"](available, config)
    return found


def kept_tokens(config: GRPOConfig, **available: Tensor | None) -> Tensor | None:
    """Which tokens have a policy term, (B, T) bool, or None for all of them; see `FILTERS`.

    Args:
        config: says how.
        available: what there is of what a filter may read, by name, (B, T) each; None: not there.

    Raises:
        ValueError: if the filter needs what is not there.
    """
    given = {name: tensor for name, tensor in available.items() if tensor is not None}
    kept: Tensor | None = config.variants["token_filter"](given, config)
    return kept


def token_losses(
    config: GRPOConfig,
    terms: GRPOTerms,
    entropy: Tensor | None = None,
    entropy_bonus: float | None = None,
) -> Tensor:
    """What an aggregation sums up: the policy's loss, the KL and the entropy bonus, (B, T).

        loss = policy + beta * kl - entropy_bonus * entropy

    The bonus is of every trained token: neither a correction's weights nor a token filter, which
    look at the policy's part alone, change it. Tokens that are masked have neither part.

    Args:
        config: has the two weights; a KL in the reward is not in the loss.
        terms: of each token.
        entropy: of the policy's distribution at each token, (B, T), nats, with its gradient; None:
            not there.
        entropy_bonus: the weight to which a control has moved it, >= 0; None: the config's.

    Raises:
        ValueError: if there is an entropy bonus and no entropy.
    """
    losses = terms.policy.losses
    if config.kl_in == "loss":
        losses = losses + config.beta * terms.kl
    weight = config.entropy_bonus if entropy_bonus is None else entropy_bonus
    if not weight:
        return losses
    if entropy is None:
        raise UserError(f"an entropy_bonus of {weight:g} needs entropies")
    return losses - weight * full_precision(entropy)


def next_entropy_bonus(config: GRPOConfig, coefficient: float, entropy: float) -> EntropyBonus:
    """Where the entropy's control goes from here; see `ENTROPY_CONTROLS`.

    Args:
        config: says which.
        coefficient: as the control has left it, the advantages' unit per nat.
        entropy: mean over the trained tokens of the step that was made, nats per token.
    """
    available = {"coefficient": coefficient, "entropy": entropy}
    found: EntropyBonus = config.variants["entropy_control"](available, config)
    return found


def correction_weights(
    config: GRPOConfig, old_logprobs: Tensor, sampler_logprobs: Tensor | None, mask: Tensor
) -> Tensor | None:
    """Weights of the sampler's mismatch, (B, T), or None for no correction; see `CORRECTIONS`."""
    available = {"old_logprobs": old_logprobs, "mask": mask}
    if sampler_logprobs is not None:
        available["sampler_logprobs"] = sampler_logprobs
    weights: Tensor | None = config.variants["correction"](available, config)
    return weights
