"""Attention by matrix products against torch's own, segment by segment."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from lit_align.logprobs import attention, cpu_attention
from lit_align.logprobs.attention import Segment, Segments
from lit_align.logprobs.cpu_attention import segmented_attention

# A prompt with two branches, of which one is a single token; a row by itself; a short one.
SEGMENTS = [(0, 37, 0, 0), (37, 38, 0, 37), (38, 61, 0, 37), (61, 80, 0, 0), (80, 82, 0, 0)]
TOKENS = 82


def states(heads, key_heads, width, value_width, dtype=torch.float64):
    torch.manual_seed(5)
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width))
    # As models have them: heads beside each other in memory.
    drawn = (torch.randn(1, TOKENS, n, size, dtype=dtype).transpose(1, 2) for n, size in sizes)
    return [tensor.requires_grad_() for tensor in drawn]


def by_torch(query, key, value, scaling):
    rows = []
    for start, stop, prefix_start, prefix_stop in SEGMENTS:
        segment = Segment(start, stop, prefix_start, prefix_stop)
        seen = torch.ones(stop - start, segment.prefix + stop - start, dtype=torch.bool)
        rows.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                segment.with_prefix(key),
                segment.with_prefix(value),
                attn_mask=seen.tril(segment.prefix),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(rows, 2).transpose(1, 2)


def values_and_gradients(function, tensors):
    out = function(*tensors)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("rows", [1, 12, 576], ids=lambda n: f"{n} rows at once")
@pytest.mark.parametrize(
    "shape", [(4, 4, 8, 8), (6, 2, 8, 8), (3, 1, 5, 7)], ids=["one each", "grouped", "odd"]
)
def test_values_and_gradients_are_torchs(shape, rows, monkeypatch):
    monkeypatch.setattr(cpu_attention, "ROWS", rows)
    tensors = states(*shape)
    scaling = 0.3
    right = values_and_gradients(lambda *s: by_torch(*s, scaling), tensors)
    found = values_and_gradients(lambda *s: segmented_attention(*s, SEGMENTS, scaling), tensors)
    for mine, torchs in zip(found, right, strict=True):
        assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_rounded_is_no_more_than_torch_rounds(dtype):
    exact = states(6, 2, 16, 16)
    rounded = [s.detach().to(dtype).requires_grad_() for s in exact]
    exact = [s.detach().double().requires_grad_() for s in rounded]
    right = values_and_gradients(lambda *s: by_torch(*s, 0.25), exact)
    torchs = values_and_gradients(lambda *s: by_torch(*s, 0.25), rounded)
    found = values_and_gradients(lambda *s: segmented_attention(*s, SEGMENTS, 0.25), rounded)
    for mine, other, best in zip(found, torchs, right, strict=True):
        assert mine.dtype == dtype
        error, allowed = ((x.double() - best).norm() / best.norm() for x in (mine, other))
        assert error <= 2 * allowed


def test_large_scores_do_not_overflow():
    query, key, value = states(2, 1, 8, 8, torch.float32)
    out = segmented_attention(query * 300, key * 300, value, SEGMENTS, 1.0)
    assert out.isfinite().all()
    assert_close(out, by_torch(query * 300, key * 300, value, 1.0), rtol=1e-4, atol=1e-4)


def test_autocast_changes_precision_as_it_does_for_torch():
    query, key, value = states(6, 2, 16, 16, torch.float32)
    query.data *= 4
    segments = Segments([Segment(*segment) for segment in SEGMENTS])
    with torch.autocast("cpu", torch.bfloat16):
        found = attention._by_products(query, key, value, segments, 0.25)
        right = by_torch(query, key, value, 0.25)
    assert found.dtype == right.dtype == torch.bfloat16
    exact = by_torch(query, key, value, 0.25)
    error, allowed = ((x.float() - exact).norm() / exact.norm() for x in (found, right))
    assert error <= 2 * allowed


def test_no_gradient_keeps_nothing():
    tensors = states(4, 2, 8, 8)
    with torch.no_grad():
        assert not segmented_attention(*tensors, SEGMENTS, 1.0).requires_grad
