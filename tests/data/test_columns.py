"""Numbers of each row, from the file to the batch."""

import json
import math

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from small_tokenizers import char_level

from lit_align.data import preparation
from lit_align.data.preparation import Preparation
from lit_align.data.rows import RowError, read_row
from lit_align.data.sources import open_source
from lit_align.data.tokenise import PairTokeniser
from lit_align.errors import UserError
from lit_align.losses import PAIR_COLUMNS

ROW = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


@pytest.fixture
def write(tmp_path):
    """Rows by what they have beside the texts; a file of any kind that is read."""

    def to_file(columns, name="rows.jsonl"):
        path = tmp_path / name
        rows = [{**ROW, "prompt": f"{n}=", **extra} for n, extra in enumerate(columns)]
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        elif path.suffix == ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            Dataset.from_list(rows).save_to_disk(path)
        return path

    return to_file


@pytest.fixture
def prepare(tmp_path):
    def prepared(path, limit=None, **options):
        options = {"cache_dir": tmp_path / "cache", **options}
        return Preparation(PairTokeniser(char_level()), **options)(
            open_source(path, "train"), limit
        )

    return prepared


def ready(data):
    data.setup("fit")
    return data


def numbers(rows, name):
    return [row[name] for row in rows]


# One row


def test_numbers_are_read_and_nulls_are_not():
    row = {**ROW, "weight": 2, "margin": -0.5, "label_prob": None, "score": "high"}
    assert read_row(row).numbers == {"weight": 2.0, "margin": -0.5}
    assert read_row(ROW).numbers == {}


@pytest.mark.parametrize("column", PAIR_COLUMNS)
@pytest.mark.parametrize("value", [True, "0.5", [0.5], {}, math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused_by_its_field(column, value):
    said = rf"field '{column}' must be a finite number.*, not .*ignore_columns=\[{column}\]"
    with pytest.raises(RowError, match=said):
        read_row({**ROW, column: value})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("weight", -0.1),
        ("weight", 1e30),
        ("weight", 10**400),
        ("margin", -(10**400)),
        ("label_prob", -0.1),
        ("label_prob", 1.01),
    ],
)
def test_numbers_out_of_bounds_are_refused(column, value):
    with pytest.raises(RowError, match=f"field '{column}' must be"):
        read_row({**ROW, column: value})


@pytest.mark.parametrize(
    ("column", "value"),
    [("weight", 0), ("weight", 1e18), ("margin", -3), ("label_prob", 0), ("label_prob", 1)],
)
def test_the_bounds_themselves_are_good(column, value):
    assert read_row({**ROW, column: value}).numbers == {column: value}


def test_a_column_that_is_not_to_be_read_may_hold_anything():
    assert read_row({**ROW, "margin": "wide", "weight": 2}, ["weight"]).numbers == {"weight": 2.0}


# A file


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows"])
def test_columns_come_from_files_of_every_kind_with_their_nulls(name, write, make):
    path = write(
        [
            {"weight": 0.5, "margin": 1, "label_prob": None},
            {"weight": None, "margin": 2, "label_prob": 0.25},
            {"weight": 3.0, "margin": 0, "label_prob": 1.0},
        ],
        name,
    )
    data = ready(make(path, batch_size=3, shuffle=False))
    [batch] = data.train_dataloader()
    assert {c: batch[c].tolist() for c in PAIR_COLUMNS} == {
        "weight": [0.5, 1.0, 3.0],
        "margin": [1.0, 2.0, 0.0],
        "label_prob": [1.0, 0.25, 1.0],
    }
    assert {batch[column].dtype for column in PAIR_COLUMNS} == {torch.float32}
    assert data.pair_columns == {"the training data": ("weight", "margin", "label_prob")}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_batch_has_no_column_that_the_data_has_no_value_of(name, write, make):
    path = write([{"weight": None, "label_prob": 1.0}, {"weight": None, "label_prob": 1.0}], name)
    data = ready(make(path))
    [batch] = data.train_dataloader()
    assert PAIR_COLUMNS.keys() & batch.keys() == {"label_prob"}


def test_a_value_in_the_last_of_many_rows_is_a_column_of_all(write, make):
    data = ready(make(write([{}] * 1500 + [{"weight": 7}])))
    assert numbers(data.train_rows, "weight") == [1.0] * 1500 + [7.0]


def test_a_bad_number_is_refused_with_its_row_or_counted(write, make, prepare):
    path = write([{"weight": 1}, {"weight": "much"}, {"weight": 2}])
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: field 'weight' must be .* a text"):
        ready(make(path))
    pairs, summary = prepare(path, on_bad_row="skip")
    assert (pairs["weight"][:], summary.skipped) == ([1.0, 2.0], 1)


