"""Estimates of KL(policy || reference) from the sampled tokens alone.

With d = new_logprobs - ref_logprobs, bounded to +-40 so that nothing overflows (beyond the bound
the gradient is 0), and the ratio of new to old probabilities, per token:

| number | name     | formula         | sign | expected value  | expected gradient, on policy |
|--------|----------|-----------------|------|-----------------|------------------------------|
| 0      | k1       | d               | any  | KL(policy, ref) | 0                            |
| 1      | k2       | d^2 / 2         | >= 0 | near it, biased | that of KL(policy, ref)      |
| 2      | k3       | exp(-d) - 1 + d | >= 0 | KL(policy, ref) | that of KL(ref, policy)      |
| 3      | ratio_k1 | ratio * d       | any  | KL(policy, ref) | that of KL(policy, ref)      |
| 4      | ratio_k3 | ratio * k3      | >= 0 | KL(policy, ref) | that of KL(policy, ref)      |
|        | k1_plus  | d, gradient k2's| any  | KL(policy, ref) | that of KL(policy, ref)      |
|        | k3_plus  | k3, the same    | >= 0 | KL(policy, ref) | that of KL(policy, ref)      |
|        | absolute | absolute of d   | >= 0 | none of use     | none of use                  |

The gradients differ because the tokens were drawn from the policy, and an estimate that does not
say so, by the ratio, leaves out how the draw itself would change. In the loss, k1 therefore does
nothing on average but add noise, and k3 pulls the other way round: it punishes what the reference
says and the policy does not. In the reward, where the estimate's own gradient is not used, k1 is
right. Only the two with a ratio stay what they are when the tokens are an older policy's.

k1_plus and k3_plus (verl's k1+ and k3+) show one estimate and are differentiated as another.

The numbers 0 to 3 are open-instruct's. Every function takes (B, T) and returns (B, T), nats,
float32 or better.

Elsewhere:
    In the loss the projects take k3 unless told otherwise; TRL times the ratio since 1.16. open-
    instruct bounds d by 40, as here; verl by 20 and the estimate by 10, OpenRLHF the estimate by
    10, TRL, Liger and torchtune nothing.

Source:
    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; k3 in the
    loss: Shao et al. 2024, arXiv:2402.03300, eq. 4; ratio_k3: DeepSeek-V3.2 2025,
    arXiv:2512.02556, section 3.1.
"""

import torch
from torch import Tensor

from lit_align.losses.numerics import full_precision
from lit_align.losses.variants import Variant, Variants
from lit_align.ops import check_same_shape

KL_ESTIMATORS = Variants(
    aliases={"0": "k1", "1": "k2", "2": "k3", "3": "ratio_k1", "4": "ratio_k3"}
    | {"k1+": "k1_plus", "k3+": "k3_plus", "abs": "absolute"},
    noun="kl_estimator",
)

MAX_LOG_RATIO = 40.0


def kl_estimator(estimator: int | str) -> Variant:
    """The estimator of that number or name.

    Raises:
        UserError: if there is none; the message has all numbers and names.
    """
    return KL_ESTIMATORS[str(estimator)]


@KL_ESTIMATORS.register("k1")
def k1(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased; of high variance, and negative for about half of the tokens."""
    return _log_ratio(new_logprobs, ref_logprobs)


@KL_ESTIMATORS.register("k2")
def k2(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased in value, right in gradient."""
    return _log_ratio(new_logprobs, ref_logprobs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, never negative, and as exact near 0 as anywhere."""
    difference = _log_ratio(new_logprobs, ref_logprobs)
    return torch.expm1(-difference) + difference


@KL_ESTIMATORS.register("ratio_k1")
def ratio_k1(new_logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """k1 as an expectation under the policy, whoever sampled; differentiated through the ratio."""
    check_same_shape(new_logprobs=new_logprobs, ratio=ratio)
    return full_precision(ratio) * k1(new_logprobs, ref_logprobs)


@KL_ESTIMATORS.register("ratio_k3")
def ratio_k3(new_logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """k3 as an expectation under the policy, whoever sampled; differentiated through the ratio."""
    check_same_shape(new_logprobs=new_logprobs, ratio=ratio)
    return full_precision(ratio) * k3(new_logprobs, ref_logprobs)


@KL_ESTIMATORS.register("k1_plus")
def k1_plus(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 in value, without bias; k2 in gradient, where k1 has none to expect."""
    return _shown_as(k1(new_logprobs, ref_logprobs), k2(new_logprobs, ref_logprobs))


@KL_ESTIMATORS.register("k3_plus")
def k3_plus(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 in value, without bias; k2 in gradient, where k3's points the other way round."""
    return _shown_as(k3(new_logprobs, ref_logprobs), k2(new_logprobs, ref_logprobs))


@KL_ESTIMATORS.register("absolute")
def absolute(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Of no divergence an estimate: verl offers it, and every step it takes is as long."""
    return _log_ratio(new_logprobs, ref_logprobs).abs()


def _shown_as(value: Tensor, differentiated: Tensor) -> Tensor:
    """The value of one with the gradient of the other."""
    return value.detach() + differentiated - differentiated.detach()


def _log_ratio(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """New - ref, the latter a constant, bounded."""
    check_same_shape(new_logprobs=new_logprobs, ref_logprobs=ref_logprobs)
    difference = full_precision(new_logprobs) - full_precision(ref_logprobs.detach())
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
