"""Which layout a batch gets, and the hidden states that come out of it."""

from typing import Literal, get_args

from torch import Tensor, nn

from lit_align.logprobs.abilities import abilities
from lit_align.logprobs.causal_lm import CausalLM
from lit_align.logprobs.packing import Packed, no_prefixes, pack, packable_rows, shared_prefixes
from lit_align.ops import completion_mask

Layout = Literal["auto", "padded", "packed", "shared"]

# "auto" leaves the padding where so little can be saved: calls per row cost something too.
WORTHWHILE = 0.95


def packed_batch(
    model: nn.Module, layout: Layout, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> Packed | None:
    """The batch as one sequence, or None where it stays padded.

    Args:
        model: whose layers decide what is possible.
        layout: the one wished for; "auto": the cheapest.
        input_ids: (B, T).
        attention_mask: (B, T).
        labels: (B, T).

    Raises:
        ValueError: if the layout is unknown.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"unknown layout '{layout}': choose one of {', '.join(get_args(Layout))}")
    if layout == "padded" or not abilities(model).pack():
        return None
    rows = packable_rows(input_ids, attention_mask, labels)
    if rows is None:  # padding is to predict something
        return None
    shares = layout != "packed" and abilities(model).share()
    prefixes = shared_prefixes(rows) if shares else no_prefixes(rows)
    # Of a padded row the last token predicts nothing either.
    size = int(rows.inputs.sum()) - sum(prefix.length for prefix in prefixes)
    if layout == "auto" and size > WORTHWHILE * input_ids[:, 1:].numel():
        return None
    return pack(rows, prefixes, input_ids.device)


def scored_states(
    parts: CausalLM,
    packed: Packed | None,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
) -> Tensor:
    """Hidden states that predict the scored tokens of a batch, row after row, (N, H)."""
    if packed is None:
        return parts.hidden_states(input_ids, attention_mask)[:, :-1][completion_mask(labels)]
    return parts.packed_states(packed)[0, packed.sources]
