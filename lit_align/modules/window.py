"""Exact normalisation over the optimizer-step window.

Lightning divides each returned loss by `accumulate_grad_batches`, and the strategies average
gradients over the replicas. A mean per micro-batch therefore weighs a pair by how full its
micro-batch is. Undoing both divisions and dividing by the number of pairs of the whole window
makes the gradient independent of how the work was cut.
"""

import lightning as L
from torch import Tensor

from lit_align.ops import masked_sum


def replica(trainer: L.Trainer) -> tuple[int, int]:
    """Which replica of the data this rank reads, and how many there are.

    Ranks that hold pieces of one layer (tensor parallelism) are one replica: they must see the
    same batches, so the number of processes is the wrong number to share work by.
    """
    shares = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return shares["rank"], shares["num_replicas"]


def window_mean(
    losses: Tensor, mask: Tensor, window_rows: Tensor | None, trainer: L.Trainer
) -> Tensor:
    """The share of this micro-batch in the mean loss of its optimizer-step window.

        sum(losses[mask]) / window_rows * accumulate_grad_batches * replicas

    Args:
        losses: per row, (B,).
        mask: the rows that count, (B,) bool.
        window_rows: rows of the window over all micro-batches and replicas, (); None for a loader
            that does not stamp its batches: then the plain mean of the micro-batch.
        trainer: knows the two factors.

    Returns:
        What `training_step` returns, (). Summed over the window as Lightning does it, this is
        the mean over the window's rows.
    """
    total = masked_sum(losses, mask)
    if window_rows is None:
        return total / mask.sum().clamp(min=1)
    factor: int = trainer.accumulate_grad_batches * replica(trainer)[1]
    return total * factor / window_rows


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """The value of the one, (), with the gradient of the other.

    A micro-batch answers for its own rows. Where the loss of other rows depends on them too, that
    is a part of its gradient.
    """
    return value.detach() + (other - other.detach())
