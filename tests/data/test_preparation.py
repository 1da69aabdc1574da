import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import STRICT, assistant, char_level, user

from lit_align.data.cache import cache_root, filling
from lit_align.data.preparation import Preparation
from lit_align.data.sources import open_source
from lit_align.data.tokenise import PairTokeniser
from lit_align.errors import UserError

ROWS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(5)]


@pytest.fixture
def write(tmp_path):
    """Writes rows into a file and gives its source."""

    def rows_to_source(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return open_source(path, "train")

    return rows_to_source


@pytest.fixture
def prepare(tmp_path):
    """Prepares a source; options of the preparation by their names, others of the tokeniser."""

    def prepared(source, limit=None, tokenizer=None, on_bad_row="raise", **options):
        tokeniser = PairTokeniser(tokenizer or char_level(), **options)
        return Preparation(tokeniser, on_bad_row, tmp_path / "cache")(source, limit)

    return prepared


@pytest.fixture
def folders(tmp_path):
    return lambda: sorted((tmp_path / "cache" / "pairs").iterdir())


def test_pairs_come_in_the_order_of_the_rows(write, prepare):
    pairs, _ = prepare(write(ROWS))
    texts = [char_level().decode(row["prompt_ids"] + row["chosen_ids"]) for row in pairs]
    assert texts == ["0+1=1</s>", "1+1=2</s>", "2+1=3</s>", "3+1=4</s>", "4+1=5</s>"]


def test_the_counts_add_up_and_are_told(write, prepare):
    rows = [
        *ROWS,
        {"prompt": "x", "chosen": "same", "rejected": "same"},
        {"prompt": "", "chosen": "", "rejected": "b"},
        {"prompt": "long" * 5, "chosen": "a", "rejected": "b"},
        {"prompt": "x", "chosen": "a" * 20, "rejected": "b"},
        '{"prompt": "x"',
        {"prompt": "x", "chosen": "a"},
    ]
    _, summary = prepare(write(rows), on_bad_row="skip", max_length=8)
    # Prompts: five of 4 characters and one of 1; answers: 5 x (1 + 1), 5 x (2 + 1), 7 and 2.
    assert summary.describe() == (
        "6 pairs of 11 rows; dropped 3 (1 identical, 1 empty chosen, 1 empty after truncation); "
        "skipped 2 bad (first: line 10: it is not JSON: Expecting ',' delimiter at column "
        "15); truncated 1; prompt tokens median 4, max 4; answer tokens median 2.5, max 7"
    )
    assert summary.rows == summary.pairs + sum(summary.dropped.values()) + summary.skipped


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "rows.jsonl, line 6: field 'rejected' is missing"),
        ('{"prompt": ', "rows.jsonl, line 6: it is not JSON"),
        ({"prompt": [user("1"), user("2")], "chosen": "a", "rejected": "b"}, "line 6: .* roles"),
    ],
)
def test_a_bad_row_stops_with_its_place_or_is_counted(row, message, write, prepare, folders):
    source = write([*ROWS, row])
    with pytest.raises(UserError, match=f"{message}.*on_bad_row=skip"):
        prepare(source, tokenizer=char_level(STRICT))
    assert folders() == []
    pairs, summary = prepare(source, tokenizer=char_level(STRICT), on_bad_row="skip")
    assert (len(pairs), summary.skipped) == (5, 1)
    # What was skipped once must not hide from who wants to know.
    with pytest.raises(UserError, match=message):
        prepare(source, tokenizer=char_level(STRICT))


def test_a_conversation_needs_a_template_whatever_happens_to_bad_rows(write, prepare):
    row = {"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    with pytest.raises(UserError, match=r"line 6 is a conversation.*model\.chat_template.*plain"):
        prepare(write([*ROWS, row]), on_bad_row="skip")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows.jsonl: it has no rows"),
        (["", " "], "rows.jsonl: it has no rows"),
        (
            [{"prompt": "x" * 9, "chosen": "a", "rejected": "b"}] * 2,
            "no pair is left of 2 rows: 2 empty after truncation; prompts fill max_length=8 .*"
            "raise data.max_length",
        ),
        (['{"a": 1}'], r"no pair is left of 1 rows: 1 bad \(first: line 1: field 'chosen'"),
        ([{"chosen": "a", "rejected": "a"}], "no pair is left of 1 rows: 1 identical$"),
    ],
)
def test_nothing_left_says_why_and_leaves_nothing(rows, message, write, prepare, folders):
    with pytest.raises(UserError, match=message):
        prepare(write(rows), on_bad_row="skip", max_length=8)
    assert folders() == []


