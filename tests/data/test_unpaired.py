"""Labelled completions through files and batches; modules/test_unpaired.py has them in Trainers."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from small_tokenizers import WITH_BOS, assistant, char_level, user

from lit_align.data import CompletionCollate, CompletionRows, UnpairedDataModule
from lit_align.errors import UserError
from lit_align.ops import IGNORE_INDEX

DECODE = char_level().decode


def row(number, label):
    return {"prompt": f"{number}=", "completion": "abcdefgh"[number % 8], "label": label}


def pair(number):
    return {"prompt": f"{number}=", "chosen": f"good {number}", "rejected": f"bad {number}"}


@pytest.fixture
def write(tmp_path):
    def to_file(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / name

    return to_file


@pytest.fixture
def ready(tmp_path):
    """A data module after its setup, inside a Trainer whose module wants mismatched rows or not."""

    def made(path, needs_mismatched=None, *, validate=1.0, **options):
        data = UnpairedDataModule(
            path, **{"tokenizer": char_level(), "cache_dir": tmp_path / "cache", **options}
        )
        data.prepare_data()
        if needs_mismatched is not None:
            module = SimpleNamespace(needs_mismatched=needs_mismatched)
            data.trainer = SimpleNamespace(
                lightning_module=module, distributed_sampler_kwargs=None, limit_val_batches=validate
            )
        data.setup("fit")
        return data

    return made


def texts(rows, name="completion_ids"):
    return [DECODE(each[name]) for each in rows]


def test_rows_of_a_file_come_as_they_are(write, ready):
    data = ready(write([row(0, True), row(1, 0), {**row(2, 1), "weight": 0.5}]))
    assert texts(data.train_rows, "prompt_ids") == ["0=", "1=", "2="]
    assert texts(data.train_rows) == ["a</s>", "b</s>", "c</s>"]
    assert [each["label"] for each in data.train_rows] == [True, False, True]
    assert [each["weight"] for each in data.train_rows] == [1.0, 1.0, 0.5]
    assert [each["index"] for each in data.train_rows] == [0, 1, 2]
    assert data.train_rows.classes() == (2, 1)
    assert "mismatched_ids" not in data.train_rows[0]


def test_pairs_are_taken_apart(write, ready):
    data = ready(write([pair(0), {"prompt": "a", "chosen": "x", "rejected": "x"}, pair(1)]))
    assert texts(data.train_rows) == ["good 0</s>", "bad 0</s>", "good 1</s>", "bad 1</s>"]
    assert [each["label"] for each in data.train_rows] == [True, False, True, False]


def test_what_is_kept_is_read_again(write, ready, monkeypatch):
    path = write([pair(0), row(7, 1)])
    first = texts(ready(path).train_rows)
    monkeypatch.setattr("lit_align.data.unpaired.read_labelled", None)
    assert texts(ready(path).train_rows) == first


def test_conversations_through_a_table(tmp_path, ready):
    rows = [
        {"prompt": [user("q")], "completion": [assistant(a)], "label": a == "yes"}
        for a in ("yes", "no")
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    data = ready(tmp_path / "d", tokenizer=char_level(chat_template=WITH_BOS))
    assert [text.rstrip() for text in texts(data.train_rows)] == ["yes</s>", "no</s>"]
    assert data.train_rows.classes() == (1, 1)


def test_a_table_without_any_of_the_columns_is_refused(tmp_path, ready):
    Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=r"none of the columns prompt, completion, label, chosen"):
        ready(tmp_path / "d")


def test_a_bad_row_is_named_and_can_be_skipped(write, ready):
    path = write([row(0, 1), row(1, "yes"), row(2, 0)])
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: field 'label' must be true or 1"):
        ready(path)
    assert len(ready(path, on_bad_row="skip").train_rows) == 2


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (3, 3), (4, 4), (99, 6)])
def test_a_limit_counts_completions(write, ready, limit, kept):
    data = ready(write(map(pair, range(3))), max_rows=limit)
    assert len(data.train_rows) == kept


def test_answers_to_one_prompt_are_on_one_side_of_the_share_for_validation(write, ready):
    data = ready(write(map(pair, range(20))), val_split=0.25)
    sides = [set(texts(rows, "prompt_ids")) for rows in (data.train_rows, data.val_rows)]
    assert not sides[0] & sides[1]
    assert (len(data.train_rows), len(data.val_rows)) == (30, 10)
    assert data.val_rows[0]["index"] == 30


# --- mismatched completions


def test_in_order_each_row_has_the_completion_of_the_next(write, ready):
    data = ready(write(row(n, 1) for n in range(5)), needs_mismatched=True, shuffle=False)
    assert [text[0] for text in texts(data.train_rows, "mismatched_ids")] == list("bcdea")


def test_which_one_depends_on_the_seed_and_not_on_how_rows_are_read(write, ready):
    path = write(map(pair, range(12)))
    found = [
        texts(ready(path, needs_mismatched=True, **options).train_rows, "mismatched_ids")
        for options in ({}, {"batch_size": 1, "num_workers": 2}, {"seed": 1})
    ]
    assert found[0] == found[1] != found[2]
    rows = ready(path, needs_mismatched=True).train_rows
    for each in rows:
        number = DECODE(each["prompt_ids"]).rstrip("=")
        assert DECODE(each["mismatched_ids"]).removesuffix("</s>").split()[1] != number


def test_it_is_cut_to_the_room_behind_its_prompt(write, ready):
    rows = [
        {"prompt": "long prompt", "completion": "a", "label": 1},
        {"prompt": "b", "completion": "a long completion", "label": 0},
    ]
    data = ready(write(rows), needs_mismatched=True, max_length=18)
    for each in data.train_rows:
        assert each["mismatched_ids"]
        assert len(each["prompt_ids"]) + len(each["mismatched_ids"]) <= 18


def test_one_prompt_is_refused_only_where_it_matters(write, ready):
    path = write([{"prompt": "a", "completion": c, "label": 1} for c in "xyz"])
    assert len(ready(path, needs_mismatched=False).train_rows) == 3
    with pytest.raises(UserError, match="all 3 rows have the same prompt"):
        ready(path, needs_mismatched=True)


def test_rows_to_validate_on_are_named_if_they_cannot_be_mismatched(write, ready):
    path, val = write([row(0, 1), row(1, 0)]), write([row(0, 1), row(0, 0)], "val.jsonl")
    with pytest.raises(UserError, match=r"the validation data: .* all 2 rows have the same prompt"):
        ready(path, needs_mismatched=True, val_path=val)
    ready(path, needs_mismatched=True, val_path=val, validate=0)


@pytest.mark.parametrize("seed", range(8))
def test_a_share_for_validation_has_both_classes_where_it_can(write, ready, seed):
    rows = [row(n, n < 2) for n in range(40)]
    data = ready(write(rows), val_split=0.05, seed=seed)
    assert min(data.val_rows.classes()) > 0
    assert min(data.train_rows.classes()) > 0
    assert len(data.train_rows) + len(data.val_rows) == 40


def test_the_only_row_of_a_class_stays_where_it_was_dealt(write, ready):
    data = ready(write([row(n, n < 1) for n in range(40)]), val_split=0.05)
    counts = data.train_rows.classes(), data.val_rows.classes()
    assert counts in (((1, 37), (0, 2)), ((0, 38), (1, 1)))


# --- batches


def test_a_batch_by_hand():
    collate = CompletionCollate(0)
    rows = [
        {"index": 3, "prompt_ids": [5, 6], "completion_ids": [7], "label": True},
        {"index": 4, "prompt_ids": [5], "completion_ids": [0, 9], "label": False},
    ]
    batch = collate(rows)
    assert batch["index"].tolist() == [3, 4]
    assert batch["labels"].tolist() == [True, False]
    assert batch["completion_input_ids"].tolist() == [[5, 6, 7], [5, 0, 9]]
    assert batch["completion_labels"].tolist() == [
        [IGNORE_INDEX, IGNORE_INDEX, 7],
        [IGNORE_INDEX, 0, 9],
    ]
    assert batch["completion_attention_mask"].all()
    assert not [name for name in batch if name.startswith("mismatched") or name == "weight"]
    more = [{**each, "mismatched_ids": [8], "weight": 0.5} for each in rows]
    batch = collate(more)
    assert batch["mismatched_input_ids"].tolist() == [[5, 6, 8], [5, 8, 0]]
    assert batch["mismatched_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["weight"].tolist() == [0.5, 0.5]


def test_every_row_is_read_once_with_and_without_workers(write, ready):
    path = write(map(pair, range(5)))
    for workers in (0, 2):
        data = ready(path, num_workers=workers, batch_size=3)
        batches = list(data.train_dataloader())
        assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(10))
        assert batches[0]["window_pairs"] == 3


def test_rows_can_be_sent_to_a_worker(write, ready):
    rows = ready(write(map(pair, range(3))), needs_mismatched=True).train_rows
    again = pickle.loads(pickle.dumps(rows))
    assert isinstance(again, CompletionRows)
    assert again[2] == rows[2]


def test_good_answers_are_those_of_desirable_rows(write, ready):
    rows = ready(write([row(0, 1), row(1, 0), row(2, 1)])).train_rows
    assert [DECODE(answer) for _, answer in rows.answers()] == ["a</s>", "c</s>"]


def test_the_plan_and_the_summary_count_completions(write, ready):
    data = ready(write([*map(pair, range(3)), row(7, 1)]), batch_size=2)
    trainer = SimpleNamespace(accumulate_grad_batches=2, estimated_stepping_batches=4)
    assert "4 steps over 7 completions (2.3 epochs), each of 4" in data.describe_plan(trainer)
    (source, _), *_ = data._sources()
    summary = data._preparation()(source).summary
    assert summary.describe().startswith("7 completions (4 desirable, 3 undesirable) of 4 rows")
