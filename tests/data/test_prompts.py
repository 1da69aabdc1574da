import json
import logging
import subprocess
import sys
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from small_tokenizers import (
    CHATML,
    OPENS_THINK,
    STRICT,
    WITH_BOS,
    WITH_TOOLS,
    assistant,
    char_level,
    user,
)

from lit_align.data.prompts import PromptFormat, PromptRows, open_prompts
from lit_align.errors import UserError
from lit_align.policies import PolicyRecipe

SUMS = [
    {"prompt": "1+1=", "answer": "2", "level": 1, "tags": ["easy", "sum"]},
    {"prompt": "2+2=", "answer": "4", "level": 2, "tags": []},
]


def write(rows, folder, name="rows.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def opened(tmp_path):
    """Rows through a file to prompts."""

    def to_prompts(rows, tokenizer=None, *, max_rows=None, **how):
        path = write(rows, tmp_path)
        return open_prompts(path, tokenizer or char_level(), PromptFormat(**how), max_rows=max_rows)

    return to_prompts


def text(tokenizer, prompt):
    return tokenizer.decode(prompt.ids)


# --- what the policy reads


def test_a_text_without_a_template_is_read_as_it_is(opened):
    tokenizer = char_level()
    first, second = opened(SUMS, tokenizer)
    assert (first.prompt, text(tokenizer, first)) == ("1+1=", "1+1=")
    assert (second.row, second.prompt) == (1, "2+2=")


def test_a_text_with_a_template_is_what_a_user_says(opened):
    tokenizer = char_level(CHATML)
    prompt = opened(SUMS, tokenizer)[0]
    assert prompt.prompt == [user("1+1=")]
    # By hand: the user's turn, and the words that open the answer.
    assert text(tokenizer, prompt) == ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_stays_a_text_if_told_to(opened):
    tokenizer = char_level(CHATML)
    prompt = opened(SUMS, tokenizer, as_chat=False)[0]
    assert (prompt.prompt, text(tokenizer, prompt)) == ("1+1=", "1+1=")


def test_messages_are_a_conversation_whatever_texts_are(opened):
    tokenizer = char_level(CHATML)
    turns = [user("hi"), assistant("yes?"), user("1+1=")]
    prompt = opened([{"prompt": turns}], tokenizer, as_chat=False)[0]
    assert prompt.prompt == turns
    assert text(tokenizer, prompt).endswith("user\n1+1=<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_writes_the_first_token_itself(opened):
    prompt = opened(SUMS, char_level(WITH_BOS, bos=True))[0]
    assert prompt.ids.count(1) == 1


@pytest.mark.parametrize("end", ["", "</s>"])
def test_a_text_gets_the_token_before_it_and_none_behind(opened, end):
    tokenizer = char_level(bos=True, adds_eos=True)
    prompt = opened([{"prompt": f"1={end}"}], tokenizer)[0]
    assert text(tokenizer, prompt) == f"<s>1={end}"


def test_words_that_open_the_answer_belong_to_the_prompt(opened):
    tokenizer = char_level(OPENS_THINK)
    assert text(tokenizer, opened(SUMS, tokenizer)[0]).endswith("[assistant]<think>\n")


def test_a_system_prompt_comes_first_unless_the_row_has_its_own(opened):
    own = [{"role": "system", "content": "Be curt."}, user("1+1=")]
    rows = [{"prompt": "1+1="}, {"prompt": [user("1+1=")]}, {"prompt": own}]
    prompts = opened(rows, char_level(CHATML), system_prompt="Be kind.")
    kind = [{"role": "system", "content": "Be kind."}, user("1+1=")]
    assert [prompt.prompt for prompt in prompts] == [kind, kind, own]


def test_tools_and_variables_reach_the_template_and_no_reward(opened):
    tokenizer = char_level(WITH_TOOLS)
    row = {"prompt": "hi", "tools": [{"name": "f"}], "chat_template_kwargs": {"date": "row"}}
    rows = [row, {"prompt": "hi"}]
    of_row, of_all = opened(rows, tokenizer, chat_template_kwargs={"date": "all"})
    assert text(tokenizer, of_row).startswith('tools:[{"name": "f"}]\ndate:row\n')
    assert text(tokenizer, of_all).startswith("date:all\n[user]")
    assert of_row.columns == {}


def test_the_prompt_may_stand_in_another_column(opened):
    rows = [{"question": "1+1=", "prompt": "not this", "answer": "2"}]
    prompt = opened(rows, prompt_column="question")[0]
    assert prompt.prompt == "1+1="
    assert prompt.columns == {"prompt": "not this", "answer": "2"}


# --- columns


def test_every_other_column_is_kept_with_its_type(opened):
    assert opened(SUMS)[0].columns == {"answer": "2", "level": 1, "tags": ["easy", "sum"]}


def test_a_column_that_some_rows_lack_is_null_there(opened):
    rows = [{"prompt": "a", "answer": "2"}, {"prompt": "b", "level": 1}]
    assert [prompt.columns for prompt in opened(rows)] == [
        {"answer": "2", "level": None},
        {"answer": None, "level": 1},
    ]


def as_parquet(rows, folder):
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_json(rows, folder):
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def as_arrow(rows, folder):
    Dataset.from_list(rows).save_to_disk(folder / "rows")
    return folder / "rows"


@pytest.mark.parametrize("stored", [write, as_parquet, as_json, as_arrow])
def test_every_format_gives_the_same_prompts(stored, tmp_path, opened):
    prompts = open_prompts(stored(SUMS, tmp_path), char_level())
    assert list(prompts) == list(opened(SUMS))


def test_values_of_tables_become_values_of_json(tmp_path):
    row = {"prompt": "a", "day": date(2024, 2, 3), "score": float("nan"), "at": [1.5, None]}
    prompt = open_prompts(as_parquet([row], tmp_path), char_level())[0]
    assert prompt.columns == {"day": "2024-02-03", "score": None, "at": [1.5, None]}


def test_a_value_that_json_has_no_type_for_is_refused(tmp_path):
    path = as_parquet([{"prompt": "a", "picture": b"\x89PNG"}], tmp_path)
    with pytest.raises(UserError, match=r"rows.parquet, row 1: field 'picture' holds bytes"):
        open_prompts(path, char_level())


def test_a_split_of_a_folder_by_name(tmp_path):
    parts = {"train": Dataset.from_list(SUMS), "test": Dataset.from_list(SUMS[1:])}
    DatasetDict(parts).save_to_disk(tmp_path / "d")
    prompts = open_prompts(tmp_path / "d", char_level(), split="test")
    assert [prompt.prompt for prompt in prompts] == ["2+2="]


def test_a_table_without_the_column_is_told_by_name(tmp_path):
    with pytest.raises(UserError, match=r"rows.parquet has no column 'question' .*prompt, answer"):
        open_prompts(
            as_parquet(SUMS, tmp_path), char_level(), PromptFormat(prompt_column="question")
        )


# --- what is left out


def test_long_prompts_are_dropped_whole_and_told(opened, caplog):
    rows = [{"prompt": "x" * length} for length in (3, 5, 4, 6)]
    with caplog.at_level(logging.INFO):
        prompts = opened(rows, max_prompt_length=4)
    assert [(prompt.row, len(prompt.ids)) for prompt in prompts] == [(0, 3), (2, 4)]
    assert caplog.messages == [
        "rows.jsonl: 2 prompts of 4 rows, plain texts; dropped 2 longer than 4 tokens; "
        "tokens median 3.5, max 4"
    ]


def test_no_limit_drops_nothing(opened):
    assert len(opened([{"prompt": "x" * 3000}], max_prompt_length=None)[0].ids) == 3000


def test_empty_prompts_are_dropped(opened):
    assert [prompt.row for prompt in opened([{"prompt": ""}, {"prompt": "a"}])] == [1]


def test_only_so_many_prompts_are_kept_and_no_row_behind_them_read(opened):
    rows = [{"prompt": "xxxxx"}, *SUMS, {"prompt": 7}]
    assert [prompt.row for prompt in opened(rows, max_prompt_length=4, max_rows=2)] == [1, 2]


BAD = {
    "no object": ([1], "a row must be an object with 'prompt', not a list"),
    "missing": ({"question": "a"}, "field 'prompt' is missing .*question.*data.prompt_column"),
    "null": ({"prompt": None}, "field 'prompt' is missing"),
    "number": ({"prompt": 7}, "field 'prompt' must be a text or a list of messages, not int 7"),
    "role": ({"prompt": [{"content": "a"}]}, "field 'prompt', message 1: 'role' is missing"),
    "no message": ({"prompt": []}, "field 'prompt' is an empty list"),
    "answered": ({"prompt": [user("a"), assistant("b")]}, "ends with a message of the assistant"),
    "taken": ({"prompt": "a", "completions": 1}, "field 'completions' has the name of an argument"),
    "tools": ({"prompt": "a", "tools": [{"name": "f"}]}, "'tools' .* need a conversation"),
    "surrogate": ({"prompt": "\ud800"}, "surrogate"),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named_with_line_field_and_remedy(row, message, opened):
    with pytest.raises(UserError, match=rf"^rows.jsonl, line 2: .*{message}.*on_bad_row=skip"):
        opened([SUMS[0], row])


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_bad_rows_can_be_skipped_and_are_counted(row, message, opened, caplog):
    with caplog.at_level(logging.INFO):
        prompts = opened([row, *SUMS], on_bad_row="skip")
    assert [prompt.row for prompt in prompts] == [1, 2]
    assert "skipped 1 bad (first: line 1: " in caplog.text


def test_a_line_that_is_no_json_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"')
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: it is not JSON"):
        open_prompts(path, char_level())


def test_a_row_that_the_template_refuses_is_a_bad_row(opened):
    with pytest.raises(UserError, match=r"line 1: the chat template refuses it: .*alternate"):
        opened([{"prompt": [user("a"), user("b")]}], char_level(STRICT))


@pytest.mark.parametrize("rows", [[], [{"prompt": ""}], [{"prompt": "xxxxxxxxx"}]])
def test_data_without_a_prompt_is_refused_with_the_reason(rows, opened):
    reason = {0: "it has no rows", 1: "no prompt is left of 1 rows: dropped 1 "}[len(rows)]
    with pytest.raises(UserError, match=f"rows.jsonl: {reason}"):
        opened(rows, max_prompt_length=4)


@pytest.mark.parametrize(
    ("rows", "how"), [([{"prompt": [user("a")]}], {}), (SUMS, {"as_chat": True})]
)
def test_a_conversation_without_a_template_is_no_fault_of_one_row(rows, how, opened):
    with pytest.raises(UserError, match=r"line 1: .*chat template, but .* has none: .*as_chat"):
        opened(rows, on_bad_row="skip", **how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"on_bad_row": "drop"}, "data.on_bad_row must be one of raise, skip, not 'drop'"),
        ({"max_prompt_length": 0}, "data.max_prompt_length must be a whole number .* not 0"),
        ({"max_prompt_length": 1.5}, "data.max_prompt_length .* not 1.5"),
        ({"max_prompt_length": True}, "data.max_prompt_length .* not True"),
        ({"as_chat": "auto"}, "data.as_chat must be true, false or null, not 'auto'"),
        ({"as_chat": False, "system_prompt": "a"}, "data.system_prompt needs conversations"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(how, message):
    with pytest.raises(UserError, match=message):
        PromptFormat(**how)


# --- prompts as a data set


def test_some_of_the_prompts_in_the_order_asked_for(opened):
    prompts = opened(SUMS)
    assert [prompt.row for prompt in prompts.select([1, 0])] == [1, 0]
    assert len(prompts.select([1])) == 1


def test_the_fingerprint_tells_prompts_columns_and_order_apart(opened):
    prompts = opened(SUMS)
    other = opened([SUMS[0], {**SUMS[1], "answer": "5"}])
    prints = [prompts, other, prompts.select([1, 0]), prompts.select([0])]
    assert len({rows.fingerprint for rows in prints}) == len(prints)
    assert opened(SUMS).fingerprint == prompts.fingerprint


def test_the_fingerprint_is_the_same_in_another_process(opened):
    prompts = opened(SUMS)
    program = (
        "from lit_align.data.prompts import Prompt, PromptRows\n"
        f"print(PromptRows([Prompt(*p) for p in {[tuple(p) for p in prompts]!r}]).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert done.stdout.decode().strip() == prompts.fingerprint


def test_rows_end_for_plain_iteration(opened):
    assert isinstance(opened(SUMS), PromptRows)
    with pytest.raises(IndexError):
        opened(SUMS)[2]


def test_rows_in_memory_are_read_like_those_of_a_file():
    rows = [{"prompt": "1 + 2 =", "answer": "3"}, {"prompt": "2 + 2 =", "answer": "4"}]
    tokenizer = PolicyRecipe().tokenizer()
    listed, table = (open_prompts(given, tokenizer) for given in (rows, Dataset.from_list(rows)))
    assert [p.columns for p in listed] == [{"answer": "3"}, {"answer": "4"}]
    assert [p.columns for p in table] == [p.columns for p in listed]
    assert [p.ids for p in listed] == [p.ids for p in table]
    with pytest.raises(UserError, match=r"the rows given, item 1: .*'prompt' is missing"):
        open_prompts([{"question": "1 + 2 ="}], tokenizer)
