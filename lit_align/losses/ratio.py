"""Ratio levels: how much likelier the policy makes a token, or a completion, than it was.

Every function takes log-probs of one shape, (B, T), and a mask of trained tokens, and returns
(B, T), float32 or better; old log-probs are constants. What stands outside the mask does not
matter, and the ratio there is that of a row that did not move (`token`) or that of the row.

Logarithms are bounded by 20 before they are exponentiated. exp(20) is half a thousand million: no
surrogate tells larger ratios apart, and without the bound one token that drifted makes an infinity,
and its gradient a NaN. Beyond the bound the gradient is 0. Below there is no bound, since the limit
of exp is a number. How far the log-probs drifted is seen in their difference, not here.
"""

import torch
from torch import Tensor

from lit_align.losses.numerics import check_finite, full_precision
from lit_align.losses.variants import Variants
from lit_align.ops import check_same_shape, masked_mean

RATIOS = Variants(noun="ratio_level")

MAX_LOG_RATIO = 20.0


@RATIOS.register("token")
def token_ratio(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Each token's own ratio.

        ratio = exp(new_logprobs - old_logprobs)

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.

    Returns:
        (B, T); 1 outside the mask.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 6; Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    return bounded_exp(log_ratios(new_logprobs, old_logprobs, mask))


@RATIOS.register("sequence")
def sequence_ratio(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """One ratio a completion: the geometric mean of its tokens'.

        ratio = exp(mean over the row's mask of (new_logprobs - old_logprobs))

    The mean and not the sum: as a product, the ratio of a long completion would leave every
    clipping range.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.

    Returns:
        (B, T), one value per row; 1 in a row without tokens.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Elsewhere:
        verl's `gspo` is `sequence_token`, the logarithm bounded by 10. TRL weighs completions by
        length unless its `loss_type` is grpo.

    Source:
        Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7.
    """
    log_ratio = masked_mean(log_ratios(new_logprobs, old_logprobs, mask), mask)
    return bounded_exp(log_ratio).unsqueeze(-1).expand(mask.shape)


@RATIOS.register("sequence_product")
def sequence_product_ratio(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """One ratio a completion: that of its probabilities, which is the product of its tokens'.

        ratio = exp(sum over the row's mask of (new_logprobs - old_logprobs))

    The completion as one action. It leaves any clipping range the sooner, the longer it is; and one
    loss per completion in `sequence_mean` has the size that `sequence_sum` gives a sum of tokens.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.

    Returns:
        (B, T), one value per row; 1 in a row without tokens.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 3, as TRL's RLOO trainer clips it.
    """
    log_ratio = log_ratios(new_logprobs, old_logprobs, mask).sum(-1)
    return bounded_exp(log_ratio).unsqueeze(-1).expand(mask.shape)


@RATIOS.register("sequence_token")
def sequence_token_ratio(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The completion's ratio in value, each token's own log-prob in gradient.

        ratio = sg(sequence ratio) * new_probs / sg(new_probs)

    Where a completion's advantage is one number for all its tokens, value and gradient of the loss
    are those of `sequence`; unlike there, tokens may have advantages of their own.

    Args:
        new_logprobs: under the policy in training, (B, T), nats.
        old_logprobs: under the policy as it was when the completions were sampled, (B, T), nats.
        mask: trained tokens, (B, T) bool.

    Returns:
        (B, T), one value per row; 1 in a row without tokens.

    Raises:
        ValueError: if the shapes differ, or a log-prob on the mask is not finite.

    Source:
        Zheng et al. 2025 (GSPO), arXiv:2507.18071, section 4.3, eq. 14.
    """
    log_ratio = masked_mean(log_ratios(new_logprobs, old_logprobs, mask), mask).detach()
    zero = log_ratios(new_logprobs, new_logprobs, mask)
    return bounded_exp(log_ratio.unsqueeze(-1) + zero)


def log_ratios(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """New - old, the latter a constant; 0 outside the mask."""
    check_same_shape(new_logprobs=new_logprobs, old_logprobs=old_logprobs, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask must be bool, not {mask.dtype}")
    check_finite(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs)
    difference = full_precision(new_logprobs) - full_precision(old_logprobs.detach())
    # Masked by choice, not by product: infinity times 0 is NaN.
    return difference.where(mask, 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The ratio of which this is the logarithm."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
