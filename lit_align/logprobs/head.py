"""From hidden states to what a loss reads of each token, the vocabulary projected chunk by chunk.

Nothing here knows how a batch is laid out: rows of hidden states come in, one per scored token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_align.logprobs.fused import FusedTerms, RowTerms
from lit_align.logprobs.heap import give_back
from lit_align.logprobs.projection import Chain, is_bare

Alignment = Literal["sampled", "greedy"]

# Of logits in float32 that are made at once; a backward pass holds about four arrays of this size.
CHUNK_BYTES = 64 * 2**20
# With fewer rows than this, reading the head's weights costs more than multiplying with them.
SMALLEST_CHUNK = 64


class TokenTerms(NamedTuple):
    """What one prediction of the policy is worth: each of the targets' shape, in nats.

    `is_likeliest` is 1.0 where no token is likelier than the target (and none of the equally likely
    ones comes first), else 0.0.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    alignment: Tensor | None = None
    mean_logit: Tensor | None = None
    is_likeliest: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """The last step of a language model: logits = softcap(scale * project(hidden)).

    Args:
        project: the head module itself, so that bias, adapters and quantised weights count.
        scale: multiplies the logits, dimensionless; 1 for most models.
        softcap: bounds the logits to (-softcap, softcap) by a tanh, nats; None for most models.
    """

    project: Any  # a module, from (N, H) to (N, V)
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: (N, H) to (N, V), float32 or better."""
        return self.finish(self.project(hidden))

    def finish(self, projected: Tensor) -> Tensor:
        """Logits of what the module has projected, (N, V), float32 or better."""
        logits = _at_least_float32(projected)
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
    statistics: bool = False,
) -> TokenTerms:
    """Log-probability of each target, and on request more of its distribution.

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
        statistics: whether to say what runs are watched by: entropy, mean logit (divided by the
            temperature), and whether the target is the likeliest token.

    Returns:
        Each (...), nats, float32, or float64 for float64 logits. Only `logprobs` has a gradient,
        and the entropy if it is to have one.

    Raises:
        ValueError: if the temperature is not positive or the alignment is unknown.

    Source:
        Alignment: Zhou et al. 2024, arXiv:2406.11827, "weight alignment".
    """
    _check(temperature, alignment)
    # Low precision may carry the matrix product, never the sum over the vocabulary.
    logits = _at_least_float32(logits)
    logits = _cooled(logits, temperature)
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    fixed = all_logprobs.detach()
    wanted = entropy or statistics
    return TokenTerms(
        logprobs,
        _entropy(all_logprobs if entropy_gradient else fixed) if wanted else None,
        None if alignment is None else _alignment(fixed, alignment),
        logits.detach().mean(-1) if statistics else None,
        (fixed.argmax(-1) == targets).float() if statistics else None,
    )


def chunk_rows(vocabulary: int, budget: int = CHUNK_BYTES) -> int:
    """How many rows of logits are made at once.

    Args:
        vocabulary: logits in a row.
        budget: bytes of them in float32.
    """
    return max(SMALLEST_CHUNK, budget // (4 * vocabulary))


def chunked_terms(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    alignment: Alignment | None = None,
    statistics: bool = False,
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
        statistics: as in `token_terms`.

    Returns:
        As `token_terms`, each (N,).
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    _check(temperature, alignment)
    asked = _Asked(temperature, entropy, entropy_gradient, alignment, statistics)
    chain = Chain(head.project) if is_bare(head.project) else None
    weight = None if chain is None else head.project.weight
    *earlier, last = zip(
        torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True
    )
    if earlier and hidden.device.type == "cpu":
        # Before and behind the largest tensors there are: the memory peaks here.
        give_back()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: give_back())  # type: ignore[no-untyped-call]
    chunks = []
    for part in earlier:
        step = _chunk(head, chain, asked)
        terms, weight = checkpoint(step, *part, weight, use_reentrant=False)
        chunks.append(terms)
    chunks.append(_chunk(head, chain, asked)(*last, weight)[0])
    return TokenTerms._make(map(_cat, zip(*chunks, strict=True)))


class _Asked(NamedTuple):
    """What to say of each prediction: see `token_terms`."""

    temperature: float
    entropy: bool
    entropy_gradient: bool
    alignment: Alignment | None
    statistics: bool


def _chunk(
    head: Head, chain: Chain | None, asked: _Asked
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[TokenTerms, Tensor | None]]:
    """From one chunk of hidden states, its targets and the head's weights to its terms.

    Also gives the weights for the next chunk.
    """
    wants_entropy = asked.entropy or asked.statistics
    fused = FusedTerms(
        lambda projected: _cooled(head.finish(projected), asked.temperature),
        full=wants_entropy or asked.alignment is not None,
        may_overwrite=chain is not None,
    )

    def terms(
        hidden: Tensor, targets: Tensor, weight: Tensor | None
    ) -> tuple[TokenTerms, Tensor | None]:
        if chain is None or weight is None:
            projected = head.project(hidden)
        else:
            projected, weight = chain(hidden, weight)
        return _chosen(fused(projected, targets), asked), weight

    return terms


def _chosen(row: RowTerms, asked: _Asked) -> TokenTerms:
    """Of all that is known what was asked for."""
    entropy = row.entropy if asked.entropy_gradient else row.entropy.detach()
    alignments = {"sampled": row.certainty.log(), "greedy": -row.total.log()}
    return TokenTerms(
        row.logprobs,
        entropy if asked.entropy or asked.statistics else None,
        alignments[asked.alignment] if asked.alignment is not None else None,
        row.mean_logit if asked.statistics else None,
        row.is_likeliest if asked.statistics else None,
    )


def _check(temperature: float, alignment: str | None) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if alignment is not None and alignment not in get_args(Alignment):
        choices = ", ".join(get_args(Alignment))
        raise ValueError(f"unknown alignment '{alignment}': choose one of {choices}")


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


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
    return logprobs.amax(-1)
