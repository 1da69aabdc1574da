"""The advantage that differs from token to token: by hand, by property, and where it refuses."""

import math

import pytest
import torch
from golden_adapters_weights import kl_in_the_reward
from golden_cases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.losses import GRPOConfig, advantages, group_mean, optimal_token_baseline

NAN = math.nan


def numbers(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def example(seed, groups=(0, 0, 0, 1, 1), width=5):
    """Distributions over seven tokens, one of them drawn; completions of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(groups)
    probs = torch.randn(rows, width, 7, generator=generator, dtype=torch.float64).softmax(-1)
    drawn = torch.randint(7, (rows, width), generator=generator)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return {
        "rewards": torch.randn(rows, generator=generator, dtype=torch.float64),
        "groups": torch.tensor(groups),
        "old_logprobs": probs.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).log(),
        "alignment": probs.square().sum(-1).log(),
        "mask": torch.arange(width) < lengths.unsqueeze(-1),
    }, (probs, drawn)


def test_two_completions_by_hand():
    # p of the drawn tokens 1/2 and 1/4 of (1/2, 1/4, 1/4): 1 - 1 + 3/8 and 1 - 1/2 + 3/8.
    # First token: baseline (3/8 * 1 + 7/8 * 0) / (10/8) = 0.3; second, energies 10/8 and 14/8:
    # 10/24.
    found = optimal_token_baseline(
        torch.tensor([1.0, 0.0]).double(),
        torch.tensor([4, 4]),
        numbers([0.5, 0.25], [0.25, 0.25]).log(),
        torch.full((2, 2), 3 / 8, dtype=torch.float64).log(),
        torch.ones(2, 2, dtype=torch.bool),
    )
    assert_close(found, numbers([0.7, 1 - 10 / 24], [-0.3, -10 / 24]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_energy_is_the_squared_gradient_by_the_logits(seed):
    """Summed over the tokens so far; the baseline is the mean that it weighs."""
    batch, (probs, drawn) = example(seed)
    found = optimal_token_baseline(**batch)
    one_hot = torch.nn.functional.one_hot(drawn, 7)
    energy = ((one_hot - probs) ** 2).sum(-1)
    for group in (0, 1):
        rows = (batch["groups"] == group).nonzero().flatten().tolist()
        for t in range(5):
            there = [row for row in rows if batch["mask"][row, t]]
            weights = torch.stack([energy[row, : t + 1].sum() for row in there] or [torch.ones(())])
            rewards = batch["rewards"][there]
            for row in rows:
                if row in there and len(there) > 1:
                    right = batch["rewards"][row] - (weights * rewards).sum() / weights.sum()
                    assert_close(found[row, t], right)
                else:
                    assert found[row, t] == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(-100, 100), st.floats(0.01, 100))
def test_a_bonus_for_everybody_changes_nothing_and_the_unit_stays(seed, bonus, unit):
    batch, _ = example(seed)
    found = optimal_token_baseline(**batch)
    moved = optimal_token_baseline(**{**batch, "rewards": unit * batch["rewards"] + bonus})
    assert_close(moved, unit * found, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(5)))
def test_the_order_of_the_rows_and_the_numbers_of_the_groups_mean_nothing(seed, order):
    batch, _ = example(seed)
    order = torch.tensor(order)
    shuffled = {name: values[order] for name, values in batch.items()}
    shuffled["groups"] = 7 - 3 * shuffled["groups"]
    assert_close(optimal_token_baseline(**shuffled), optimal_token_baseline(**batch)[order])


def test_a_group_that_agrees_and_a_completion_that_is_alone_have_none():
    batch, _ = example(3, groups=(0, 0, 0, 1, 2))
    agreeing = {**batch, "rewards": numbers(0.1, 0.1, 0.1, 5.0, 6.0).flatten()}
    assert not optimal_token_baseline(**agreeing).any()


def test_the_unscored_count_nowhere():
    batch, _ = example(5)
    batch["rewards"][1] = NAN
    found = optimal_token_baseline(**batch)
    assert not found[1].any()
    others = torch.tensor([0, 2, 3, 4])
    without = {name: values[others] for name, values in batch.items()}
    assert_close(found[others], optimal_token_baseline(**without))


def test_of_equal_surprise_it_is_the_mean():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]).double(), torch.zeros(3, dtype=torch.long)
    mask, same = torch.ones(3, 2).bool(), torch.full((3, 2), 0.5, dtype=torch.float64).log()
    mean = group_mean(rewards, groups).unsqueeze(-1).expand(3, 2)
    assert_close(optimal_token_baseline(rewards, groups, same, same, mask), mean)
    # And also where every token was certain, which makes no energy at all.
    certain = torch.zeros(3, 2, dtype=torch.float64)
    assert_close(optimal_token_baseline(rewards, groups, certain, certain, mask), mean)


@pytest.mark.parametrize("far", [-1e4, -90.0])
def test_impossible_tokens_stay_finite(far):
    mask = torch.tensor([[True, True], [True, False]])
    lone = torch.full((2, 2), far)
    found = optimal_token_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), lone, lone, mask)
    assert found.dtype == torch.float32
    assert_close(found, torch.tensor([[0.5, 0.0], [-0.5, 0.0]]))


def test_it_is_reached_by_name_and_says_what_it_needs():
    batch, _ = example(1)
    config = GRPOConfig(advantage="optimal_token_baseline")
    assert config.reads_alignment
    assert config.needs_group
    assert not GRPOConfig().reads_alignment
    assert_close(advantages(config, **batch), optimal_token_baseline(**batch))
    with pytest.raises(ValueError, match="needs old_logprobs, alignment, mask"):
        advantages(config, batch["rewards"], batch["groups"])


def test_shapes_that_differ_and_numbers_that_are_none_are_refused():
    batch, _ = example(1)
    with pytest.raises(ValueError, match="one shape"):
        optimal_token_baseline(**{**batch, "alignment": batch["alignment"][:, 1:]})
    with pytest.raises(ValueError, match="one shape"):
        optimal_token_baseline(**{**batch, "rewards": batch["rewards"][1:]})
    batch["alignment"][0, 0] = NAN
    with pytest.raises(ValueError, match=r"alignment is nan at \[0, 0\]"):
        optimal_token_baseline(**batch)


@pytest.mark.golden
def test_wherever_two_completions_are_compared_verl_has_the_same():
    cases = [case for case in load() if case.variant.endswith("optimal_token_baseline")]
    if not cases:
        pytest.skip("this folder has no such cases")
    for case in cases:
        given = case.tensors()
        mask, groups = given["response_mask"].bool(), given["index"]
        found = optimal_token_baseline(
            given["token_level_rewards"].sum(-1),
            groups,
            given["old_log_probs"],
            given["sum_pi_squared"].log(),
            mask,
        )
        members = torch.stack([mask[groups == group].sum(0) for group in groups])
        # But for its 1e-8 in the denominator.
        right = numbers(*case.raw["outputs"]["advantages"])
        assert_close(found[mask & (members > 1)], right[mask & (members > 1)], rtol=1e-7, atol=1e-7)
        assert (mask & (members > 1)).sum() > 10


@pytest.mark.golden
def test_a_kl_in_the_reward_is_the_sum_of_torchtune_s_over_the_tokens():
    case = next((case for case in load() if case.variant == "kl_shaped_rewards"), None)
    if case is None:
        pytest.skip("this folder has no such case")
    found = kl_in_the_reward(case).outputs["rewards"]
    assert_close(found, numbers(*case.raw["outputs"]["rewards"]).sum(-1))