def test_plain_text_without_an_end_token_warns_once(write, prepare):
    tokenizer = char_level(eos_token=None, pad_token=None)
    with pytest.warns(UserWarning, match="has no end token") as caught:
        prepare(write(ROWS * 500), tokenizer=tokenizer)
    assert len(caught) == 1


def test_a_limit_counts_pairs_and_reads_no_further(write, prepare):
    same = {"prompt": "x", "chosen": "a", "rejected": "a"}
    source = write([same, *ROWS[:3], "never read"])
    pairs, summary = prepare(source, limit=3)
    assert (len(pairs), summary.rows) == (3, 4)


def test_more_rows_than_are_tokenised_at_once(write, prepare):
    rows = [{"prompt": str(n), "chosen": "a", "rejected": "b"} for n in range(2500)]
    pairs, summary = prepare(write(rows))
    decode = char_level().decode
    assert [decode(ids) for ids in pairs["prompt_ids"]] == [str(n) for n in range(2500)]
    assert summary.pairs == 2500


# The cache


@pytest.fixture
def tokenised(monkeypatch):
    """How many rows have been tokenised since."""
    seen = []
    call = PairTokeniser.__call__

    def counting(self, rows):
        seen.extend(rows)
        return call(self, rows)

    monkeypatch.setattr(PairTokeniser, "__call__", counting)
    return seen


def test_the_same_rows_are_tokenised_once_wherever_they_lie(write, prepare, tokenised):
    first = prepare(write(ROWS))
    assert len(tokenised) == 5
    second = prepare(write(ROWS, "another.jsonl"))
    assert len(tokenised) == 5
    assert first.pairs[:] == second.pairs[:]
    assert first.summary == second.summary


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 7},
        {"truncation": "left"},
        {"tokenizer": char_level(bos=True)},
        {"on_bad_row": "skip"},
        {"limit": 3},
        {"chat_template_kwargs": {"a": 1}},
    ],
    ids=str,
)
def test_another_option_is_another_entry(change, write, prepare, folders):
    prepare(write(ROWS))
    prepare(write(ROWS), **change)
    assert len(folders()) == 2


def test_an_edited_file_is_another_entry(write, prepare):
    prepare(write(ROWS))
    pairs, _ = prepare(write([{**ROWS[0], "chosen": "9"}, *ROWS[1:]]))
    assert char_level().decode(pairs[0]["chosen_ids"]) == "9</s>"


@pytest.mark.parametrize("name", ["pairs.arrow", "meta.json"])
@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: b"", lambda d: b"x" + d[1:]])
def test_a_damaged_entry_is_made_anew(name, damage, write, prepare, folders, tokenised):
    good = prepare(write(ROWS)).pairs[:]
    [folder] = folders()
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    assert prepare(write(ROWS)).pairs[:] == good
    assert len(tokenised) == 10
    assert folders() == [folder]


def test_one_flipped_bit_is_seen(write, prepare, folders, tokenised):
    prepare(write(ROWS))
    file = folders()[0] / "pairs.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    prepare(write(ROWS))
    assert len(tokenised) == 10


def test_an_entry_without_its_pairs_is_made_anew(write, prepare, folders):
    prepare(write(ROWS))
    (folders()[0] / "pairs.arrow").unlink()
    assert len(prepare(write(ROWS)).pairs) == 5


def test_what_is_interrupted_leaves_nothing(write, prepare, folders, monkeypatch):
    def interrupted(self, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(PairTokeniser, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(write(ROWS))
    assert folders() == []


def test_who_comes_second_keeps_what_the_first_has_written(tmp_path):
    folder = tmp_path / "entry"
    with filling(folder) as late:
        (late / "file").write_text("late")
        with filling(folder) as early:
            (early / "file").write_text("early")
    assert (folder / "file").read_text() == "early"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cache folder .*LIT_ALIGN_CACHE"),
        filling(tmp_path / "file" / "entry"),
    ):
        pass


def test_the_root_is_the_folder_given_then_the_variable_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LIT_ALIGN_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "lit_align"
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "shared"))
    assert cache_root() == tmp_path / "shared"
    assert cache_root("here") == Path("here").absolute()


def test_another_process_finds_the_entry(write, prepare, folders, tmp_path):
    """No key may hang on what differs between processes, such as the order of a set."""
    source = write(ROWS)
    prepare(source)
    script = (
        "from pathlib import Path\n"
        "from lit_align.data.preparation import Preparation\n"
        "from lit_align.data.tokenise import PairTokeniser\n"
        "from lit_align.data.sources import open_source\n"
        "from small_tokenizers import char_level\n"
        f"source = open_source({str(source.path)!r}, 'train')\n"
        f"Preparation(PairTokeniser(char_level()), 'raise', {str(tmp_path / 'cache')!r})(source)\n"
    )
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}",
    }
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    assert len(folders()) == 1
