"""What holds for every policy loss, whatever was chosen on each axis."""

from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    RATIOS,
    SURROGATES,
    GRPOConfig,
    aggregate,
    grpo_terms,
    policy_ratio,
    window_counts,
)

LENGTH = {"constant_length": {"max_completion_length": 8}}
LEVELS = [
    (loss_fn, level)
    for loss_fn, level in product(SURROGATES, RATIOS)
    if level == "token" or "ratio" in SURROGATES[loss_fn].tensors
]
# Each aggregation with a plain loss, and each pair of the others with one of them in turn.
CHOICES = sorted(
    {("clip", "token", name) for name in AGGREGATIONS}
    | {(*pair, name) for pair, name in zip(LEVELS, cycle(AGGREGATIONS))}
)
SEEDS = st.integers(0, 10_000)


def choices_without(*names):
    """Every loss but those with one of these names on some axis."""
    left = [choices for choices in CHOICES if not set(names) & set(choices)]
    return pytest.mark.parametrize("choices", left, ids="-".join)


every_loss = choices_without()
# Ranks and means over what is passed, which is not the window where that was cut.
OF_THE_WINDOW = ("clip_cov", "kl_cov")
# A pull back to the old policy, whatever the advantage.
WITH_A_PENALTY = ("dro", "kl_cov")
few_examples = settings(max_examples=10)


def config_of(choices, **options):
    loss_fn, ratio_level, aggregation = choices
    options |= LENGTH.get(aggregation, {})
    return GRPOConfig(loss_fn, ratio_level=ratio_level, aggregation=aggregation, **options)


