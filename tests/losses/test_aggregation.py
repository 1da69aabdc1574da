"""Aggregations: by hand, and equal to a plain loop however the window is cut."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.losses import AGGREGATIONS, window_counts

ARGS = SimpleNamespace(max_completion_length=8)
# Two completions of prompt 7 and one of prompt 3; what is outside the mask must not be seen.
LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.inf], [6.0, 2.0, -99.0]]).double()
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
GROUPS = torch.tensor([7, 7, 3])


def aggregated(name, losses, mask, counts):
    return AGGREGATIONS[name]({"losses": losses, "mask": mask, **counts}, ARGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_mean", (6 + 4 + 8) / 6),
        ("sequence_mean", (2 + 4 + 4) / 3),
        ("sequence_sum", (6 + 4 + 8) / 3),
        ("constant_length", (6 + 4 + 8) / (3 * 8)),
        ("prompt_mean", ((6 + 4) / 4 + 8 / 2) / 2),
    ],
)
def test_by_hand(name, value):
    found = aggregated(name, LOSSES, MASK, window_counts(MASK, GROUPS))
    assert_close(found.item(), value)


def test_the_counts_by_hand():
    mask = torch.cat([MASK, torch.zeros(2, 3).bool()])
    counts = window_counts(mask, torch.tensor([7, 7, 3, 7, 5]))
    # The last row is the only one of its prompt, and neither has a trained token.
    assert counts["window_tokens"] == 6
    assert counts["window_rows"] == 3
    assert counts["window_prompts"] == 2
    assert counts["row_prompt_tokens"].tolist() == [4, 4, 2, 4, 0]


def loop(name, losses, mask, groups):
    """The definitions, written out in Python."""
    rows = [
        [loss for loss, counts in zip(row, trained, strict=True) if counts]
        for row, trained in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    by_prompt = {}
    for group, row in zip(groups.tolist(), rows, strict=True):
        by_prompt.setdefault(group, []).extend(row)
    rows = [row for row in rows if row]
    prompts = [tokens for tokens in by_prompt.values() if tokens]
    tokens = [token for row in rows for token in row]
    if not tokens:
        return 0.0
    return {
        "token_mean": sum(tokens) / len(tokens),
        "sequence_mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "sequence_sum": sum(tokens) / len(rows),
        "constant_length": sum(tokens) / (len(rows) * 8),
        "prompt_mean": sum(sum(p) / len(p) for p in prompts) / len(prompts),
    }[name]


WINDOWS = st.integers(1, 7).flatmap(
    lambda rows: st.tuples(
        *[
            st.lists(
                st.lists(st.floats(-9, 9), min_size=4, max_size=4), min_size=rows, max_size=rows
            )
        ],
        *[st.lists(st.integers(0, 4), min_size=rows, max_size=rows) for _ in range(2)],
        st.integers(1, rows),
    )
)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(WINDOWS)
def test_shares_add_up_to_the_loop_in_value_and_gradient(name, window):
    """Lengths differ, some rows have no token, groups are torn, the last micro-batch is short."""
    values, lengths, groups, size = window
    losses = torch.tensor(values, dtype=torch.float64).requires_grad_()
    mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(-1)
    groups = torch.tensor(groups)
    counts = window_counts(mask, groups)
    shares = []
    for part in torch.arange(len(mask)).split(size):
        own = {**counts, "row_prompt_tokens": counts["row_prompt_tokens"][part]}
        shares.append(aggregated(name, losses[part], mask[part], own))
    whole = aggregated(name, losses, mask, counts)
    assert_close(sum(shares), whole)
    assert_close(whole.item(), loop(name, losses.detach(), mask, groups))
    by_parts, at_once = (
        torch.autograd.grad(loss, losses, retain_graph=True)[0] for loss in (sum(shares), whole)
    )
    assert_close(by_parts, at_once, rtol=1e-12, atol=0)
    assert not at_once[~mask].any()


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(st.integers(1, 5))
def test_padding_changes_nothing(name, width):
    wider, mask = (torch.cat([t, t.new_zeros(3, width)], 1) for t in (LOSSES, MASK))
    wider[:, 3:] = math.nan
    assert_close(
        aggregated(name, wider, mask, window_counts(mask, GROUPS)),
        aggregated(name, LOSSES, MASK, window_counts(MASK, GROUPS)),
    )


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_rows_without_trained_tokens_do_not_count(name):
    losses = torch.cat([LOSSES, torch.full((1, 3), 5.0).double()])
    mask = torch.cat([MASK, torch.zeros(1, 3).bool()])
    counts = window_counts(mask, torch.tensor([7, 7, 3, 9]))
    assert_close(
        aggregated(name, losses, mask, counts),
        aggregated(name, LOSSES, MASK, window_counts(MASK, GROUPS)),
    )


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_window_is_0_and_can_be_differentiated(name):
    losses = torch.tensor([[1.0, math.nan]], requires_grad=True)
    mask = torch.zeros(1, 2).bool()
    loss = aggregated(name, losses, mask, window_counts(mask, torch.tensor([0])))
    loss.backward()
    assert loss.item() == 0
    assert not losses.grad.any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_half_precision_is_added_up_in_float32(name):
    # bfloat16 would stop counting at 256.
    losses, mask = torch.ones(1, 1000).bfloat16(), torch.ones(1, 1000).bool()
    loss = aggregated(name, losses, mask, window_counts(mask, torch.tensor([0])))
    assert loss.dtype == torch.float32
    exact = aggregated(name, losses.double(), mask, window_counts(mask, torch.tensor([0])))
    assert_close(loss.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("token_mean", "window_tokens"),
        ("sequence_mean", "window_rows"),
        ("sequence_sum", "window_rows"),
        ("constant_length", "window_rows"),
        ("prompt_mean", "window_prompts, row_prompt_tokens"),
    ],
)
def test_a_count_that_is_missing_is_named(name, missing):
    with pytest.raises(ValueError, match=f"aggregation '{name}' needs {missing}"):
        aggregated(name, LOSSES, MASK, {})


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_refuse_to_broadcast_and_to_take_weights_for_a_mask(name):
    counts = window_counts(MASK, GROUPS)
    with pytest.raises(ValueError, match="one shape"):
        aggregated(name, LOSSES[:, :1], MASK, counts)
    with pytest.raises(ValueError, match="must be bool"):
        aggregated(name, LOSSES, MASK.float(), counts)


def test_prompt_mean_refuses_the_counts_of_other_rows():
    counts = window_counts(MASK, GROUPS)
    with pytest.raises(ValueError, match=r"row_prompt_tokens \(3,\)"):
        aggregated("prompt_mean", LOSSES[:2], MASK[:2], counts)
