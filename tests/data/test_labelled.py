"""What a row of labelled data may look like, and what is said of one that does not."""

import pytest

from lit_align.data.labelled import read_labelled
from lit_align.data.rows import PreferenceRow, RowError

USER = {"role": "user", "content": "2 + 2 ="}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}


def one(**row):
    (found,) = read_labelled(row)
    return found


def test_texts_with_a_label():
    row = one(prompt="2 + 2 =", completion=" 4", label=True)
    assert (row.prompt, row.answers, row.numbers) == ("2 + 2 =", (" 4",), {"label": 1.0})
    assert row.drop_reason is None


@pytest.mark.parametrize(("label", "number"), [(True, 1), (1, 1), (1.0, 1), (False, 0), (0, 0)])
def test_a_label_is_a_truth_or_0_or_1(label, number):
    assert one(prompt="a", completion="b", label=label).numbers["label"] == number


@pytest.mark.parametrize("label", ["true", "1", 2, -1, 0.5, [True], {"a": 1}])
def test_any_other_label_is_refused(label):
    with pytest.raises(RowError, match="field 'label' must be true or 1 for a desirable compl"):
        one(prompt="a", completion="b", label=label)


def test_conversations_with_tools_and_template_variables():
    tools, kwargs = [{"type": "function"}], {"enable_thinking": False}
    row = one(prompt=[USER], completion=[GOOD], label=0, tools=tools, chat_template_kwargs=kwargs)
    assert (row.prompt, row.completion, row.tools) == ([USER], [GOOD], tools)
    assert row.chat_template_kwargs == kwargs


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ([USER], [USER, GOOD]),
        ([USER], "4"),
        ("2 + 2 =", [GOOD]),
        ("2 + 2 =", [USER, GOOD]),
        ("what the first one asked", [USER, GOOD]),
    ],
)
def test_a_completion_may_repeat_the_prompt_or_be_of_the_other_kind(prompt, completion):
    row = one(prompt=prompt, completion=completion, label=1)
    assert (row.prompt, row.completion) == ([USER], [GOOD])


def test_a_text_before_a_longer_conversation_leaves_its_last_answer():
    turns = [USER, BAD, {"role": "user", "content": "sure?"}, GOOD]
    row = one(prompt="2 + 2 =", completion=turns, label=1)
    assert (row.prompt, row.completion) == (turns[:3], [GOOD])


def test_a_pair_is_two_completions():
    good, bad = read_labelled({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "weight": 2})
    assert (good.prompt, good.completion, good.numbers) == (
        *("2 + 2 =", " 4"),
        {"label": 1.0, "weight": 2.0},
    )
    assert (bad.prompt, bad.completion, bad.numbers["label"]) == ("2 + 2 =", " 5", 0.0)


def test_the_prompt_of_a_pair_may_be_what_its_answers_share():
    good, bad = read_labelled({"chosen": [USER, GOOD], "rejected": [USER, BAD]})
    assert (good.prompt, good.completion, bad.completion) == ([USER], [GOOD], [BAD])


def test_a_pair_of_equal_answers_is_left_to_be_dropped():
    (pair,) = read_labelled({"prompt": "a", "chosen": "b", "rejected": "b"})
    assert isinstance(pair, PreferenceRow)
    assert pair.drop_reason == "identical"


def test_one_empty_answer_of_a_pair_does_not_take_the_other_with_it():
    good, bad = read_labelled({"prompt": "a", "chosen": "b", "rejected": ""})
    assert (good.drop_reason, bad.drop_reason) == (None, "empty completion")


def test_nulls_are_as_good_as_nothing():
    """A table that holds rows of both kinds has all columns in each."""
    empty = {"chosen": None, "rejected": None, "weight": None, "margin": None, "tools": None}
    assert one(prompt="a", completion="b", label=1, **empty).numbers == {"label": 1.0}
    assert len(read_labelled({"prompt": "a", "chosen": "b", "rejected": "c", "label": None})) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "an object with 'prompt', 'completion' and 'label', or with 'chosen'"),
        ({"prompt": "a", "completion": "b"}, "field 'label' is missing"),
        ({"completion": "b", "label": 1}, "field 'prompt' is missing"),
        ({"prompt": "a", "label": 1}, "field 'completion' is missing"),
        ({"prompt": "a", "completion": 7, "label": 1}, "'completion' must be a text or a list"),
        ({"prompt": [], "completion": "b", "label": 1}, "field 'prompt' is an empty list"),
        ({"prompt": [USER], "completion": [USER], "label": 1}, "begins with a message of role"),
        ({"prompt": "a", "completion": "b", "label": 1, "tools": [1]}, "need a conversation"),
        ({"prompt": "a", "completion": "b", "label": 1, "weight": -1}, "field 'weight' must be"),
        (
            {"prompt": "a", "completion": "b", "label": 1, "margin": 3},
            r"'margin' says something of a pair.*data.ignore_columns=\[margin\]",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "label_prob": 0.9},
            r"'label_prob' says something of a pair",
        ),
        (
            {"prompt": "a", "completion": [{"role": "system", "content": "b"}], "label": 1},
            "field 'completion': the conversation has no message of role 'user'",
        ),
    ],
)
def test_what_cannot_be_read_is_named(row, message):
    with pytest.raises(RowError, match=message):
        read_labelled(row)


def test_columns_of_pairs_can_be_left_unread():
    row = {"prompt": "a", "completion": "b", "label": 1, "margin": 3, "weight": 2}
    (found,) = read_labelled(row, {"margin", "weight"})
    assert found.numbers == {"label": 1.0}
