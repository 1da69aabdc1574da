import math

import pytest
from small_tokenizers import assistant, user

from lit_align.data.rows import RowError, read_row


def parts(row):
    pair = read_row(row)
    return pair.prompt, pair.chosen, pair.rejected


def test_explicit_prompt_as_text():
    assert parts({"prompt": "2+2=", "chosen": "4", "rejected": "5"}) == ("2+2=", "4", "5")


def test_explicit_prompt_as_conversation():
    row = {"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    assert parts(row) == ([user("hi")], [assistant("a")], [assistant("b")])


def test_a_text_answers_a_conversation_as_one_message_of_the_assistant():
    row = {"prompt": [user("hi")], "chosen": "a", "rejected": "b"}
    assert parts(row) == ([user("hi")], [assistant("a")], [assistant("b")])


def test_a_text_asks_for_answers_that_are_messages():
    row = {"prompt": "hi", "chosen": [assistant("a")], "rejected": [assistant("b")]}
    assert parts(row) == ([user("hi")], [assistant("a")], [assistant("b")])


def test_conversations_that_repeat_the_prompt_given_as_text():
    """UltraFeedback: `prompt` is a text, the answers are whole conversations."""
    row = {
        "prompt": "hi",
        "chosen": [user("hi"), assistant("a")],
        "rejected": [user("hi"), assistant("b")],
    }
    assert parts(row) == ([user("hi")], [assistant("a")], [assistant("b")])


def test_conversations_that_repeat_the_prompt_given_as_messages():
    row = {
        "prompt": [user("hi")],
        "chosen": [user("hi"), assistant("a")],
        "rejected": [user("hi"), assistant("b")],
    }
    assert parts(row) == ([user("hi")], [assistant("a")], [assistant("b")])


def test_all_turns_up_to_the_last_are_the_prompt():
    turns = [user("1"), assistant("2"), user("3")]
    row = {"chosen": [*turns, assistant("a")], "rejected": [*turns, assistant("b")]}
    assert parts(row) == (turns, [assistant("a")], [assistant("b")])


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "dropped"),
    [
        ("Q: hi A: yes", "Q: hi A: no", "Q: hi A: ", None),
        ("The sky is blue", "The sky is blue and vast", "The sky is blue", "empty chosen"),
        ("The sky is blue and vast", "The sky is blue", "The sky is blue", "empty rejected"),
        ("same", "same", "same", "identical"),
        ("a ", "b ", "", None),
        ("", "x", "", "empty chosen"),
    ],
)
def test_implicit_prompt_is_the_common_beginning(chosen, rejected, prompt, dropped):
    pair = read_row({"chosen": chosen, "rejected": rejected})
    assert pair.prompt == prompt
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)
    assert pair.drop_reason == dropped


@pytest.mark.parametrize("absent", [None, math.nan])
def test_an_absent_prompt_is_an_implicit_one(absent):
    row = {"prompt": absent, "tools": absent, "chat_template_kwargs": absent}
    pair = read_row({**row, "chosen": "ab", "rejected": "ac"})
    assert (pair.prompt, pair.tools, pair.chat_template_kwargs) == ("a", None, {})


def test_answers_without_words_are_empty():
    row = {"prompt": [user("hi")], "chosen": [assistant("")], "rejected": [assistant("b")]}
    assert read_row(row).drop_reason == "empty chosen"


def test_an_answer_that_calls_a_function_needs_no_words():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    row = {"prompt": [user("hi")], "chosen": [answer], "rejected": [assistant("b")]}
    pair = read_row(row)
    assert pair.drop_reason is None
    [message] = pair.chosen
    assert message["content"] == ""
    assert "name" not in message
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_a_call_that_is_no_json_is_an_ordinary_answer():
    call = {"function": {"name": "f", "arguments": "{bad"}}
    answer = {"role": "assistant", "tool_calls": [call]}
    row = {"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": [answer]}
    assert read_row(row).rejected[0]["tool_calls"][0]["function"]["arguments"] == "{bad"


