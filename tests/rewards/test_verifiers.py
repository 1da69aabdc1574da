"""The built-in verifiers: by hand, in the forms that models write, and against the papers."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.errors import UserError
from lit_align.rewards import (
    completion_text,
    exact_match,
    format_match,
    length_penalty,
    math_match,
    numeric_match,
    soft_overlong,
)
from lit_align.rewards.numeric import number_in


def assistant(text):
    return [{"role": "assistant", "content": text}]


# Texts.


def test_the_text_of_a_text_and_of_messages():
    assert completion_text("a") == "a"
    assert completion_text(assistant("a")) == "a"
    assert completion_text([*assistant("a"), *assistant("b")]) == "a\nb"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text(assistant(parts)) == "ab"
    assert completion_text(assistant(None)) == ""


def test_exact_match_forgives_white_space_and_nothing_else():
    completions = ["46", " 46\n", "046", "46.", assistant("46"), "47"]
    assert exact_match(completions, answer=["46"] * 6) == [1, 1, 0, 0, 1, 0]


def test_exact_match_reads_numbers_other_columns_and_gaps():
    assert exact_match(["46", "46"], answer=[46, None]) == [1, None]
    assert exact_match(["a"], column="solution", solution=["a"], answer=["b"]) == [1]
    with pytest.raises(UserError, match="no column 'answer': there are solution"):
        exact_match(["a"], prompts=["p"], solution=["a"])


def test_the_format_is_of_the_whole_or_of_a_part():
    texts = ["<a>1</a>", " <a>1</a>\n", "so <a>1</a>", "1", assistant("<a>2</a>")]
    assert format_match(texts, pattern="<a>.</a>") == [1, 1, 0, 0, 1]
    assert format_match(texts, pattern="<a>.</a>", whole=False) == [1, 1, 1, 0, 1]
    with pytest.raises(UserError, match="no regular expression"):
        format_match(texts, pattern="(")


# Numbers.

FORMS = {
    "72": 72,
    "The answer is -5.": -5,
    "10-5": 5,
    "2(3)-4": 4,
    "x=-3": -3,
    "\N{MINUS SIGN}7": -7,
    "$1,234.50 each": Fraction("1234.5"),
    "12,345,678": 12345678,
    "-$5": -5,
    "$-5": -5,
    "$72$": 72,
    "**72**": 72,
    "1{,}234": 1234,
    r"1\,234": 1234,
    "1, 2, 3": 3,
    "1,2,3": 3,
    ".5": Fraction(1, 2),
    "1.5e-3": Fraction("0.0015"),
    "3/4 of a cup": Fraction(3, 4),
    r"\frac{1}{3}": Fraction(1, 3),
    r"-\dfrac{ 1 }{3}": Fraction(-1, 3),
    r"\frac{-3}{4}": Fraction(-3, 4),
    "5 kg": 5,
    "5kg": 5,
    "since version 3.4.5": Fraction("3.4"),
    "H2O": None,
    "1/0": None,
    "": None,
    "9" * 200: None,
    r"2\pi": 2 * Fraction(math.pi),
    "\N{GREEK SMALL LETTER PI}": Fraction(math.pi),
    r"\boxed{18 \text{ dollars}}, that is 3 a day": 18,
    r"\boxed{1} no, \boxed{\frac{2}{3}} 7": Fraction(2, 3),
    r"\boxed{{5}": 5,
    r"\boxed{2x = 10}": 10,
    r"\boxed{B} of 4": None,
    "2 + 2\n#### 1,000\nQ: 3": 1000,
    "#### 1 #### 2": 2,
    "#### none 3": 3,
}


@pytest.mark.parametrize("text", FORMS, ids=lambda text: text[:20])
def test_the_number_of_a_text_by_hand(text):
    number = number_in(text)
    assert (number and number.value) == FORMS[text]


def test_a_number_of_the_data_need_not_be_a_text():
    assert numeric_match(["72", "0.1", "1e22"], answer=[72, 0.1, 1e22]) == [1, 1, 1]
    assert numeric_match(["1", "1", "1"], answer=[None, "none", math.nan]) == [None] * 3


def test_gsm8k_answers_are_read_from_their_solutions():
    answer = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    completions = ["It is 72.", "72 clips, 24 of them in May", assistant(r"\boxed{72} or 3"), "?"]
    assert numeric_match(completions, answer=[answer] * 4) == [1, 0, 1, 0]


def test_a_percentage_is_a_number_and_a_hundredth_but_not_both_at_once():
    given_to_answer = {("50%", "0.5"): 1, ("50%", "50"): 1, ("0.5", r"50\%"): 1, ("50", "50%"): 1}
    given_to_answer |= {("50%", "50 percent"): 1, ("5000%", "50%"): 0, ("0.5%", "50%"): 0}
    for (given_text, answer), right in given_to_answer.items():
        assert numeric_match([given_text], answer=[answer]) == [right], (given_text, answer)


def test_whole_numbers_must_be_right_to_the_last_digit():
    assert numeric_match(["999999999999", "999999999998"], answer=["999999999999"] * 2) == [1, 0]


def test_the_tolerance_is_a_share_of_the_answer():
    assert numeric_match(["101", "102"], answer=[100, 100], tolerance=0.01) == [1, 0]
    assert numeric_match(["0.333333333333333"], answer=["1/3"]) == [1]
    assert numeric_match(["0.3333"], answer=["1/3"]) == [0]
    assert numeric_match(["0.000000001"], answer=["0"]) == [0]


@given(
    st.fractions(-(10**6), 10**6, max_denominator=10**6),
    st.sampled_from(["{}", "= {}.", r"\boxed{{{}}}", "#### {}"]),
)
def test_every_fraction_is_read_back(value, form):
    assert number_in(form.format(value)).value == value
    assert numeric_match([form.format(value)], answer=[str(value)]) == [1]
    assert numeric_match([form.format(value)], answer=[str(value + 1)]) == [0]


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9
    )
)
def test_every_decimal_is_read_back_with_and_without_separators(value):
    assert number_in(f"{value}").value == number_in(f"{value:,}").value == Fraction(value)


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1 ", "1/", r"\boxed{", r"\frac{", "$ ", "-", "1.", "1e"]
)
def test_long_completions_are_read_in_time_that_grows_with_their_length(piece):
    start = time.monotonic()
    number_in(piece * 100_000)
    assert time.monotonic() - start < 2


# Lengths.


def test_soft_overlong_by_hand():
    lengths = {0: 0, 80: 0, 81: -0.05, 90: -0.5, 100: -1, 101: -1}
    scores = soft_overlong([[1] * length for length in lengths], max_length=100, cache=20)
    assert scores == pytest.approx(list(lengths.values()))


@given(st.integers(1, 200), st.integers(1, 200))
def test_soft_overlong_never_rises_with_length(max_length, cache):
    cache = min(cache, max_length)
    scores = soft_overlong(
        [[1] * n for n in range(max_length + 5)], max_length=max_length, cache=cache
    )
    assert scores == sorted(scores, reverse=True)
    assert scores[max_length - cache] == 0
    assert scores[max_length] == -1


def test_length_penalty_by_hand():
    assert length_penalty([[], [1], [1] * 4, [1] * 9], max_length=4) == [0, -0.25, -1, -1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: soft_overlong([[1]], max_length=10, cache=0),
        lambda: soft_overlong([[1]], max_length=10, cache=11),
        lambda: length_penalty([[1]], max_length=0),
    ],
)
def test_lengths_that_make_no_sense_are_refused(call):
    with pytest.raises(UserError, match="must be"):
        call()


# Mathematics.

PAIRS = [
    (r"so it is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1),
    (r"$x + 1$", "1+x", 1),
    (r"$(x+1)^2$", r"x^2 + 2x + 1", 1),
    (r"$x + 2$", "1+x", 0),
    ("It is 1/3.", r"$\frac{1}{3}$", 1),
    (r"$\sqrt{8}$", r"2\sqrt{2}", 1),
    (r"\(2\pi\)", "6.283185307179586", 1),
    ("1,000", "work\n#### 1000", 1),
    ("$2x$", "$3x$ less $x$\n#### 2x", 1),
    (assistant(r"\boxed{5}"), 5, 1),
    ("no idea", "5", 0),
    (r"\boxed{\frac{", "5", 0),
    ("5", None, None),
    ("5", "", None),
]


@pytest.mark.parametrize(("completion", "answer", "score"), PAIRS)
def test_expressions_are_compared_by_what_they_mean(completion, answer, score):
    assert math_match([completion], answer=[answer]) == [score]


def test_a_thread_gets_the_same_scores():
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(math_match, ["$5$", "$6$"], answer=["5", "5"]).result()
    assert found == [1, 0]


def test_what_hangs_in_sympy_scores_0_and_its_neighbours_do_not():
    start = time.monotonic()
    found = math_match(["$5$", "$9^{9^9}$", "$5$"], answer=["5", "1", "5"], seconds=1)
    assert found == [1, 0, 1]
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(("module", "extra"), [("math_verify", "math"), ("reasoning_gym", "gym")])
def test_a_missing_extra_is_named(monkeypatch, module, extra):
    from lit_align.rewards import gym, gym_score

    monkeypatch.setitem(__import__("sys").modules, module, None)
    gym._scorer.cache_clear()
    calls = {
        "math": lambda: math_match(["1"], answer=["1"]),
        "gym": lambda: gym_score(["1"], [{"metadata": {"source_dataset": "leg_counting"}}]),
    }
    with pytest.raises(UserError, match=rf"lit-align\[{extra}\]"):
        calls[extra]()
