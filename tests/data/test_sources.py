import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from small_tokenizers import assistant, user

from lit_align.data.rows import RowError, read_row
from lit_align.data.sources import open_source
from lit_align.errors import UserError

TEXTS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "index": 7},
    {"prompt": "ü=\u2028", "chosen": "U", "rejected": "u", "index": 7},
]
CHATS = [
    {
        "prompt": [user("hi")],
        "chosen": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}],
        "rejected": [assistant("b")],
        "tools": json.dumps([{"name": "f"}]),
    },
    {
        "prompt": [user("ho"), assistant("?"), user("!")],
        "chosen": [assistant("a")],
        "rejected": [assistant("b")],
        "tools": None,
    },
]


def as_jsonl(rows, folder):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return path


def as_json(rows, folder):
    path = folder / "rows.json"
    path.write_text(json.dumps(rows, indent=1))
    return path


def as_parquet(rows, folder):
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def as_arrow(rows, folder):
    Dataset.from_list(rows).save_to_disk(folder / "rows")
    return folder / "rows"


FORMATS = [as_jsonl, as_json, as_parquet, as_arrow]


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_pairs(write, rows, tmp_path):
    read = [read_row(row) for _, row in open_source(write(rows, tmp_path), "train")]
    assert read == [read_row(row) for row in rows]


def test_places_count_lines_of_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"chosen": 1}\n\n{"chosen": 2}')
    assert [place for place, _ in open_source(path, "train")] == ["line 2", "line 4"]


@pytest.mark.parametrize("write", FORMATS)
def test_content_tells_data_apart_and_not_places(write, tmp_path):
    folders = [tmp_path / name for name in "abc"]
    changed = [TEXTS[0], {**TEXTS[1], "chosen": "V"}]
    contents = []
    for folder, rows in zip(folders, [TEXTS, TEXTS, changed], strict=True):
        folder.mkdir()
        contents.append(open_source(write(rows, folder), "train").content())
    assert contents[0] == contents[1] != contents[2]


def test_splits_of_one_table_have_contents_of_their_own(tmp_path):
    """They may be parts of one file on disk."""
    rows = Dataset.from_list([{"chosen": str(n), "rejected": "x"} for n in range(4)])
    DatasetDict(a=rows.select([0, 1]), b=rows.select([2, 3])).save_to_disk(tmp_path / "d")
    assert open_source(tmp_path / "d", "a").content() != open_source(tmp_path / "d", "b").content()


def test_splits_of_a_folder_by_name(tmp_path):
    DatasetDict(train=Dataset.from_list(TEXTS), test=Dataset.from_list(TEXTS[:1])).save_to_disk(
        tmp_path / "d"
    )
    assert len(list(open_source(tmp_path / "d", "test"))) == 1
    with pytest.raises(UserError, match=r"d has no split 'val' \(it has: train, test\)"):
        open_source(tmp_path / "d", "val")


def test_a_folder_of_files_is_read_as_the_hub_would(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    as_parquet(TEXTS, tmp_path)
    read = [read_row(row) for _, row in open_source(tmp_path, "train")]
    assert read == [read_row(row) for row in TEXTS]


@pytest.mark.parametrize("name", ["rows.jsonl", "data/rows", "a/b/c", "/nowhere/rows"])
def test_a_missing_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"'?{name}'?"):
        open_source(name, "train")


def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "rows.csv").write_text("chosen,rejected")
    with pytest.raises(UserError, match=r"rows.csv: .*'.csv' .*\.jsonl, .*\.parquet"):
        open_source(tmp_path / "rows.csv", "train")


def test_a_file_has_no_split_to_choose(tmp_path):
    with pytest.raises(UserError, match=r"rows.jsonl is a single file and has no split 'test'"):
        open_source(as_jsonl(TEXTS, tmp_path), "test")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"chosen": "a"', "it is not JSON: .* at column"),
        (b'{"chosen": "\xff"}', "it is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_line_does_not_hide_the_others(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"chosen": 1}\n' + line + b'\n{"chosen": 3}\n')
    first, (place, error), third = open_source(path, "train")
    assert (first, third) == (("line 1", {"chosen": 1}), ("line 3", {"chosen": 3}))
    assert place == "line 2"
    with pytest.raises(RowError, match=message):
        raise error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"chosen": "a"},\n{]', "rows.json, line 3: it is not JSON"),
        ('{"chosen": "a"}\n{"chosen": "b"}', r"line 2: .*must be called \.jsonl"),
        ('{"data": []}', "rows.json must hold a list of objects"),
    ],
)
def test_an_unreadable_json_file_says_where(text, message, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=message):
        list(open_source(tmp_path / "rows.json", "train"))


def test_a_file_that_only_claims_to_be_parquet(tmp_path):
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(UserError, match=r"rows\.parquet is not a Parquet file"):
        list(open_source(tmp_path / "rows.parquet", "train"))


@pytest.mark.parametrize("write", [as_parquet, as_arrow])
def test_a_table_without_the_columns_is_refused_once(write, tmp_path):
    path = write([{"prompt": "a", "chosen": "b"}], tmp_path)
    with pytest.raises(UserError, match=r"has no column 'rejected' \(it has: prompt, chosen\)"):
        list(open_source(path, "train"))


def test_a_damaged_arrow_folder_is_named(tmp_path):
    Dataset.from_dict({"chosen": ["a"] * 50, "rejected": ["b"] * 50}).save_to_disk(tmp_path / "set")
    (part,) = (tmp_path / "set").glob("*.arrow")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match=r"data set in .*set cannot be read"):
        open_source(tmp_path / "set", "train")
