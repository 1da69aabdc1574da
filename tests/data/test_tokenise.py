import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import (
    CHATML,
    DEFAULT_SYSTEM,
    DROPS_THINK,
    OPENS_THINK,
    STRICT,
    WITH_BOS,
    WITH_TOOLS,
    assistant,
    char_level,
    user,
)

from lit_align.data.rows import RowError, read_row
from lit_align.data.tokenise import (
    Dropped,
    Pair,
    PairTokeniser,
    keep_end,
    keep_start,
    split_at_border,
)


def outcome(tokenizer, prompt, chosen, rejected, *, options=None, **columns):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}
    tokenise = PairTokeniser(tokenizer, **(options or {}))
    [result] = tokenise([read_row(row)])
    if isinstance(result, RowError):
        raise result
    return result


def decoded(tokenizer, *row, **how):
    return tuple(map(tokenizer.decode, outcome(tokenizer, *row, **how).ids))


# Plain text


def test_plain_text_begins_once_and_ends_once():
    tokenizer = char_level(bos=True)
    assert decoded(tokenizer, "ab", "c", "dd") == ("<s>ab", "c</s>", "dd</s>")


def test_a_tokenizer_without_a_first_token_gets_none():
    pair = outcome(char_level(bos_token=None), "ab", "c", "d").ids
    assert None not in [*pair.prompt_ids, *pair.chosen_ids]
    assert decoded(char_level(bos_token=None), "ab", "c", "d") == ("ab", "c</s>", "d</s>")


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("ending", ["", "</s>", "</s></s>"])
def test_the_end_token_is_never_doubled(adds_eos, ending):
    tokenizer = char_level(adds_eos=adds_eos)
    assert decoded(tokenizer, "ab", "c" + ending, "d") == ("ab", "c</s>", "d</s>")


def test_a_tokenizer_without_an_end_token_adds_none():
    tokenizer = char_level(eos_token=None, pad_token=None)
    assert decoded(tokenizer, "ab", "c", "d") == ("ab", "c", "d")


def test_a_token_across_the_border_moves_it_left_for_both_answers():
    tokenizer = char_level(merges=[(" ", "$")])
    prompt, chosen, rejected = decoded(tokenizer, "cost: ", "46", "$46")
    assert (prompt, chosen, rejected) == ("cost:", " 46</s>", " $46</s>")


def test_a_token_across_the_border_may_belong_to_either_answer():
    tokenizer = char_level(merges=[(" ", "$")])
    assert decoded(tokenizer, "cost: ", "$46", "46")[0] == "cost:"


def test_an_implicit_prompt_never_ends_inside_a_token():
    tokenizer = char_level(merges=[("c", "a"), ("c", "o")])
    row = read_row({"chosen": "I like cats", "rejected": "I like cows"})
    assert row.prompt == "I like c"
    [kept] = PairTokeniser(tokenizer)([row])
    assert [tokenizer.decode(ids) for ids in kept.ids] == ["I like ", "cats</s>", "cows</s>"]


WORDS = st.text("ab $", max_size=6)
MERGES = [("a", "b"), (" ", "$"), ("ab", "a"), ("b", " ")]
MERGING = {bos: char_level(merges=MERGES, bos=bos) for bos in (False, True)}


@given(WORDS, WORDS.filter(bool), WORDS.filter(bool), st.booleans())
def test_both_answers_are_what_the_tokenizer_makes_of_the_whole_text(prompt, chosen, rejected, bos):
    tokenizer = MERGING[bos]
    result = outcome(tokenizer, prompt, chosen, rejected)
    if isinstance(result, Dropped):
        assert chosen == rejected
        return
    prompt_ids, chosen_ids, rejected_ids = result.ids
    end = tokenizer.eos_token_id
    assert prompt_ids + chosen_ids == [*tokenizer(prompt + chosen).input_ids, end]
    assert prompt_ids + rejected_ids == [*tokenizer(prompt + rejected).input_ids, end]
    assert prompt.startswith(tokenizer.decode(prompt_ids, skip_special_tokens=True))


# Conversations


@pytest.mark.parametrize("bos", [False, True])
def test_a_template_that_writes_the_first_token_does_not_get_a_second(bos):
    """`bos`: whether the tokenizer would put one before each text as well."""
    tokenizer = char_level(WITH_BOS, bos=bos)
    assert decoded(tokenizer, [user("hi")], "a", "b") == (
        "<s>[user]hi</s>[assistant]",
        "a</s>",
        "b</s>",
    )


