"""How a rollout is cut: any sizes work, and nothing is lost or counted twice."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_samples import sample

from lit_align.errors import UserError
from lit_align.logprobs import Item, Ways, tokens_of
from lit_align.rollout import RolloutPlan
from lit_align.rollout.plan import PADDED, cut, steps_of

SIZES = st.builds(
    RolloutPlan,
    prompts_per_step=st.integers(1, 9),
    num_generations=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    steps_per_rollout=st.integers(1, 4),
    num_iterations=st.integers(1, 3),
)


def groups_of(plan, count):
    """So many groups, with completions of unequal lengths."""
    return [
        [
            sample(g, n, completion=[0] * (1 + (5 * g + 3 * n) % 7))
            for n in range(plan.num_generations)
        ]
        for g in range(count)
    ]


def names(samples):
    return sorted((one.group, one.number) for one in samples)


@given(SIZES, st.integers(1, 4), st.integers(0, 3), st.data())
def test_every_sample_is_in_one_micro_batch_of_one_rank_and_none_is_too_large(
    sizes, replicas, spare, data
):
    accumulate = data.draw(st.sampled_from([None, sizes.on(replicas, None).micro_batches + spare]))
    plan = sizes.on(replicas, accumulate)
    # As many groups as were asked for, or fewer: filtered, or at the end of the data.
    groups = groups_of(plan, data.draw(st.integers(1, plan.prompts)))
    steps = steps_of(groups, plan, seed=data.draw(st.integers(0, 9)))
    assert len(steps) == plan.steps_per_rollout
    assert names(chain(*steps)) == names(chain(*groups))
    for step in steps:
        window = cut(step, plan)
        assert len(window) == plan.micro_batches
        assert all(len(shares) == replicas for shares in window)
        shares = [share for shares in window for share in shares]
        assert all(len(share) <= plan.batch_size for share in shares)
        assert names(chain(*shares)) == names(step)


@given(SIZES, st.data())
def test_a_step_holds_whole_groups_and_as_many_as_any_other(plan, data):
    groups = groups_of(plan, data.draw(st.integers(1, plan.prompts)))
    steps = steps_of(groups, plan, seed=data.draw(st.integers(0, 9)))
    whole = {group[0].group: names(group) for group in groups}
    per_step = [{one.group for one in step} for step in steps]
    for step, held in zip(steps, per_step, strict=True):
        assert names(step) == sorted(chain(*(whole[group] for group in held)))
    counts = [len(held) for held in per_step]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == len(groups)


def test_one_step_keeps_the_order_and_several_are_dealt_anew_with_each_seed():
    plan = RolloutPlan(4, 1, 4)
    groups = groups_of(plan, 4)
    assert [[one.group for one in step] for step in steps_of(groups, plan, 1)] == [[0, 1, 2, 3]]
    several = RolloutPlan(4, 1, 4, steps_per_rollout=3)
    groups = groups_of(several, 12)
    deals = [[[one.group for one in s] for s in steps_of(groups, several, n)] for n in (0, 0, 1)]
    assert deals[0] == deals[1] != deals[2]


def test_samples_of_like_length_share_a_micro_batch_the_longest_first():
    lengths = [3, 9, 1, 8, 2, 10, 7]
    step = [sample(n, completion=[0] * length) for n, length in enumerate(lengths)]
    window = cut(step, RolloutPlan(8, 1, 2, replicas=2))
    found = [[[len(one.completion_ids) for one in share] for share in shares] for shares in window]
    # At most two each; the longest stands alone, for one of eight is free.
    assert found == [[[10], [9, 8]], [[7, 3], [2, 1]]]


SHARED = Ways(packs=True, shares=True, chooses=True)


def tokens(share, ways):
    """That a rank runs of a micro-batch."""
    items = [Item(one.group, len(one.prompt_ids), (len(one.completion_ids),)) for one in share]
    return tokens_of(items, ways)


@given(
    SIZES,
    st.integers(1, 3),
    st.sampled_from([PADDED, SHARED, SHARED._replace(shares=False)]),
    st.integers(60, 400),
    st.data(),
)
def test_no_micro_batch_runs_more_than_it_may_whatever_the_completions(
    sizes, replicas, ways, most_tokens, data
):
    """Prompts of up to 30 tokens and completions of up to 20: 50 fit."""
    limits = {"ways": ways, "most_tokens": most_tokens, "longest": (30, 20)}
    plan = replace(sizes, **limits).on(replicas, None)
    lengths = st.integers(1, 20)
    samples = [
        sample(g, n, prompt=[0] * (30 - 7 * g % 25), completion=[0] * data.draw(lengths))
        for g in range(data.draw(st.integers(1, plan.prompts_per_step)))
        for n in range(plan.num_generations)
    ]
    shares = [share for shares in cut(samples, plan) for share in shares]
    assert len(shares) == plan.micro_batches * replicas
    assert names(chain(*shares)) == names(samples)
    assert all(tokens(share, ways) <= most_tokens for share in shares if share)


def test_completions_of_a_prompt_stay_together_where_it_is_run_once():
    """Three groups of four, two micro-batches on two ranks: each border runs a prompt again."""
    samples = [
        sample(g, n, prompt=[0] * 40, completion=[0] * (1 + (5 * g + 3 * n) % 7))
        for g in range(3)
        for n in range(4)
    ]
    plan = RolloutPlan(3, 4, 3).on(2, None)
    runs = []
    for ways in (SHARED, PADDED):
        shares = chain(*cut(samples, replace(plan, ways=ways)))
        runs.append(sum(len({one.group for one in share}) for share in shares))
    assert runs[0] <= 3 + 3 < runs[1]


def test_the_numbers_of_a_plan_by_tokens():
    """4 x 2 completions of 20 tokens for prompts of 30; none runs its last: 30 + 2 x 19 = 68."""
    plan = RolloutPlan(4, 2, 1, ways=SHARED, most_tokens=136, longest=(30, 20))
    assert [plan.on(ranks, None).micro_batches for ranks in (1, 2, 3)] == [2, 1, 1]
    assert replace(plan, most_tokens=135).micro_batches == 3
    assert replace(plan, most_tokens=1).micro_batches == 8
    assert replace(plan, ways=PADDED).micro_batches == 4
    assert "in 2 micro-batches x 1 ranks of at most 136 tokens; a rollout" in plan.describe()
    with pytest.raises(
        UserError, match=r"needs 2 micro-batches of 136 tokens.*or raise data.max_tokens_per_batch"
    ):
        plan.on(1, 1)


def test_the_numbers_of_a_plan():
    """6 prompts x 4 completions, 5 at a time on each of 2 ranks: 24 / 10, so 3 micro-batches."""
    plan = RolloutPlan(6, 4, 5, steps_per_rollout=2, num_iterations=3).on(2, None)
    assert (plan.micro_batches, plan.steps, plan.batches, plan.prompts) == (3, 6, 18, 12)
    assert plan.on(2, 4).batches == 24
    assert plan.describe() == (
        "6 prompts x 4 completions a step, in 3 micro-batches x 2 ranks of at most 5; a rollout "
        "of 12 prompts makes 6 of them (steps_per_rollout 2 x num_iterations 3)"
    )


def test_too_few_micro_batches_are_refused_with_the_remedy():
    with pytest.raises(
        UserError,
        match=r"6 prompts x 4 completions needs 3 micro-batches of 5 on 2 rank\(s\).*"
        r"accumulate_grad_batches is 2: leave it at 1.*raise it, or raise data.batch_size",
    ):
        RolloutPlan(6, 4, 5).on(2, 2)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "8"])
@pytest.mark.parametrize(
    "name",
    ["prompts_per_step", "num_generations", "batch_size", "steps_per_rollout", "num_iterations"],
)
def test_sizes_are_whole_numbers(name, value):
    sizes = {"prompts_per_step": 2, "num_generations": 2, "batch_size": 2, name: value}
    with pytest.raises(UserError, match=rf"data.{name} must be a whole number of at least 1"):
        RolloutPlan(**sizes)
