"""Entropy controls: how the weight of the entropy bonus changes from step to step.

Each function takes where the control stands and the policy's mean entropy over all trained tokens
of the step that was just made, in nats per token, and returns where it stands for the next step.
These are plain numbers: what a checkpoint holds, a resumed run goes on from, bit by bit.
"""

from typing import Annotated, NamedTuple

from lit_align.errors import UserError
from lit_align.losses.variants import Range, Variants

ENTROPY_CONTROLS = Variants(noun="entropy_control")

Nats = Annotated[float, Range(above=0)]
Step = Annotated[float, Range(above=0)]
Bound = Annotated[float, Range(least=0)]


class EntropyBonus(NamedTuple):
    """Where a control stands, both in the advantages' unit per nat, >= 0.

    Attributes:
        coefficient: what the control moves.
        weight: of the entropy in the loss of the next step.
    """

    coefficient: float
    weight: float


@ENTROPY_CONTROLS.register("fixed")
def fixed(coefficient: float) -> EntropyBonus:
    """The bonus that was chosen, whatever the entropy."""
    return EntropyBonus(coefficient, coefficient)


@ENTROPY_CONTROLS.register("target")
def target(
    coefficient: float,
    entropy: float,
    *,
    entropy_target: Nats,
    entropy_step: Step = 0.005,
    entropy_bonus_min: Bound = 0.0,
    entropy_bonus_max: Bound = 1.0,
) -> EntropyBonus:
    """A bonus that grows while the entropy is too low, and acts only then.

        coefficient' = coefficient + entropy_step where entropy <= entropy_target
                     = coefficient - entropy_step elsewhere, in [entropy_bonus_min, ..._max]
        weight       = coefficient' where entropy <= entropy_target, 0 elsewhere

    The paper measures the entropy of a rollout before it trains on it; here it is that of the step
    before, which costs nothing.

    Args:
        coefficient: as it was, the advantages' unit per nat.
        entropy: mean over the trained tokens of the step, nats per token.
        entropy_target: nats per token, > 0; the source takes 0.2 for a model of long chains of
            thought. One below what the policy has at first waits until the entropy falls.
        entropy_step: by which the coefficient moves at each step, > 0.
        entropy_bonus_min: smallest coefficient, >= 0.
        entropy_bonus_max: largest coefficient, not below the smallest.

    Returns:
        For the next step.

    Raises:
        UserError: if the largest coefficient is below the smallest.

    Source:
        He et al. 2025 (Skywork-OR1), arXiv:2505.22312, adaptive entropy control,
        alpha_k; step and bounds: TRL.
    """
    if entropy_bonus_max < entropy_bonus_min:
        raise UserError(
            f"entropy_bonus_max must not be below entropy_bonus_min = {entropy_bonus_min:g}, and "
            f"it is {entropy_bonus_max:g}"
        )
    is_low = entropy <= entropy_target
    moved = coefficient + (entropy_step if is_low else -entropy_step)
    bounded = min(max(moved, entropy_bonus_min), entropy_bonus_max)
    return EntropyBonus(bounded, bounded if is_low else 0.0)
