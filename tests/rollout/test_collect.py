"""From prompts to scored completions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_samples import drawn, rewarded, sample

from lit_align.data.prompts import Prompt
from lit_align.rewards import RewardSuite, in_process
from lit_align.rollout import (
    Completer,
    Completion,
    Drawn,
    Sampling,
    collect,
    is_informative,
    sample_seed,
)
from lit_align.rollout.collect import give_rewards, share


def places(tasks):
    return [(one.group, number) for one, numbers in tasks for number in numbers]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 8))
def test_the_shares_of_the_ranks_are_the_groups_in_their_order_and_alike_in_size(
    count, num_generations, replicas
):
    shares = [
        places(share(drawn(range(count)), range(num_generations), rank, replicas))
        for rank in range(replicas)
    ]
    everything = [place for mine in shares for place in mine]
    assert everything == [(g, n) for g in range(count) for n in range(num_generations)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_group_may_be_divided_between_ranks():
    """Three prompts with two completions each on two ranks: the one in the middle is divided."""
    a, b, c = drawn("abc")
    assert share([a, b, c], range(2), 0, 2) == [(a, [0, 1]), (b, [0])]
    assert share([a, b, c], range(2), 1, 2) == [(b, [1]), (c, [0, 1])]


class Ranked:
    """A completer without a policy."""

    def write(self, tasks):
        return [sample(group, number) for group, number in places(tasks)]

    def judge(self, samples, drawn):
        self.judged = list(samples)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_every_rank_ends_with_all_completions_group_by_group(count, num_generations, replicas):
    """And every group has been judged as a whole, by one rank."""
    prompts = drawn(range(count))
    by_rank = [Ranked() for _ in range(replicas)]
    written = [
        ranked.write(share(prompts, range(num_generations), rank, replicas))
        for rank, ranked in enumerate(by_rank)
    ]
    everything = [one for samples in written for one in samples]
    judged = [
        [one for one in everything if one.group % replicas == rank] for rank in range(replicas)
    ]
    options = {"numbers": range(num_generations), "replicas": replicas}
    for rank, ranked in enumerate(by_rank):
        answers = iter([written, judged])

        def gather(mine, rank=rank, answers=answers):
            everywhere = next(answers)
            assert mine == everywhere[rank]
            return everywhere

        found = collect(ranked, gather, prompts, rank=rank, **options)
        assert ranked.judged == judged[rank]
        assert [[(one.group, one.number) for one in group] for group in found] == [
            [(g, n) for n in range(num_generations)] for g in range(count)
        ]


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [
        ([1.0, 0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        # Their standard deviation is not 0, and no information either.
        ([0.1 + 0.2, 0.3], False),
        ([0.5, 0.5 + 1e-6], True),
        ([1.0], False),
        ([], False),
        ([math.nan, math.nan], False),
        ([math.nan, 1.0], False),
        ([math.nan, 1.0, 1.0], False),
        ([1.0, math.nan, 0.0], True),
        ([-1.0, -3.0], True),
    ],
)
def test_a_group_teaches_something_if_rewards_in_it_differ(rewards, teaches):
    assert is_informative(rewarded(0, rewards)) is teaches


@in_process
def seen(prompts, completions, completion_ids, answer):
    """1 for a right answer, None where none is known; and it must be given what TRL gives."""
    assert all(isinstance(ids, list) for ids in completion_ids)
    texts = [
        one if isinstance(one, str) else one[0]["content"]
        for one in completions
        if isinstance(one, str) or (one[0]["role"] == "assistant" and len(one) == 1)
    ]
    return [
        None if right is None else float(text == right)
        for text, right in zip(texts, answer, strict=True)
    ]


@in_process
def shortness(completion_ids):
    return [-float(len(ids)) for ids in completion_ids]


@pytest.fixture
def suite():
    return RewardSuite({"right": seen, "shortness": shortness}, weights={"shortness": 0.5})


def test_rewards_are_given_by_name_and_in_sum(suite):
    samples = [sample(0, 0, completion=[5, 6]), sample(0, 1, completion=[7])]
    for one, text in zip(samples, ("four", "4"), strict=True):
        one.prompt, one.completion = "2+2=", text
    give_rewards(suite, samples, [{"answer": "4", "other": n} for n in range(2)])
    assert [one.rewards for one in samples] == [
        {"right": 0.0, "shortness": -2.0},
        {"right": 1.0, "shortness": -1.0},
    ]
    assert [one.reward for one in samples] == [-1.0, 0.5]


def test_what_no_reward_applies_to_has_none():
    samples = [sample(0, 0), sample(0, 1)]
    for one in samples:
        one.prompt = "?"
    give_rewards(RewardSuite({"right": seen}), samples, [{"answer": None}, {"answer": ""}])
    assert math.isnan(samples[0].reward)
    assert samples[0].rewards == {"right": None}
    assert samples[1].reward == 1.0


def test_nothing_is_asked_about_nothing(suite):
    give_rewards(suite, [], [])


def test_conversations_are_judged_as_messages(suite):
    one = sample(0)
    one.prompt, one.completion = [{"role": "user", "content": "2+2="}], "4"
    give_rewards(suite, [one], [{"answer": "4"}])
    assert one.rewards["right"] == 1.0


class Echo:
    """An engine that says the prompt backwards, the number of the completion and the seed."""

    version = 3
    in_process = True

    def generate(self, requests, sampling):
        self.requests, self.sampling = requests, sampling
        return [
            [
                Completion(
                    [*reversed(one.prompt_ids), n], [-1.0] * (len(one.prompt_ids) + 1), "stop"
                )
                for n in one.samples
            ]
            for one in requests
        ]


class Letters:
    """Writes token 0 as "a", and leaves out what is special: 25."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(97 + token) for token in token_ids if token != 25)


