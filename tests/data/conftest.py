"""Small preference files and data modules over them."""

import json

import pytest
from small_tokenizers import char_level, numbered_rows

from lit_align.data import PreferenceDataModule


@pytest.fixture
def write(tmp_path):
    def to_file(numbers, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, numbered_rows(numbers))))
        return tmp_path / name

    return to_file


@pytest.fixture
def make(tmp_path):
    """A data module with its cache in the test's own folder."""

    def made(path, **options):
        options = {"tokenizer": char_level(), "cache_dir": tmp_path / "cache", **options}
        return PreferenceDataModule(path, **options)

    return made
