import os

import pytest
import torch
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import TensorCache


@pytest.fixture
def cache():
    return TensorCache(
        {"chosen_logps": torch.tensor([-1.0, -2.0, -3.0]), "lengths": torch.tensor([4, 5, 6])}
    )


def test_rows_come_in_the_order_asked_for(cache):
    rows = cache[torch.tensor([2, 0, 2])]
    assert_close(rows["chosen_logps"], torch.tensor([-3.0, -1.0, -3.0]))
    assert_close(rows["lengths"], torch.tensor([6, 4, 6]))
    assert len(cache) == 3


@pytest.mark.parametrize("index", [[3], [-1], [0, 99, -5]])
def test_a_row_that_is_not_there_is_named(cache, index):
    named = ", ".join(str(row) for row in index if row not in range(3))
    with pytest.raises(UserError, match=f"no numbers for row {named}:"):
        cache[torch.tensor(index)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_finite_number_is_named(value):
    cache = TensorCache({"chosen_logps": torch.tensor([-1.0, value, -3.0])})
    assert_close(cache[torch.tensor([0, 2])]["chosen_logps"], torch.tensor([-1.0, -3.0]))
    with pytest.raises(UserError, match="no numbers for row 1:"):
        cache[torch.tensor([0, 1])]


def test_a_row_of_tokens_counts_as_missing_if_one_of_them_is():
    cache = TensorCache({"logprobs": torch.tensor([[0.0, -1.0], [float("nan"), 0.0]])})
    with pytest.raises(UserError, match="row 1:"):
        cache[torch.tensor([1])]


@pytest.mark.parametrize("index", [torch.tensor([True, False, True]), torch.tensor([1.0])])
def test_only_integers_are_indices(cache, index):
    with pytest.raises(ValueError, match="integer index"):
        cache[index]


def test_no_rows_are_no_error(cache):
    assert cache[torch.tensor([], dtype=torch.int64)]["chosen_logps"].shape == (0,)


def test_tensors_of_different_lengths_are_no_cache():
    with pytest.raises(ValueError, match="equally many rows"):
        TensorCache({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="equally many rows"):
        TensorCache({})


def test_a_cache_holds_no_graph():
    cache = TensorCache({"a": torch.zeros(2, requires_grad=True) * 2})
    assert not cache[torch.tensor([0])]["a"].requires_grad


def test_a_cache_comes_back_from_disk(cache, tmp_path):
    path = tmp_path / "new" / "cache.pt"
    cache.to_disk(path)
    again = TensorCache.from_disk(path)
    assert len(again) == 3
    for name, tensor in cache.tensors.items():
        assert_close(again.tensors[name], tensor)
    assert os.listdir(path.parent) == ["cache.pt"]


def test_a_slice_is_written_without_what_it_was_cut_from(tmp_path):
    TensorCache({"a": torch.zeros(100_000)[:2]}).to_disk(tmp_path / "cache.pt")
    assert (tmp_path / "cache.pt").stat().st_size < 10_000


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache, tmp_path):
    path = tmp_path / "cache.pt"
    cache.to_disk(path)
    broken = TensorCache({"a": torch.zeros(3)})
    broken.tensors["b"] = torch.zeros(3, device="meta")  # has no numbers to write
    with pytest.raises((NotImplementedError, RuntimeError)):
        broken.to_disk(path)
    assert len(TensorCache.from_disk(path).tensors) == 2
    assert os.listdir(tmp_path) == ["cache.pt"]


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(UserError, match=r"no reference cache at .*nowhere\.pt"):
        TensorCache.from_disk(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04half a file"])
def test_a_file_that_is_no_cache_is_said_to_be_none(tmp_path, content):
    path = tmp_path / "cache.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cache\.pt is not a reference cache"):
        TensorCache.from_disk(path)


def test_half_a_cache_is_said_to_be_none(cache, tmp_path):
    path = tmp_path / "cache.pt"
    cache.to_disk(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"cache\.pt is not a reference cache"):
        TensorCache.from_disk(path)


@pytest.mark.parametrize("content", [{"a": 3}, [torch.zeros(2)], torch.zeros(2)])
def test_a_file_of_something_else_is_said_to_be_none(tmp_path, content):
    torch.save(content, tmp_path / "cache.pt")
    with pytest.raises(UserError, match=r"cache\.pt is not a reference cache"):
        TensorCache.from_disk(tmp_path / "cache.pt")
