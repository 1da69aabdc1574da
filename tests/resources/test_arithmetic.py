import random

import pytest

from lit_align.resources.arithmetic import Sum, held_out_sums, training_sums

SEEDS = [0, 1, 7]


def test_a_sum_reads_as_a_question_and_its_answer():
    assert Sum(12, 34).prompt == "12 + 34 ="
    assert Sum(12, 34).answer == "46"
    assert Sum(0, 0).answer == "0"
    assert Sum(99, 99).answer == "198"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sum_is_in_exactly_one_part(seed):
    parts = training_sums(seed) + held_out_sums(seed)
    assert sorted(parts) == [(a, b) for a in range(100) for b in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_held_out_sum_is_a_training_sum_read_backwards(seed):
    assert not {Sum(q.b, q.a) for q in held_out_sums(seed)} & set(training_sums(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_about_a_tenth_is_held_out(seed):
    # 505 of the 5,050 unordered pairs; two sums each, but one where a == b.
    assert 2 * 505 - 100 <= len(held_out_sums(seed)) <= 2 * 505


def test_the_default_split_is_the_one_that_the_bundled_model_saw():
    # From this file's first run: another split would let the bundled model's training sums in.
    assert len(held_out_sums()) == 1001
    assert held_out_sums()[:3] == [(0, 13), (0, 22), (0, 25)]


def test_another_seed_is_another_split():
    assert held_out_sums(0) != held_out_sums(1)


def test_the_split_leaves_the_global_random_state_alone():
    random.seed(3)
    before = random.getstate()
    held_out_sums()
    assert random.getstate() == before
