"""Files that several runs write and that may be cut short or go bad."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lit_align.callbacks.reference_store import ReferenceStore, Scored, row_key, store_key
from lit_align.errors import UserError

HOW = {"weights": "abc", "dtype": "float32"}
A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


@pytest.fixture
def store(tmp_path):
    return ReferenceStore(tmp_path, HOW)


def parts(store):
    return sorted(store.folder.glob("part-*"))


def test_what_is_added_is_read_back_exactly(store):
    rows = {A: Scored(-1.5, 3), B: Scored(torch.tensor(-0.1).item(), 1)}
    store.add(rows, torch.float32)
    store.add({C: Scored(-7.0, 2)}, torch.float32)
    assert ReferenceStore(store.folder.parent, HOW).read() == rows | {C: Scored(-7.0, 2)}


def test_float64_keeps_its_digits(store):
    store.add({A: Scored(-1 / 3, 3)}, torch.float64)
    assert store.read()[A].logps == -1 / 3


def test_the_file_says_what_it_holds_in_the_promised_types(store):
    store.add({A: Scored(-1.5, 3)}, torch.float32)
    (part,) = parts(store)
    with safe_open(part, framework="pt") as file:
        assert file.get_tensor("logps").dtype == torch.float32
        assert file.get_tensor("tokens").dtype == torch.int32
        assert file.get_tensor("keys").tolist() == [[1] * 16]
    assert json.loads((store.folder / "meta.json").read_text()) == {"schema": 1, **HOW}


def test_an_empty_store_has_nothing_and_writes_nothing(store):
    assert store.read() == {}
    store.add({}, torch.float32)
    assert not store.folder.exists()


def test_two_runs_that_compute_the_same_write_one_file(store):
    for _ in range(2):
        ReferenceStore(store.folder.parent, HOW).add({A: Scored(-1.5, 3)}, torch.float32)
    assert len(parts(store)) == 1


def test_leftovers_of_a_killed_writer_are_ignored(store):
    store.add({A: Scored(-1.5, 3)}, torch.float32)
    (store.folder / ".part-0123.safetensors.deadbeef").write_bytes(b"half of")
    assert store.read() == {A: Scored(-1.5, 3)}


def test_writing_leaves_nothing_but_the_files(store):
    store.add({A: Scored(-1.5, 3)}, torch.float32)
    assert {path.name[:5] for path in store.folder.iterdir()} == {"part-", "meta."}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "other tensors", "no sum"])
def test_a_damaged_part_is_refused_by_name(store, damage):
    store.add({A: Scored(-1.5, 3), B: Scored(-2.5, 4)}, torch.float32)
    (part,) = parts(store)
    content = part.read_bytes()
    if damage == "other tensors":
        save_file({"x": torch.zeros(1)}, part)
    elif damage == "no sum":
        with safe_open(part, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, part)
    else:
        part.write_bytes(
            {
                "cut": content[:-3],
                "flipped": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:],
                "empty": b"",
                "text": b"not a tensor in sight",
            }[damage]
        )
    with pytest.raises(UserError, match=rf"{part.name}.*[Dd]elete"):
        store.read()


def test_a_folder_that_was_renamed_to_another_key_is_refused(store, tmp_path):
    store.add({A: Scored(-1.5, 3)}, torch.float32)
    other = ReferenceStore(tmp_path, {**HOW, "weights": "def"})
    store.folder.rename(other.folder)
    with pytest.raises(UserError, match=r"meta\.json"):
        other.read()


@pytest.mark.parametrize("change", [{"weights": "x"}, {"dtype": "bfloat16"}, {"new": 1}])
def test_another_way_to_compute_is_another_store(change):
    assert store_key(HOW) != store_key(HOW | change)


def test_the_order_of_a_description_does_not_matter():
    assert store_key(HOW) == store_key(dict(reversed(HOW.items())))


@pytest.mark.parametrize(
    ("prompt", "response"),
    [([1, 2], [3, 5]), ([1], [2, 3, 4]), ([1, 2, 3], [4]), ([1, 2], [3]), ([], [1, 2, 3, 4])],
)
def test_other_tokens_or_another_border_make_another_row(prompt, response):
    assert row_key(prompt, response) != row_key([1, 2], [3, 4])


def test_the_key_of_a_row_is_the_same_in_every_process():
    # blake2b of the little-endian int64 values 2, 1, 2, 3, 4.
    assert row_key([1, 2], [3, 4]).hex() == "66daa2f2ce73697394033aa0850d0ba9"