def test_nulls_that_arrow_puts_into_messages_do_not_count():
    plain = [user("hi"), assistant("a")], [user("hi"), assistant("b")]
    filled = [[{**message, "tool_calls": None} for message in turns] for turns in plain]
    assert read_row(dict(zip(("chosen", "rejected"), filled, strict=True))) == read_row(
        dict(zip(("chosen", "rejected"), plain, strict=True))
    )


def test_tools_and_template_variables_may_be_json_text():
    row = {"prompt": [user("hi")], "chosen": "a", "rejected": "b"}
    tools = [{"name": "f", "parameters": {"x": {"type": "int", "default": None}}}]
    pair = read_row({**row, "tools": tools, "chat_template_kwargs": {"date": "today", "n": None}})
    assert pair.tools == [{"name": "f", "parameters": {"x": {"type": "int"}}}]
    assert pair.chat_template_kwargs == {"date": "today"}
    text = read_row({**row, "tools": '[{"name": "f"}]', "chat_template_kwargs": '{"n": 1}'})
    assert (text.tools, text.chat_template_kwargs) == ([{"name": "f"}], {"n": 1})


def test_other_columns_do_not_matter():
    row = {"chosen": "ab", "rejected": "ac", "index": 7, "label": [], "prompt_ids": None}
    assert read_row(row) == read_row({"chosen": "ab", "rejected": "ac"})


TURNS = {"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a", "b"], "must be an object.*not a list"),
        ({"prompt": "p", "response": "r"}, r"'chosen' is missing \(the row has: prompt, response"),
        ({"chosen": "a"}, "'rejected' is missing"),
        ({"chosen": "a", "rejected": None}, "'rejected' is missing"),
        ({"chosen": "a", "rejected": 5}, "'rejected' must be a text or a list .*not int 5"),
        ({"chosen": "a", "rejected": [assistant("b")]}, "one of .* is a text and the other"),
        ({**TURNS, "prompt": {"role": "user"}}, "'prompt' must be .* not an object"),
        ({**TURNS, "prompt": []}, "'prompt' is an empty list"),
        ({**TURNS, "prompt": ["hi"]}, "'prompt', message 1 must be an object"),
        (
            {**TURNS, "chosen": [{"from": "gpt", "value": "a"}]},
            r"'chosen', message 1: 'role' is missing \(it has: from, value\)",
        ),
        (
            {**TURNS, "rejected": [assistant("b"), {"role": "gpt", "content": "c"}]},
            "'rejected', message 2: unknown role 'gpt'.*assistant",
        ),
        ({**TURNS, "chosen": [{"role": "assistant"}]}, "'content' must be a text, not null"),
        ({**TURNS, "chosen": [assistant(7)]}, "message 1: 'content' must be a text, not int 7"),
        ({**TURNS, "chosen": [user("a")]}, "'chosen': the answer begins .* role 'user'"),
        ({"chosen": "ab", "rejected": "ac", "tools": [{}]}, "need a conversation, not plain texts"),
        ({**TURNS, "tools": "not json"}, "'tools' must be a list"),
        ({**TURNS, "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
        (
            {"chosen": [assistant("a")], "rejected": [assistant("b")]},
            "share no first message, so there is no prompt",
        ),
    ],
)
def test_what_is_wrong_is_said(row, message):
    with pytest.raises(RowError, match=message):
        read_row(row)


def test_a_prompt_under_another_name_is_not_left_out_in_silence():
    row = {"question": "2 + 2 =", "chosen": "The sum is 4", "rejected": "The sum is 5"}
    with pytest.raises(RowError, match="no 'prompt', but 'question'"):
        read_row(row)
    assert read_row(row | {"prompt": "2 + 2 ="}).prompt == "2 + 2 ="


def test_a_row_cannot_change_how_it_is_rendered():
    with pytest.raises(RowError, match="cannot set 'tokenize'"):
        read_row(
            {
                "prompt": [{"role": "user", "content": "2 + 2 ="}],
                "chosen": [{"role": "assistant", "content": "4"}],
                "rejected": [{"role": "assistant", "content": "5"}],
                "chat_template_kwargs": {"tokenize": True},
            }
        )
