"""Log-probs of the responses of a batch: one row per response, padding on either side."""

from typing import NamedTuple

from torch import Tensor, nn

from lit_align.logprobs.causal_lm import base_model, call_inside, take_apart
from lit_align.logprobs.head import Alignment, TokenTerms, chunk_rows, chunked_terms
from lit_align.logprobs.layouts import Layout, packed_batch, scored_states
from lit_align.ops import check_same_shape, completion_mask


class ResponseLogprobs(NamedTuple):
    """Per-token terms of the responses of a batch; column t speaks of token t+1.

    All but `mask` are (B, T-1), in nats, float32 (float64 for a float64 model) and exactly 0
    outside `mask`, or None if not asked for; only `logprobs` carries a gradient, and `entropy`
    where one was asked for. `mask` is (B, T-1), bool, true where a response token was scored.

    `mean_logit` is the mean over the vocabulary of the logits as the loss sees them: scaled, capped
    and divided by the temperature. `is_likeliest` is 1.0 where the token is the likeliest, else
    0.0, float32.
    """

    logprobs: Tensor
    mask: Tensor
    entropy: Tensor | None
    alignment: Tensor | None
    mean_logit: Tensor | None = None
    is_likeliest: Tensor | None = None


def response_logprobs(  # noqa: PLR0913 - one option for each thing that can be asked for
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    alignment: Alignment | None = None,
    statistics: bool = False,
    chunk_size: int | None = None,
    layout: Layout = "auto",
) -> ResponseLogprobs:
    """Log-probability of every response token under a causal language model.

    Only the positions that predict a response token are projected onto the vocabulary, in chunks
    that the backward pass computes again: no (B, T, V) tensor ever exists. The layout changes how
    much is computed and rounding, nothing else: a model whose layers rule one out gets the next.

    Args:
        model: a causal language model of transformers, plain or with an adapter of peft.
        input_ids: prompt, response and padding, (B, T), int64.
        attention_mask: 1 where `input_ids` is no padding, (B, T).
        labels: the ids, `IGNORE_INDEX` outside the response, (B, T).
        temperature: divides the logits, > 0; 1 unless the responses were sampled at another.
        entropy: whether to return the entropy of each prediction.
        entropy_gradient: whether it is to be differentiated, as a loss with a bonus wants it.
        alignment: which of WPO's alignment terms to return: "sampled", "greedy" or none.
        statistics: whether to return `entropy`, `mean_logit` and `is_likeliest`, at little cost:
            the pass that makes the log-probs makes them too.
        chunk_size: response tokens projected at once: more memory, fewer calls; None: as many as
            `chunk_rows` allows for the model's vocabulary.
        layout: "padded" runs the batch as it is; "packed" all rows in one sequence, without
            padding; "shared" also runs but once what rows of the same prompt begin with; "auto"
            takes the last that is possible and saves something.

    Returns:
        See `ResponseLogprobs`. A row without response tokens is all zeros, and a batch without any
        still hangs on every weight, with gradients of 0.

    Raises:
        ValueError: if the shapes differ, or a value is outside its range.
        UserError: if the model is not built of a body and a head.
    """
    check_same_shape(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    parts = take_apart(model)
    vocabulary = base_model(model).config.get_text_config().vocab_size
    rows = chunk_rows(vocabulary) if chunk_size is None else chunk_size
    packed = packed_batch(model, layout, input_ids, attention_mask, labels)

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> TokenTerms:
        mask = completion_mask(labels)
        terms = chunked_terms(
            parts.head,
            scored_states(parts, packed, input_ids, attention_mask, labels),
            labels[:, 1:][mask],
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            alignment=alignment,
            statistics=statistics,
            chunk_size=rows,
        )
        return TokenTerms._make(None if part is None else _spread(part, mask) for part in terms)

    terms: TokenTerms = call_inside(model, forward, input_ids, attention_mask, labels)
    return ResponseLogprobs(mask=completion_mask(labels), **terms._asdict())


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """Values back at their places: (N,) to the mask's (B, T-1), 0 elsewhere."""
    return rows.new_zeros(mask.shape).masked_scatter(mask, rows)
