"""Where the gradient comes from, token by token, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.logprobs import ResponseLogprobs
from lit_align.losses import GRPOConfig, grpo_terms
from lit_align.modules.metrics import Sums
from lit_align.modules.signal import PARTS, TOKEN_SUMS, token_metrics, token_sums

CONFIG = GRPOConfig("clip", clip_lower=0.2, clip_higher=0.28)
HALF, CLIPPED = math.log(0.5), math.log(1.5)
# Three completions: the first has a token of each kind, in the second all rewards agreed, the third
# was cut and does not count. Where nothing counts, numbers that would show.
MASK = torch.tensor([[False, True, True, True], [True, True, False, False], [False] * 4])
NEW = torch.tensor([[-9.0, CLIPPED, CLIPPED, 0.0], [HALF, CLIPPED, -9.0, -9.0], [-9.0] * 4])
WEIGHTS = torch.tensor([[0.0, 0.0, 2.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4])
ENTROPY = torch.tensor([[9.0, 1.0, 2.0, 3.0], [4.0, 5.0, 9.0, 9.0], [9.0] * 4])
BATCH = {
    "advantages": torch.tensor([1.0, 0.0, 1.0]),
    "masked_tokens": torch.tensor([0, 0, 3]),
    "old_logprobs": torch.zeros(3, 4),
}


def sums_of(batch=BATCH, weights=WEIGHTS, new=NEW, mask=MASK, config=CONFIG):
    scored = ResponseLogprobs(new, mask, ENTROPY[: len(mask), : mask.shape[1]], None)
    ratio = new.exp()
    advantages = batch["advantages"].unsqueeze(-1).expand_as(new)
    terms = grpo_terms(new, ratio, advantages, batch.get("ref_logprobs"), config, weights)
    return token_sums(batch, scored, terms, ratio, weights)


def parts(sums):
    return {name: sums[f"tokens/{name}"].item() for name in PARTS}


def test_each_token_is_one_of_five():
    # The weight of 0 comes before the clip, and no advantage before both.
    assert parts(sums_of()) == {
        "masked": 3,
        "no_advantage": 2,
        "dropped": 1,
        "clipped": 1,
        "active": 1,
    }


def test_without_a_correction_nothing_is_dropped():
    assert parts(sums_of(weights=None)) == {
        "masked": 3,
        "no_advantage": 2,
        "dropped": 0,
        "clipped": 2,
        "active": 1,
    }


def test_a_batch_that_says_nothing_of_masked_tokens_has_none():
    without = {name: column for name, column in BATCH.items() if name != "masked_tokens"}
    assert parts(sums_of(without))["masked"] == 0


def test_sums_are_over_the_tokens_that_count():
    sums = sums_of()
    assert sums["tokens"].item() == 5
    assert sums["entropy"].item() == 1 + 2 + 3 + 4 + 5
    assert sums["ratio"].item() == pytest.approx(1.5 + 1.5 + 1 + 0.5 + 1.5)
    # -1.28 is what the clip leaves of -1.5; times the weights 0, 2 and 1.
    assert sums["policy_loss"].item() == pytest.approx(-2 * 1.28 - 1.0)
    assert sums["clip_ratio/high_mean"].item() == 1
    assert sums["clip_ratio/low_mean"].item() == 0
    assert sums["clip_ratio/region_mean"].item() == 1
    assert sums["kl"].item() == 0
    assert "sampled_tokens" not in sums


def test_a_ratio_that_fell_is_clipped_where_the_completion_was_bad():
    batch = {"advantages": torch.tensor([-1.0])}
    sums = sums_of(batch, None, torch.tensor([[HALF, CLIPPED]]), torch.tensor([[True, True]]))
    assert sums["clip_ratio/low_mean"].item() == 1
    assert sums["clip_ratio/high_mean"].item() == 0


def test_the_kl_is_that_of_the_reference():
    batch = {**BATCH, "ref_logprobs": NEW - 0.1}
    # k3 of a difference of -0.1, at each of five tokens.
    assert sums_of(batch)["kl"].item() == pytest.approx(5 * (math.exp(-0.1) - 1 + 0.1), rel=1e-4)


def test_the_sampler_is_compared_with_the_log_probs_of_the_rollout():
    sampler = torch.zeros(3, 4)
    sampler[0, 1], sampler[1, 0] = -0.5, 0.25  # old - sampler is 0.5 and -0.25
    sums = sums_of({**BATCH, "sampler_logprobs": sampler})
    up, down = math.exp(0.5), math.exp(-0.25)
    assert sums["sampled_tokens"].item() == 5
    assert sums["sampling/sampling_logp_difference/mean"].item() == pytest.approx(0.75)
    ratio = sums["sampling/importance_sampling_ratio/mean"].item()
    assert ratio == pytest.approx(up + down + 3)
    assert sums["sampling/kl"].item() == pytest.approx(-0.25)
    assert sums["sampling/k3"].item() == pytest.approx(up - 1.5 + down - 0.75)


def test_without_old_log_probs_the_sampler_is_compared_with_the_new():
    without = {name: column for name, column in BATCH.items() if name != "old_logprobs"}
    sums = sums_of({**without, "sampler_logprobs": NEW})
    assert sums["sampling/sampling_logp_difference/mean"].item() == 0


def test_the_means_are_those_of_all_micro_batches_together():
    kept = Sums(*TOKEN_SUMS)
    first = {**BATCH, "sampler_logprobs": torch.full((3, 4), -0.5)}
    second = {"advantages": torch.tensor([1.0])}
    kept.update(sums_of(first))
    kept.update(sums_of(second, None, torch.tensor([[0.0]]), torch.tensor([[True]])))
    found = token_metrics(kept.compute())
    # Five tokens, then one; eight with the masked, then one.
    assert_close(found["entropy"], torch.tensor((15 + 9) / 6))
    assert_close(found["tokens/masked"], torch.tensor(3 / 9))
    assert_close(found["tokens/active"], torch.tensor(2 / 9))
    assert_close(found["clip_ratio/high_mean"], torch.tensor(1 / 6))
    # Only the first has a sampler.
    assert_close(found["sampling/sampling_logp_difference/mean"], torch.tensor(0.5))


def test_without_a_sampler_nothing_is_said_of_it():
    kept = Sums(*TOKEN_SUMS)
    kept.update(sums_of())
    assert not [name for name in token_metrics(kept.compute()) if name.startswith("sampling/")]


def test_of_nothing_every_mean_is_0():
    nothing = {"advantages": torch.tensor([1.0]), "masked_tokens": torch.tensor([0])}
    kept = Sums(*TOKEN_SUMS)
    kept.update(sums_of(nothing, None, torch.tensor([[0.0]]), torch.tensor([[False]])))
    assert set(map(float, token_metrics(kept.compute()).values())) == {0.0}


@given(st.data())
def test_the_five_parts_add_up_to_1(data):
    def drawn(values):
        rows = st.lists(st.sampled_from(values), min_size=4, max_size=4)
        return torch.tensor(data.draw(st.lists(rows, min_size=3, max_size=3)))

    mask, new, weights = drawn([True, False]), drawn([HALF, 0.0, CLIPPED]), drawn([0.0, 1.0])
    batch = {
        "advantages": torch.tensor(data.draw(st.tuples(*[st.sampled_from([-1.0, 0.0, 1.0])] * 3))),
        "masked_tokens": torch.tensor(data.draw(st.tuples(*[st.integers(0, 3)] * 3))),
    }
    sums = sums_of(batch, weights, new, mask)
    assert sum(parts(sums).values()) == mask.sum() + batch["masked_tokens"].sum()
    kept = Sums(*TOKEN_SUMS)
    kept.update(sums)
    found = token_metrics(kept.compute())
    total = sum(found[f"tokens/{name}"] for name in PARTS)
    counted = mask.any() or batch["masked_tokens"].any()
    assert total.item() == pytest.approx(float(counted))


def test_what_is_counted_has_no_gradient():
    new = NEW.clone().requires_grad_()
    assert not any(value.requires_grad for value in sums_of(new=new).values())