def batch_of(seed, rows=4, width=6, drift=0.5):
    """Rows of unequal length, the last without a token, two prompts."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    new = -numbers(rows, width).abs()
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    if rows > 1:
        lengths[-1] = 0
    return {
        "new": new,
        "old": new + drift * numbers(rows, width),
        "ref": new + drift * numbers(rows, width),
        "advantages": numbers(rows, 1),
        "mask": torch.arange(width) < lengths.unsqueeze(-1),
        "groups": torch.arange(rows) // 2,
        "draws": numbers(rows, width),
    }


def loss_and_gradient(config, batch, counts=None, rows=slice(None)):
    """Of the rows given, as their share of the window, the batch unless counts say otherwise."""
    new = batch["new"][rows].clone().requires_grad_()
    mask = batch["mask"][rows]
    ratio = policy_ratio(config, new, batch["old"][rows], mask)
    advantages = batch["advantages"][rows].expand(new.shape)
    reference = batch["ref"][rows] if config.reads_reference else None
    others = {"old_logprobs": batch["old"][rows], "mask": mask, "draws": batch["draws"][rows]}
    policy, kl = grpo_terms(new, ratio, advantages, reference, config, **others)
    counts = window_counts(mask, batch["groups"][rows]) if counts is None else counts
    loss = aggregate(config, policy.losses + config.beta * kl, mask, counts)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@every_loss
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_it_runs_for_any_number_of_rows(choices, rows):
    """One loss, for any batch size: 6 is also the width."""
    batch = batch_of(0, rows, drift=0.05)
    loss, gradient = loss_and_gradient(config_of(choices), batch)
    assert loss.shape == ()
    assert gradient[batch["mask"]].any()
    assert not gradient[~batch["mask"]].any()


@choices_without("clip_cov", "sequence_product")
@few_examples
@given(SEEDS)
def test_on_policy_every_surrogate_and_ratio_gives_the_policy_gradient(choices, seed):
    """Minus the advantage per token, at the weight that the aggregation gives it."""
    batch = batch_of(seed, drift=0.0)
    plain = config_of(("reinforce", "token", choices[2]))
    _, found = loss_and_gradient(config_of(choices), batch)
    _, right = loss_and_gradient(plain, batch)
    assert_close(found, right)


@choices_without(*OF_THE_WINDOW)
@few_examples
@given(SEEDS, st.integers(1, 4))
def test_micro_batches_add_up_to_the_batch(choices, seed, size):
    batch, config = batch_of(seed), config_of(choices, beta=0.1)
    loss, gradient = loss_and_gradient(config, batch)
    counts = window_counts(batch["mask"], batch["groups"])
    parts = []
    for rows in torch.arange(4).split(size):
        own = {**counts, "row_prompt_tokens": counts["row_prompt_tokens"][rows]}
        parts.append(loss_and_gradient(config, batch, own, rows))
    assert_close(sum(part for part, _ in parts), loss)
    assert_close(torch.cat([part for _, part in parts]), gradient, rtol=1e-9, atol=0)


@every_loss
@few_examples
@given(SEEDS, st.integers(1, 5))
def test_padding_changes_nothing(choices, seed, width):
    batch, config = batch_of(seed), config_of(choices, beta=0.1)
    loss, gradient = loss_and_gradient(config, batch)
    wider = dict(batch)
    paddings = {"new": 3.0, "old": float("nan"), "ref": -9.0, "mask": False, "draws": -9.0}
    for name, padding in paddings.items():
        columns = torch.full((4, width), padding).to(batch[name])
        wider[name] = torch.cat([batch[name], columns], 1)
    padded_loss, padded_gradient = loss_and_gradient(config, wider)
    assert_close(padded_loss, loss)
    assert_close(padded_gradient[:, :6], gradient)
    assert not padded_gradient[:, 6:].any()


@every_loss
@few_examples
@given(SEEDS)
def test_the_order_of_rows_means_nothing(choices, seed):
    batch, config = batch_of(seed), config_of(choices, beta=0.1)
    order = torch.tensor([2, 0, 3, 1])
    loss, gradient = loss_and_gradient(config, batch)
    shuffled_loss, shuffled = loss_and_gradient(config, {n: t[order] for n, t in batch.items()})
    assert_close(shuffled_loss, loss)
    assert_close(shuffled, gradient[order])


@choices_without(*OF_THE_WINDOW, *WITH_A_PENALTY)
@few_examples
@given(SEEDS, st.floats(0.1, 10))
def test_the_gradient_is_proportional_to_the_advantages(choices, seed, factor):
    batch, config = batch_of(seed), config_of(choices)
    _, once = loss_and_gradient(config, batch)
    _, times = loss_and_gradient(config, {**batch, "advantages": factor * batch["advantages"]})
    assert_close(times, factor * once)
    _, none = loss_and_gradient(config, {**batch, "advantages": 0 * batch["advantages"]})
    assert not none.any()


@choices_without(*WITH_A_PENALTY)
@few_examples
@given(SEEDS)
def test_no_token_is_pushed_away_from_its_advantage(choices, seed):
    batch = batch_of(seed)
    _, gradient = loss_and_gradient(config_of(choices), batch)
    assert (gradient * batch["advantages"] <= 0).all()


@every_loss
@pytest.mark.parametrize("drift", [1e4, -1e4, 1e3, -1e3, 90.0, -25.0])
def test_log_ratios_of_ten_thousand_stay_finite(choices, drift):
    estimators = [n for n in KL_ESTIMATORS if n != "k1"]
    if choices[1] != "token":
        estimators = [n for n in estimators if not n.startswith("ratio")]
    for estimator, sign in product(estimators, (1.0, -1.0)):
        config = config_of(choices, beta=0.1, kl_estimator=estimator)
        loss, gradient = loss_and_gradient(config, drifted(drift, sign))
        assert loss.dtype == gradient.dtype == torch.float32
        assert loss.isfinite()
        assert gradient.isfinite().all()


def drifted(drift, sign):
    """One policy far from the old one, and as far from the reference, the other way."""
    return {
        "new": torch.full((2, 3), -1.0),
        "old": torch.full((2, 3), -1.0 - drift),
        "ref": torch.full((2, 3), -1.0 + drift),
        "advantages": torch.full((2, 1), sign),
        "mask": torch.tensor([[True, True, False], [True, False, False]]),
        "groups": torch.tensor([0, 0]),
        "draws": torch.zeros(2, 3),
    }


@pytest.mark.parametrize("loss_fn", ["clip", "dual_clip", "two_sided"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@few_examples
@given(SEEDS)
def test_of_one_advantage_per_row_both_sequence_levels_are_one_loss(loss_fn, aggregation, seed):
    """In value, and in what a row's tokens add up to."""
    batch = batch_of(seed)
    sequence, by_token = (
        loss_and_gradient(config_of((loss_fn, level, aggregation)), batch)
        for level in ("sequence", "sequence_token")
    )
    assert_close(by_token[0], sequence[0])
    assert_close(by_token[1].sum(-1), sequence[1].sum(-1))
