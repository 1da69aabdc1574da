"""Whether the trainer computes the same log-probs twice, checked while it can be told.

Until the first optimizer step after a rollout the policy has not moved: its log-probs are those it
wrote the completions with. If they are not, the ratio is off in every step, and nothing else would
say so.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from lit_align.errors import UserError
from lit_align.ops import masked_sum

if TYPE_CHECKING:
    from lit_align.modules.acting import ActingModule

# Mean difference per token that rounding explains, nats: in float32 or better, and in half.
# A sharp distribution makes rounding in half precision large; faults are larger still.
FULL, HALF = 1e-3, 0.5


def check_first_ratio(module: "ActingModule", new: Tensor, old: Tensor, mask: Tensor) -> None:
    """Raise UserError naming the likely cause if the first ratios after a rollout are not 1.

    Args:
        module: in training.
        new: log-probs of the training step, (B, T-1), nats.
        old: those that were computed for the rollout, (B, T-1), nats.
        mask: trained tokens, (B, T-1).
    """
    difference = _mean_difference(new, old, mask)
    # Written so that NaN fails.
    if not difference <= _allowed(module):
        raise UserError(
            "the policy has not moved since this rollout, and yet its log-probs differ by "
            f"{difference:.2g} nats per token from those computed then: {_cause(module)}"
        )


def check_sampler(
    module: "ActingModule", old: Tensor, sampler: Tensor | None, mask: Tensor
) -> None:
    """Raise UserError if an engine in this process samples from another policy than is trained.

    Args:
        module: in training.
        old: log-probs by the trainer's own path, (B, T-1), nats.
        sampler: as the engine reports them, (B, T-1), nats; None: it reports none.
        mask: trained tokens, (B, T-1).
    """
    if sampler is None or not module.engine.in_process:
        return
    difference = _mean_difference(old, sampler.to(old.dtype), mask)
    if not difference <= _allowed(module):
        raise UserError(
            f"{type(module.engine).__name__} runs the policy itself, and its log-probs differ by "
            f"{difference:.2g} nats per token from the trainer's: {_cause(module)}; or the model "
            "treats padding on the left, positions or its cache in a way of its own"
        )


def _mean_difference(one: Tensor, other: Tensor, mask: Tensor) -> float:
    total = masked_sum((one.detach() - other).abs(), mask).sum()
    return float(total / mask.sum().clamp(min=1))


def _allowed(module: "ActingModule") -> float:
    """Half precision anywhere makes everything coarse."""
    weights = next(p.dtype for p in module.policy.parameters() if p.is_floating_point())
    is_half = weights.itemsize < 4 or "16" in str(module.trainer.precision)  # noqa: PLR2004, bytes
    return HALF if is_half else FULL


def _cause(module: "ActingModule") -> str:
    """What to look at first."""
    dropout = [
        name
        for name, layer in module.policy.named_modules()
        if isinstance(layer, nn.Dropout) and layer.p > 0 and layer.training
    ]
    if dropout:
        return (
            f"dropout is on ({dropout[0]} and {len(dropout) - 1} more): set "
            "model.disable_dropout=true and lora_dropout to 0"
        )
    return (
        "something in the model is random or depends on what else is in the batch (experts with "
        f"limited capacity, batch statistics), or precision {module.trainer.precision} is too "
        "coarse for it"
    )
