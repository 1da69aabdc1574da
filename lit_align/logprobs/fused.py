"""Terms of many predictions in few passes over their logits, and a gradient made in their place.

What `token_terms` says in plain autograd, said by hand: beside what the head has projected, only a
few rows of logits exist at a time, few enough to stay in the processor's cache.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of float32 logits in work at a time: what a processor's cache holds; elsewhere calls cost more.
BLOCK_BYTES = {"cpu": 2**21}
BLOCK_BYTES_ELSEWHERE = 2**27
# Its exponential is 0 in any precision, and 0 times it too, which is not so of minus infinity.
LOWEST = -1e4


class RowTerms(NamedTuple):
    """What is known of each row of logits, (n,); `logprobs` and `entropy` have gradients.

    `top` is the largest logit, `total` the sum of exp(logits - top), and `certainty` the sum of the
    squared probabilities; the other names are those of `TokenTerms`.
    """

    logprobs: Tensor
    entropy: Tensor
    top: Tensor
    total: Tensor
    certainty: Tensor
    mean_logit: Tensor
    is_likeliest: Tensor


class FusedTerms:
    """Terms of one chunk of predictions, computed once.

    Args:
        finish: from what a head projects, (n, V), to the logits that the loss sees, in float32 or
            better; row by row, and differentiable.
        full: whether to compute more than `logprobs`, `top` and `total`; the rest is 0 otherwise.
        may_overwrite: whether nothing else reads the projection, so that its gradient may take its
            place. A second backward pass is then an error.
    """

    def __init__(
        self, finish: Callable[[Tensor], Tensor], *, full: bool, may_overwrite: bool
    ) -> None:
        self.finish = finish
        self.full = full
        self.may_overwrite = may_overwrite
        self._known: RowTerms | None = None

    def __call__(self, projected: Tensor, targets: Tensor) -> RowTerms:
        """Terms of `projected`, (n, V), under `targets`, (n,).

        A second call does not compute them again: `checkpoint` makes it, and wants nothing but the
        projection, for the backward pass.
        """
        return RowTerms(*_Terms.apply(projected, targets, self))  # type: ignore[no-untyped-call]

    def known(self, projected: Tensor, targets: Tensor) -> RowTerms:
        """The terms, without a gradient."""
        if self._known is None:
            parts = [self._terms(projected[rows], targets[rows]) for rows in _blocks(projected)]
            self._known = RowTerms(*map(torch.cat, zip(*parts, strict=True)))
        return self._known

    def _terms(self, projected: Tensor, targets: Tensor) -> RowTerms:
        logits = self.finish(projected)
        top, likeliest = logits.max(-1)
        below = _below(logits, top)
        target = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        weights = below.exp()
        total = weights.sum(-1)
        logprobs = target - top - total.log()
        if not self.full:
            none = torch.zeros_like(top)
            return RowTerms(logprobs, none, top, total, none, none, none)
        # All summands of the entropy have one sign: nothing cancels, however large the logits are.
        return RowTerms(
            logprobs,
            total.log() - (weights * below).sum(-1) / total,
            top,
            total,
            weights.square().sum(-1) / total.square(),
            logits.mean(-1),
            (likeliest == targets).float(),
        )

    def gradient(
        self, projected: Tensor, targets: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None
    ) -> Tensor:
        """Gradient by the projection, (n, V), from those by log-probs and entropy.

        d logprobs / d logits = (1 at the target) - p
        d entropy  / d logits = -p * (log p + entropy)
        """
        known = self.known(projected, targets)
        result = projected if self.may_overwrite else torch.empty_like(projected)
        for rows in _blocks(projected):
            block = projected[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = self.finish(block)
            below = _below(logits.detach(), known.top[rows])
            scale = -of_logprobs[rows]
            if of_entropy is None:
                slope = below.exp_().mul_((scale / known.total[rows]).unsqueeze(-1))
            else:
                scale = scale - of_entropy[rows] * (known.entropy - known.total.log())[rows]
                factor = torch.addcmul(scale.unsqueeze(-1), below, of_entropy[rows, None], value=-1)
                slope = below.exp_().mul_(factor).div_(known.total[rows, None])
            slope.scatter_add_(1, targets[rows, None], of_logprobs[rows, None])
            if logits is not block:
                (slope,) = torch.autograd.grad(logits, block, slope)
            result[rows] = slope
        return result


class _Terms(torch.autograd.Function):
    """Log-probs and entropy with gradients by the projection, and the rest without."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, targets: Tensor, terms: FusedTerms) -> Any:
        ctx.save_for_backward(projected, targets)
        ctx.set_materialize_grads(False)
        ctx.terms = terms
        # Copies: what this returns hangs on the graph, which hangs on `terms`.
        logprobs, entropy, *others = (part.clone() for part in terms.known(projected, targets))
        ctx.mark_non_differentiable(*others)
        return logprobs, entropy, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs: Tensor | None, entropy: Tensor | None, *_: Any) -> Any:
        projected, targets = ctx.saved_tensors
        if logprobs is None:
            logprobs = torch.zeros_like(ctx.terms.known(projected, targets).logprobs)
        return ctx.terms.gradient(projected, targets, logprobs, entropy), None, None


def _below(logits: Tensor, top: Tensor) -> Tensor:
    """Logits, (n, V), less the largest of their row: a new tensor, and finite."""
    return (logits - top.unsqueeze(-1)).clamp_(min=LOWEST)


def _blocks(projected: Tensor) -> Iterator[slice]:
    """The rows, as many at a time as are good to work on; at least once, be there none."""
    size = BLOCK_BYTES.get(projected.device.type, BLOCK_BYTES_ELSEWHERE)
    step = max(1, size // (4 * projected.shape[-1]))
    for start in range(0, max(1, len(projected)), step):
        yield slice(start, start + step)
