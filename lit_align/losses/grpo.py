"""From a config to a policy loss: a function for each use of what the config chose."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

    Returns:
        pg_losses: without the clip, (B, T), float32 or better, times tis_weights.
        pg_losses2: with the clip, likewise; of `cispo`, the same tensor.
        pg_loss_max: to be minimised, likewise.
        kl: per token, (B, T), nats, not weighted; zeros without a reference.

    Raises:
        ValueError: if shapes differ, a log-prob is not finite (fill padding with 0), or a name is
            unknown.
    """
    policy, kl = grpo_terms(new_logprobs, ratio, advantages, ref_logprobs, config, tis_weights)
    return policy.unclipped, policy.clipped, policy.losses, kl


def grpo_terms(
    new_logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    config: Any,
    tis_weights: Tensor | None = None,
) -> GRPOTerms:
    """What `compute_grpo_loss` returns, and where the clip acts.

    Raises:
        ValueError: as there.
    """
    available = {"new_logprobs": new_logprobs, "ratio": ratio, "advantages": advantages}
    optional = {"ref_logprobs": ref_logprobs, "tis_weights": tis_weights}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_same_shape(**available, **given)
    logprobs = {n: t for n, t in {**available, **given}.items() if n.endswith("_logprobs")}
    check_finite(**logprobs)
    estimator = kl_estimator(getattr(config, "kl_estimator", 2))
    surrogate = SURROGATES[getattr(config, "loss_fn", "dapo")]
    policy: PolicyLoss = surrogate(available, config)
    kl = torch.zeros_like(full_precision(new_logprobs))
    if ref_logprobs is not None:
        kl = estimator({**available, **given}, config)
    return GRPOTerms(policy.weighted(tis_weights), kl)


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


def advantages(config: GRPOConfig, rewards: Tensor, groups: Tensor) -> Tensor:
    """The advantage of each completion, (N,), from rewards and groups, (N,); see `ADVANTAGES`."""
    available = {"rewards": rewards, "groups": groups}
    found: Tensor = config.variants["advantage"](available, config)
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