def test_what_a_template_writes_behind_the_end_token_stays():
    tokenizer = char_level(CHATML, eos_token="<|im_end|>", pad_token="<|im_end|>")
    assert decoded(tokenizer, [user("hi")], "a", "b") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "a<|im_end|>\n",
        "b<|im_end|>\n",
    )


def test_the_default_system_message_is_no_part_of_an_answer():
    prompt, chosen, _ = decoded(char_level(DEFAULT_SYSTEM), [user("hi")], "ok", "no")
    assert prompt.startswith("<|im_start|>system\nBe kind.")
    assert chosen == "ok<|im_end|>\n"


def test_only_the_last_turn_is_an_answer():
    turns = [user("1"), assistant("2"), user("3")]
    row = read_row({"chosen": [*turns, assistant("a")], "rejected": [*turns, assistant("b")]})
    tokenizer = char_level(WITH_BOS)
    [kept] = PairTokeniser(tokenizer)([row])
    assert tokenizer.decode(kept.ids.prompt_ids) == (
        "<s>[user]1</s>[assistant]2</s>[user]3</s>[assistant]"
    )
    assert tokenizer.decode(kept.ids.chosen_ids) == "a</s>"


def test_an_opening_that_the_template_writes_only_for_generation_is_left_out():
    """DeepSeek-R1: the prompt ends with an opened block of reasoning, the full text has none."""
    tokenizer = char_level(OPENS_THINK)
    assert decoded(tokenizer, [user("hi")], "a", "bb") == (
        "[user]hi</s>[assistant]",
        "a</s>",
        "bb</s>",
    )


def test_a_template_that_rewrites_earlier_turns_is_refused():
    turns = [user("1"), assistant("<think>hm</think>2"), user("3")]
    with pytest.raises(RowError, match="does not render the prompt as a prefix"):
        outcome(char_level(DROPS_THINK), turns, "a", "b")


def test_reasoning_in_the_answers_is_kept():
    assert decoded(char_level(DROPS_THINK), [user("1")], "<think>x</think>a", "b")[1:] == (
        "<think>x</think>a</s>",
        "b</s>",
    )


def test_what_the_template_objects_to_is_said():
    with pytest.raises(RowError, match="the chat template refuses it: roles must alternate"):
        outcome(char_level(STRICT), [user("1"), user("2")], "a", "b")


def test_a_row_that_fails_leaves_the_others_in_their_places():
    tokenizer = char_level(STRICT, bos=True)
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": [user("1"), user("2")], "chosen": "a", "rejected": "b"},
        {"prompt": [user("1")], "chosen": "c", "rejected": "d"},
        {"prompt": "q", "chosen": "e", "rejected": "f"},
    ]
    first, second, third, fourth = PairTokeniser(tokenizer)([read_row(row) for row in rows])
    assert isinstance(second, RowError)
    chosen = [tokenizer.decode(kept.ids.chosen_ids) for kept in (first, third, fourth)]
    assert chosen == ["a</s>", "c</s>", "e</s>"]


def test_half_a_surrogate_pair_is_an_error_of_its_row():
    with pytest.raises(RowError, match="surrogate"):
        outcome(char_level(), "p", "\ud83d", "b")


def test_tools_and_calls_reach_the_template():
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt, chosen, _ = decoded(
        char_level(WITH_TOOLS), [user("hi")], [answer], [assistant("b")], tools=[{"name": "f"}]
    )
    assert prompt == 'tools:[{"name": "f"}]\n[user]hi</s>[assistant]'
    assert chosen == '{"name": "f", "arguments": {"x": 1}}</s>'


def test_template_variables_of_a_row_come_before_those_of_all():
    tokenizer = char_level(WITH_TOOLS)
    options = {"chat_template_kwargs": {"date": "all"}}
    row = ([user("hi")], "a", "b")
    assert decoded(tokenizer, *row, options=options)[0].startswith("date:all\n")
    of_row = decoded(tokenizer, *row, options=options, chat_template_kwargs={"date": "row"})
    assert of_row[0].startswith("date:row\n")


# Border and truncation, on ids


