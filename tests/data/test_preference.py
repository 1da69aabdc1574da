"""The data module alone; `test_in_trainer.py` has it inside real Trainers."""

import json

import pytest
import torch
from datasets import Dataset, DatasetDict
from small_tokenizers import WITH_BOS, assistant, char_level, numbered_rows, user

from lit_align.data import PreferenceDataModule
from lit_align.errors import UserError

DECODE = char_level().decode


def ready(data):
    data.prepare_data()
    data.setup("fit")
    return data


def prompts(rows):
    """The numbers that the rows were made from."""
    return [int(DECODE(row["prompt_ids"]).rstrip("=")) for row in rows]


def test_what_people_type_is_enough(write, monkeypatch, tmp_path):
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "shared"))
    data = PreferenceDataModule(str(write(range(20))), tokenizer=char_level())
    data.setup("fit")
    seen = torch.cat([batch["index"] for batch in data.train_dataloader()])
    assert sorted(seen.tolist()) == list(range(20))
    assert data.val_dataloader() == []
    assert (tmp_path / "shared").is_dir()


def test_without_a_validation_set_there_are_no_rows_of_it(write, make):
    data = ready(make(write(range(3))))
    assert (len(data.train_rows), len(data.val_rows)) == (3, 0)


def test_a_share_for_validation_is_disjoint_seeded_and_complete(write, make):
    path = write(range(20))
    parts = []
    for seed in (0, 0, 1):
        data = ready(make(path, val_split=0.25, seed=seed))
        parts.append((prompts(data.train_rows), prompts(data.val_rows)))
        assert sorted(parts[-1][0] + parts[-1][1]) == list(range(20))
        assert len(data.val_rows) == 5
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize(("count", "share", "val"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.9, 9)])
def test_a_share_leaves_something_to_both(count, share, val, write, make):
    data = ready(make(write(range(count)), val_split=share))
    assert (len(data.train_rows), len(data.val_rows)) == (count - val, val)


def test_one_pair_cannot_be_shared(write, make):
    with pytest.raises(UserError, match="1 row cannot be divided"):
        ready(make(write([1]), val_split=0.5))


def test_row_numbers_run_on_from_training_to_validation(write, make):
    data = ready(make(write(range(4)), val_path=write(range(10, 13), "val.jsonl")))
    assert [row["index"] for row in data.train_rows] == [0, 1, 2, 3]
    assert [row["index"] for row in data.val_rows] == [4, 5, 6]
    assert prompts(data.val_rows) == [10, 11, 12]


def test_splits_by_name(tmp_path, make):
    DatasetDict(
        train=Dataset.from_list(numbered_rows(range(4))),
        test=Dataset.from_list(numbered_rows([10, 11])),
    ).save_to_disk(tmp_path / "d")
    data = ready(make(tmp_path / "d", val_split="test"))
    assert (prompts(data.train_rows), prompts(data.val_rows)) == ([0, 1, 2, 3], [10, 11])
    data = ready(make(tmp_path / "d", split="test"))
    assert prompts(data.train_rows) == [10, 11]


@pytest.mark.parametrize(
    "options", [{"val_split": 0.5}, {"val_path": "val.jsonl"}], ids=["share", "file"]
)
def test_limits_take_the_first_pairs_of_each_part(options, write, make, tmp_path):
    path = write(range(20))
    write(range(20, 30), "val.jsonl")
    options = {
        key: tmp_path / value if key == "val_path" else value for key, value in options.items()
    }
    whole, some = (
        ready(make(path, **options, **limits))
        for limits in ({}, {"max_rows": 4, "val_max_rows": 3})
    )
    assert prompts(some.train_rows) == prompts(whole.train_rows)[:4]
    assert prompts(some.val_rows) == prompts(whole.val_rows)[:3]
    assert [row["index"] for row in some.val_rows] == [4, 5, 6]


def test_the_counts_are_shown_also_when_nothing_is_tokenised(write, make, monkeypatch):
    shown = []
    monkeypatch.setattr("lit_align.data.preference.rank_zero_info", shown.append)
    path = write([1, 2, 3])
    for _ in range(2):
        data = ready(make(path))
        data.setup("validate")
    line = "rows.jsonl: 3 pairs of 3 rows; prompt tokens median 2, max 2; answer tokens median 2, "
    assert shown == [line + "max 2"] * 2


def test_conversations_through_files(tmp_path, make):
    turns = [user("hi"), assistant("ho"), user("hm")]
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"chosen": [*turns, assistant("a")], "rejected": [*turns, assistant("b")]})
    )
    data = ready(make(tmp_path / "chat.jsonl", tokenizer=char_level(WITH_BOS, bos=True)))
    [row] = data.train_rows
    assert DECODE(row["prompt_ids"]) == "<s>[user]hi</s>[assistant]ho</s>[user]hm</s>[assistant]"
    assert (DECODE(row["chosen_ids"]), DECODE(row["rejected_ids"])) == ("a</s>", "b</s>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_path": "a", "val_split": "test"}, "exclude each other"),
        ({"val_split": 0}, r"val_split must be .* between 0 and 1, not 0"),
        ({"val_split": 1.0}, "val_split must be .* not 1.0"),
        ({"truncation": "middle"}, "truncation must be one of right, left, not 'middle'"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be one of raise, skip, not 'ignore'"),
        ({"max_length": 1}, "max_length must be a whole number of at least 2, not 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"max_rows": 0}, "max_rows must be a whole number of at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, not 2.5"),
        ({"val_batch_size": 0}, "val_batch_size must be a whole number of at least 1, not 0"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0, not -1"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options, message):
    with pytest.raises(UserError, match=message):
        PreferenceDataModule("rows.jsonl", **options)


def test_a_missing_tokenizer_is_asked_for(write, make):
    with pytest.raises(UserError, match=r"tokenizer=.*outside a Trainer"):
        make(write([1]), tokenizer=None).setup("fit")


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({"pad_token": "<unk>"}, 0),
        ({"pad_token": None}, 2),
        ({"pad_token": None, "eos_token": None}, 0),
    ],
)
def test_padding_falls_back_to_the_end_token(special, pad, make):
    assert make("rows.jsonl", tokenizer=char_level(**special)).collate.pad_token_id == pad


def test_a_file_for_validation_takes_the_place_of_a_share():
    data = PreferenceDataModule("a.jsonl", val_path="b.jsonl", val_split=0.05)
    assert data.val_split is None
