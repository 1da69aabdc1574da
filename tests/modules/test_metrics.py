"""Running sums and means."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lit_align.modules.metrics import MeanOfDicts, Sums, gradient_norm


def test_sums_add_up_by_name_and_start_anew_after_a_reset():
    sums = Sums("a", "b")
    sums.update({"a": torch.tensor(1.5), "b": torch.tensor(2)})
    # What is not there stays as it was; what nobody asked for is passed over.
    sums.update({"a": torch.tensor(0.5), "c": torch.tensor(9.0)})
    assert {name: value.item() for name, value in sums.compute().items()} == {"a": 2.0, "b": 2.0}
    sums.reset()
    sums.update({"b": torch.tensor(1.0)})
    assert {name: value.item() for name, value in sums.compute().items()} == {"a": 0.0, "b": 1.0}


def test_sums_keep_no_graph():
    sums = Sums("a")
    sums.update({"a": torch.ones((), requires_grad=True) * 2})
    assert not sums.compute()["a"].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_module_in_another_precision_counts_as_exactly(dtype):
    """Lightning converts what a module holds, and in bfloat16 256 + 1 is 256."""
    module = nn.Module()
    module.sums, module.rows = Sums("tokens"), Sums("x", "pairs")
    for _ in range(2):
        for _ in range(1000):
            module.to(dtype)
            one = torch.ones(1, dtype=dtype)
            module.sums.update({"tokens": torch.tensor(1)})
            module.rows.update_rows({"x": one, "pairs": one}, torch.tensor([True]))
        assert module.sums.compute()["tokens"].item() == 1000
        assert module.rows.compute()["pairs"].item() == 1000
        assert module.rows.compute()["x"].item() == 1000
        module.sums.reset()
        module.rows.reset()


def test_sums_over_rows_are_of_those_that_count():
    sums = Sums("x", "is_right")
    first = {"x": torch.tensor([1.0, 2.0, 3.0]), "is_right": torch.tensor([True, False, True])}
    sums.update_rows(first, torch.tensor([True, True, False]))
    sums.update_rows(
        {"x": torch.tensor([9.0]), "is_right": torch.tensor([True])}, torch.tensor([True])
    )
    assert {n: v.item() for n, v in sums.compute().items()} == {"x": 12.0, "is_right": 2.0}


def test_sums_are_empty_until_something_is_added():
    sums = Sums("x")
    assert sums.is_empty
    assert sums.compute()["x"].item() == 0
    sums.update({"x": torch.tensor(0.0)})
    assert not sums.is_empty
    sums.reset()
    assert sums.is_empty


def test_a_mean_of_dictionaries_is_over_those_that_have_the_name():
    means = MeanOfDicts()
    assert means.compute_and_reset() == {}
    means.update({"a": 1.0, "b": 5.0})
    means.update({"a": 2.0})
    assert means.compute_and_reset() == {"a": 1.5, "b": 5.0}
    assert means.compute_and_reset() == {}


def test_a_gradient_norm_is_over_all_that_have_a_gradient():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[2].grad = torch.tensor([0.0, 4.0])
    assert_close(gradient_norm(parameters), torch.tensor(5.0))