def completer(engine, suite):
    return Completer(engine, suite, Letters(), Sampling(max_new_tokens=4), run_seed=9, version=3)


def test_completions_come_prompt_by_prompt_with_all_that_is_known_of_them(suite):
    engine = Echo()
    tasks = [
        (Drawn(40, 2, Prompt(8, "bc", [1, 2], {"answer": "cbb"})), [1]),
        (Drawn(41, 2, Prompt(9, "z?", [25], {"answer": "a"})), [0, 1]),
    ]
    writer = completer(engine, suite)
    samples = writer.write(tasks)
    writer.judge(samples, [one for one, _ in tasks])
    assert [(one.group, one.row, one.number) for one in samples] == [
        (40, 8, 1),
        (41, 9, 0),
        (41, 9, 1),
    ]
    assert [one.completion for one in samples] == ["cbb", "a", "b"]
    assert [one.completion_ids for one in samples] == [[2, 1, 1], [25, 0], [25, 1]]
    assert [one.rewards["right"] for one in samples] == [1.0, 1.0, 0.0]
    assert samples[0].sampler_logprobs == [-1.0] * 3
    assert [one.prompt for one in samples] == ["bc", "z?", "z?"]
    # What differs between two completions is their own seed, and nothing that another rank knows.
    assert [one.seeds for one in engine.requests] == [
        [sample_seed(9, 8, 2, 1, 3)],
        [sample_seed(9, 9, 2, n, 3) for n in (0, 1)],
    ]


def test_a_rank_without_a_share_asks_its_engine_all_the_same(suite):
    """Weights that are sharded are gathered by all ranks together."""
    engine = Echo()
    assert completer(engine, suite).write([]) == []
    assert engine.requests == []


def test_a_writer_leaves_random_numbers_alone(suite):
    state = torch.get_rng_state()
    completer(Echo(), suite).write([(Drawn(0, 0, Prompt(0, "b", [1], {"answer": ""})), [0])])
    assert torch.equal(torch.get_rng_state(), state)
