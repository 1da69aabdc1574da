"""Likelihood terms by hand and by property."""

import pytest
import torch
from hypothesis import given
from losses.small_pairs import PAIRS, columns, numbers
from torch.testing import assert_close

from lit_align.losses import sft_loss, sft_whole_loss


def counts(*values):
    return torch.tensor(values)


def test_sft_is_the_likelihood_of_the_chosen_response_alone():
    chosen, rejected = numbers(-2.0).requires_grad_(), numbers(-5.0).requires_grad_()
    losses, *rewards = sft_loss(chosen, rejected)
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected), materialize_grads=True)
    assert_close(losses, numbers(2.0))
    assert_close(torch.cat(rewards), numbers(-2.0, -5.0))
    assert_close(torch.cat(gradients), numbers(-1.0, 0.0))


def test_sft_whole_by_hand():
    # Prompts of 3 and 1 tokens, 5 and 4 tokens with the preferred response, 4 and 4 with the other.
    losses, chosen, rejected = sft_whole_loss(
        *(numbers(-2.0, -3.0), numbers(-4.0, -5.0), numbers(-8.0, -1.0)),
        *(counts(2, 3), counts(1, 3), counts(3, 1)),
    )
    assert_close(losses, numbers(2.0, 1.0))
    assert_close(chosen, numbers(-2.0, -1.0))
    assert_close(rejected, numbers(-3.0, -1.5))


@given(PAIRS)
def test_without_a_prompt_sft_whole_is_sft_of_means(pairs):
    chosen, rejected, *_ = columns(pairs)
    nothing, length = torch.zeros_like(chosen), torch.full(chosen.shape, 7)
    whole = sft_whole_loss(chosen, rejected, nothing, length, length, 0 * length)
    for part, other in zip(whole, sft_loss(chosen / 7, rejected / 7), strict=True):
        assert_close(part, other)


@given(PAIRS)
def test_every_token_of_a_row_counts_alike(pairs):
    chosen, rejected, prompt, _ = (logps.requires_grad_() for logps in columns(pairs))
    length = torch.full(chosen.shape, 4)
    losses = sft_whole_loss(chosen, rejected, prompt, length, length, 2 * length).losses
    of_chosen, of_prompt = torch.autograd.grad(losses.sum(), (chosen, prompt))
    assert_close(of_chosen, of_prompt)
    assert_close(of_prompt, torch.full_like(prompt, -1 / 12))


def test_a_row_without_any_token_has_no_loss():
    nothing = counts(0)
    pair = sft_whole_loss(*numbers(0.0, 0.0, 0.0)[:, None], nothing, nothing, nothing)
    assert all(part.eq(0).all() for part in pair)


def test_it_does_not_broadcast():
    with pytest.raises(ValueError, match="one shape"):
        sft_whole_loss(*torch.zeros(3, 2), counts(1), counts(1), counts(1))
