"""Running sums and means."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lit_align.modules.metrics import MeanOfDicts, RunningMeans, Sums, gradient_norm


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
    """Lightning converts metrics with their module, and in bfloat16 256 + 1 is 256."""
    module = nn.ModuleDict({"sums": Sums("tokens"), "means": RunningMeans("x")}).to(dtype)
    for _ in range(2):
        for _ in range(1000):
            module["sums"].update({"tokens": torch.tensor(1)})
            module["means"].update({"x": torch.ones(1)}, torch.tensor([True]))
        assert module["sums"].compute()["tokens"].item() == 1000
        assert module["means"].rows.item() == 1000
        assert module["means"].compute()["x"].item() == 1
        module["sums"].reset()
        module["means"].reset()


def test_a_running_mean_weighs_rows_and_not_batches():
    means = RunningMeans("x")
    means.update({"x": torch.tensor([1.0, 2.0, 3.0])}, torch.tensor([True, True, False]))
    means.update({"x": torch.tensor([9.0])}, torch.tensor([True]))
    assert means.compute()["x"].item() == pytest.approx((1 + 2 + 9) / 3)


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