def test_border_by_hand():
    # The prompt alone ends in 3; together with the answers a 3 never stands there.
    assert split_at_border([1, 2, 3], [1, 2, 9, 8], [1, 2, 7]) == ([1, 2], [9, 8], [7])
    # The answers agree beyond the prompt: their first common tokens are answers all the same.
    assert split_at_border([1, 2], [1, 2, 5, 8], [1, 2, 5]) == ([1, 2], [5, 8], [5])
    # Only one of them differs from the prompt.
    assert split_at_border([1, 2], [1, 2, 5], [1, 4]) == ([1], [2, 5], [4])


def test_keep_start_by_hand():
    pair = Pair([1, 2, 3], [4, 5], [6, 7, 8])
    assert keep_start(pair, 9) == pair
    assert keep_start(pair, 5) == ([1, 2, 3], [4, 5], [6, 7])
    assert keep_start(pair, 3) == ([1, 2, 3], [], [])


def test_keep_end_by_hand():
    pair = Pair([1, 2, 3], [4, 5], [6, 7, 8])
    assert keep_end(pair, 6) == pair
    # No more than needed: the longer answer leaves room for two of the prompt, for both.
    assert keep_end(pair, 5) == ([2, 3], [4, 5], [6, 7, 8])
    assert keep_end(pair, 3) == ([], [4, 5], [6, 7, 8])
    assert keep_end(pair, 2) == ([], [4, 5], [7, 8])


IDS = st.lists(st.integers(0, 9), max_size=8)


@given(IDS, IDS, IDS, st.integers(2, 12))
def test_truncation_keeps_one_end_and_the_limit(prompt, chosen, rejected, limit):
    pair = Pair(prompt, chosen, rejected)
    start, end = keep_start(pair, limit), keep_end(pair, limit)
    for answer, of_start, of_end in zip(pair[1:], start[1:], end[1:], strict=True):
        whole = prompt + answer
        assert len(end.prompt_ids + of_end) <= limit
        assert whole[len(whole) - len(end.prompt_ids + of_end) :] == end.prompt_ids + of_end
        assert (start.prompt_ids + of_start)[:limit] == whole[:limit]
        assert not answer or of_end


# What is dropped


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        (("abcd", "x", "y"), {"max_length": 4}, "empty after truncation"),
        (("ab", "xyz", "xyw"), {"max_length": 4}, "identical after truncation"),
        (("ab", "xyz", "wyz"), {"max_length": 3, "truncation": "left"}, "identical after"),
    ],
)
def test_rows_that_truncation_leaves_without_a_difference_are_dropped(row, options, reason):
    result = outcome(char_level(), *row, options=options)
    assert isinstance(result, Dropped)
    assert result.reason.startswith(reason)


def test_the_longer_of_both_answers_is_cut_too():
    kept = outcome(char_level(), "ab", "xyz", "xy" * 4, options={"max_length": 5})
    assert kept.truncated
    assert [len(ids) for ids in kept.ids] == [2, 3, 3]


def test_a_single_token_that_nothing_predicts_is_no_answer():
    tokenizer = char_level(eos_token=None, pad_token=None)
    assert outcome(tokenizer, "", "x", "y") == Dropped("empty")
    assert outcome(char_level(eos_token=None, bos=True), "", "x", "y").ids.chosen_ids


def test_no_limit_cuts_nothing():
    kept = outcome(char_level(), "a" * 3000, "x", "y", options={"max_length": None})
    assert not kept.truncated
    assert len(kept.ids.prompt_ids) == 3000


# Identity


def test_the_fingerprint_follows_everything_that_ids_depend_on():
    def fingerprint(tokenizer=None, **options):
        return PairTokeniser(tokenizer or char_level(), **options).fingerprint

    others = [
        fingerprint(char_level(CHATML)),
        fingerprint(char_level(bos=True)),
        fingerprint(char_level(merges=[("a", "b")])),
        fingerprint(char_level(eos_token="<|im_end|>")),
        fingerprint(max_length=7),
        fingerprint(max_length=None),
        fingerprint(truncation="left"),
        fingerprint(chat_template_kwargs={"a": 1}),
    ]
    assert len({fingerprint(), *others}) == 1 + len(others)
    assert fingerprint() == fingerprint()


def test_the_fingerprint_does_not_follow_the_last_use_of_the_tokenizer():
    tokenizer = char_level()
    before = PairTokeniser(tokenizer).fingerprint
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert PairTokeniser(tokenizer).fingerprint == before