def test_a_margin_that_only_some_rows_have_is_refused_with_the_first_that_has_none(write, make):
    later = write([{"margin": 1}, {"margin": 2}, {"margin": None}, {}])
    with pytest.raises(UserError, match=r"line 3: field 'margin' is missing or null, and other"):
        ready(make(later))
    earlier = write([{}, {"margin": None}] + [{}] * 1500 + [{"margin": 1}], "earlier.jsonl")
    with pytest.raises(UserError, match=r"line 1: field 'margin' is missing or null.*ignore_col"):
        ready(make(earlier))
    assert ready(make(earlier, ignore_columns=["margin"])).train_rows.columns == ()


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_rows_without_a_margin_can_be_left_out_wherever_they_stand(limit, write, prepare):
    path = write([{}, {"margin": 1}, {"margin": None}, {}, {"margin": 2}, {"margin": 3}])
    pairs, summary = prepare(path, on_bad_row="skip", limit=limit)
    assert pairs["margin"][:] == [1.0, 2.0, 3.0][:limit]
    assert (summary.skipped, summary.rows) == (3, len(pairs) + 3)
    assert summary.first_skipped.startswith("line 1: field 'margin'")


def test_a_dropped_row_needs_no_margin(write, prepare):
    pairs, summary = prepare(write([{"margin": 1}, {"chosen": "5"}, {"margin": 2}]))
    assert pairs["margin"][:] == [1.0, 2.0]
    assert summary.dropped == {"identical": 1}


def test_numbers_stay_with_their_pairs(write, prepare):
    """Rows that are dropped, cut or skipped in between move no number to another pair."""
    columns = [{"weight": float(n)} for n in range(6)]
    columns[1] |= {"chosen": "5"}
    columns[3] |= {"weight": "bad"}
    columns[4] |= {"chosen": "long" * 9}
    pairs, _ = prepare(write(columns), on_bad_row="skip")
    decode = char_level().decode
    found = {decode(row["prompt_ids"]): row["weight"] for row in pairs}
    assert found == {"0=": 0.0, "2=": 2.0, "4=": 4.0, "5=": 5.0}


# Options


def test_what_is_ignored_is_not_in_the_batch(write, make):
    path = write([{"weight": 2.0, "margin": "wide"}] * 3)
    data = ready(make(path, ignore_columns=["margin"]))
    assert data.train_rows.columns == ("weight",)
    assert ready(make(path, ignore_columns=list(PAIR_COLUMNS))).train_rows.columns == ()


def test_ignoring_a_column_is_another_entry_of_the_cache(write, make):
    path = write([{"weight": 2.0}] * 3)
    for ignored, columns in (([], ("weight",)), (["weight"], ()), (None, ("weight",))):
        assert ready(make(path, ignore_columns=ignored)).train_rows.columns == columns


@pytest.mark.parametrize("wrong", [["score"], ["weight", "prompt"], "margin"])
def test_an_unknown_column_to_ignore_is_refused_with_the_known_ones(wrong, make):
    with pytest.raises(UserError, match=r"ignore_columns must be a list of .* weight, margin, la"):
        make("rows.jsonl", ignore_columns=wrong)


def test_pairs_kept_before_there_were_columns_are_not_taken_for_these(
    write, prepare, monkeypatch, tmp_path
):
    path = write([{"weight": 2.0}] * 3)
    monkeypatch.setattr(preparation, "SCHEMA", 1)
    prepare(path)
    monkeypatch.undo()
    prepare(path)
    assert len(list((tmp_path / "cache" / "pairs").iterdir())) == 2


def test_the_columns_are_told(write, make, monkeypatch):
    shown = []
    monkeypatch.setattr("lit_align.data.preference.rank_zero_info", shown.append)
    path = write([{"weight": 2.0, "label_prob": 0.5}] * 3)
    for _ in range(2):
        data = ready(make(path))
    assert all(line.endswith("; with weight, label_prob of each") for line in shown)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(L.Trainer, "estimated_stepping_batches", 1)
    assert data.describe_plan(trainer).endswith("; reads weight, label_prob of each pair")


# What happens to rows


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_survive_division_limits_shuffling_and_workers(workers, write, make):
    path = write([{"weight": float(n), "label_prob": n / 20} for n in range(20)])
    data = ready(
        make(path, val_split=0.25, max_rows=10, val_max_rows=3, batch_size=4, num_workers=workers)
    )
    assert (len(data.train_rows), len(data.val_rows)) == (10, 3)
    decode = char_level().decode
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            said = [decode(ids).partition("=")[0] for ids in batch["chosen_input_ids"]]
            assert batch["weight"].tolist() == [float(number) for number in said]
            assert torch.equal(batch["label_prob"], batch["weight"] / 20)


def test_parts_may_have_different_columns(write, make):
    train = write([{"weight": 2.0}] * 3)
    val = write([{"label_prob": 0.5}] * 3, "val.jsonl")
    assert ready(make(train, val_path=val)).pair_columns == {
        "the training data": ("weight",),
        "the validation data": ("label_prob",),
    }
