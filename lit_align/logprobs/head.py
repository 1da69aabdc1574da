"""From hidden states to what a loss reads of each token, the vocabulary projected chunk by chunk.

Nothing here knows how a batch is laid out: rows of hidden states come in, one per scored token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Alignment = Literal["sampled", "greedy"]

# Of logits in float32 that are made at once; a backward pass holds about four arrays of this size.
CHUNK_BYTES = 64 * 2**20
# With fewer rows than this, reading the head's weights costs more than multiplying with them.
SMALLEST_CHUNK = 64


class TokenTerms(NamedTuple):
    """What one prediction of the policy is worth: each of the targets' shape, in nats."""

    logprobs: Tensor
    entropy: Tensor | None = None
    alignment: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """The last step of a language model: logits = softcap(scale * project(hidden)).

    Args:
        project: the head module itself, so that bias, adapters and quantised weights count.
        scale: multiplies the logits, dimensionless; 1 for most models.
        softcap: bounds the logits to (-softcap, softcap) by a tanh, nats; None for most models.
    """

    project: Callable[[Tensor], Tensor]
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: (N, H) to (N, V), float32 or better."""
        logits = _at_least_float32(self.project(hidden))
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def token_terms(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    alignment: Alignment | None = None,
) -> TokenTerms:
    """Log-probability of each target, and on request entropy and alignment of its distribution.

        p         = softmax(logits / temperature)
        logprobs  = log p(target)
        entropy   = -sum_v p(v) log p(v)
        alignment = log sum_v p(v)^2   ("sampled": the expected probability of a sampled token)
                  = log max_v p(v)     ("greedy": the probability of the likeliest token)

    Args:
        logits: (..., V), any floating type.
        targets: token ids, (...), int64, in [0, V).
        temperature: divides the logits, > 0; 1 unless the tokens were sampled at another.
        entropy: whether to compute the entropy.
        entropy_gradient: whether the entropy is to be differentiated: only a loss wants that, and
            it keeps arrays that a number to be looked at does without.
        alignment: which of WPO's alignment terms to compute, if any.

    Returns:
        Each (...), nats, float32, or float64 for float64 logits. Only `logprobs` has a gradient,
        and the entropy if it is to have one.

    Raises:
        ValueError: if the temperature is not positive or the alignment is unknown.

    Source:
        Alignment: Zhou et al. 2024, arXiv:2406.11827, "weight alignment".
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    # Low precision may carry the matrix product, never the sum over the vocabulary.
    logits = _at_least_float32(logits)
    all_logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    fixed = all_logprobs.detach()
    return TokenTerms(
        logprobs,
        _entropy(all_logprobs if entropy_gradient else fixed) if entropy else None,
        None if alignment is None else _alignment(fixed, alignment),
    )


def chunk_rows(vocabulary: int, budget: int = CHUNK_BYTES) -> int:
    """How many rows of logits are made at once.

    Args:
        vocabulary: logits in a row.
        budget: bytes of them in float32.
    """
    return max(SMALLEST_CHUNK, budget // (4 * vocabulary))


def chunked_terms(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    alignment: Alignment | None = None,
) -> TokenTerms:
    """`token_terms(head(hidden), targets)`, never holding more than `chunk_size` rows of logits.

    The backward pass projects each chunk again instead of keeping its logits, but for the last: it
    is the first that the backward pass needs, when all others are no more. Without a single row the
    result is empty and still hangs on `hidden` and the head, whose gradients are then 0.

    Args:
        head: hidden states to logits, (n, H) to (n, V).
        hidden: final hidden states of the positions that predict `targets`, (N, H).
        targets: (N,), int64.
        chunk_size: rows projected at once, > 0.
        temperature: as in `token_terms`.
        entropy: as in `token_terms`.
        entropy_gradient: as in `token_terms`.
        alignment: as in `token_terms`.

    Returns:
        As `token_terms`, each (N,).
    """

    def terms(rows: Tensor, ids: Tensor) -> TokenTerms:
        return token_terms(
            head(rows),
            ids,
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            alignment=alignment,
        )

    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    *earlier, last = zip(
        torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True
    )
    chunks = [checkpoint(terms, *chunk, use_reentrant=False) for chunk in earlier]
    chunks.append(terms(*last))
    logprobs, entropies, alignments = zip(*chunks, strict=True)
    return TokenTerms(torch.cat(logprobs), _cat(entropies), _cat(alignments))


def _at_least_float32(values: Tensor) -> Tensor:
    """The same numbers in float32, or in float64 if that is what they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _cat(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """The chunks' values in one tensor, or None where none were asked for."""
    asked = [part for part in parts if part is not None]
    return torch.cat(asked) if asked else None


def _entropy(logprobs: Tensor) -> Tensor:
    """Entropy of each row, 0 log 0 being 0, and so its gradient there."""
    probs = logprobs.exp()
    return -(probs * logprobs.masked_fill(probs == 0, 0.0)).sum(-1)


def _alignment(logprobs: Tensor, kind: Alignment) -> Tensor:
    """WPO's n_t of each row."""
    if kind == "sampled":
        return logprobs.exp().square().sum(-1).log()
    if kind == "greedy":
        return logprobs.amax(-1)
    raise ValueError(f"unknown alignment '{kind}': choose one of {', '.join(get_args(Alignment))}")
