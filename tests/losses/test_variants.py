import math
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch

from lit_align.errors import UserError
from lit_align.losses.variants import OneOf, Range, Variants


@pytest.fixture
def table():
    table = Variants(aliases={"sum": "total"})

    @table.register("mean", average_logps=True, scale=3.0)
    @table.register("total")
    def scaled(
        policy_logps,
        reference_logps,
        lengths=None,
        *,
        scale: Annotated[float, Range(above=0, below=10)] = 2.0,
        shift: float = 0.0,
        kind: Annotated[str | None, OneOf((None, "a", "b"))] = None,
    ):
        """A loss that shows what it was called with."""
        return policy_logps, reference_logps, lengths, scale, shift, kind

    return table


def test_the_signature_is_the_contract(table):
    variant = table["total"]
    assert variant.tensors == ("policy_logps", "reference_logps")
    assert variant.optional_tensors == ("lengths",)
    assert list(variant.hyperparameters) == ["scale", "shift", "kind"]
    assert variant.reads_reference
    assert not variant.reads_alignment
    assert not variant.reads_lengths  # only required tensors count
    assert not variant.average_logps


def test_one_function_under_two_names_has_two_sets_of_defaults(table):
    assert table["mean"].fn is table["total"].fn
    assert table["mean"].average_logps
    assert table["mean"].settings({}) == {"scale": 3.0, "shift": 0.0, "kind": None}
    assert table["total"].settings({}) == {"scale": 2.0, "shift": 0.0, "kind": None}


def test_annotations_kept_as_text_are_read_too():
    table = Variants()
    namespace = {"Annotated": Annotated, "Range": Range, "table": table}
    source = (
        "from __future__ import annotations\n"
        "@table.register('late')\n"
        "def late(logps, *, beta: Annotated[float, Range(above=0)] = 1.0): ...\n"
    )
    exec(source, namespace)
    with pytest.raises(UserError, match="beta must be a finite number above 0, not -1"):
        table["late"].settings({"beta": -1})


def test_an_alias_finds_the_same_variant_but_is_not_listed(table):
    assert table["sum"] is table["total"]
    assert list(table) == ["total", "mean"]


def test_an_unknown_name_is_refused_with_the_known_ones(table):
    with pytest.raises(UserError, match=r"'ttal'; known: mean, total, sum \(= total\)"):
        table["ttal"]


def test_a_name_is_given_once(table):
    with pytest.raises(ValueError, match=r"'mean' is already taken by .*scaled"):
        table.register("mean")(lambda logps: logps)


def test_a_call_reads_tensors_by_name_and_hyperparameters_off_any_object(table):
    available = {"reference_logps": 2, "policy_logps": 1, "something_else": 9}
    args = SimpleNamespace(scale=4, kind="a", beta=7)
    assert table["total"](available, args) == (1, 2, None, 4.0, 0.0, "a")
    assert table["total"]({**available, "lengths": 3}, args)[2] == 3


def test_a_missing_tensor_is_named_with_its_loss(table):
    with pytest.raises(ValueError, match="loss 'total' needs reference_logps"):
        table["total"]({"policy_logps": 1}, SimpleNamespace())


def test_a_hyperparameter_the_loss_does_not_take_is_refused_with_those_it_takes(table):
    with pytest.raises(UserError, match="loss 'total' takes scale, shift, kind, not beta, gamma"):
        table["total"].settings({"gamma": 1.0, "beta": 0.1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", value) for value in (0, -1, 10, math.nan, math.inf, "1", True, None)),
        *(("shift", value) for value in (math.nan, -math.inf, "0", False, torch.tensor(1.0))),
        *(("kind", value) for value in ("c", 0, ["a"])),
    ],
)
def test_a_value_the_loss_cannot_honour_is_refused(table, name, value):
    with pytest.raises(UserError, match=rf"loss 'total': {name} must be .*, not "):
        table["total"].settings({name: value})


@pytest.mark.parametrize(("name", "value"), [("scale", 9.99), ("scale", 1), ("shift", -1e9)])
def test_a_value_in_range_becomes_a_float(table, name, value):
    taken = table["total"].settings({name: value})[name]
    assert taken == value
    assert type(taken) is float


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Range(), "a finite number"),
        (Range(above=0), "a finite number above 0"),
        (Range(least=0, below=0.5), "a finite number not below 0 and below 0.5"),
        (OneOf((None, "a")), "one of None, a"),
    ],
)
def test_a_rule_says_what_it_admits(rule, said):
    assert str(rule) == said


def test_a_lower_bound_is_admitted_where_it_is_inclusive_only():
    assert Range(least=0).admits(0)
    assert not Range(above=0).admits(0)
    assert not Range(below=0.5).admits(0.5)


def test_a_hyperparameter_without_a_default_must_be_given():
    table = Variants(noun="aggregation")

    @table.register("constant")
    def constant(losses, *, length: Annotated[float, Range(least=1)]):
        return length

    with pytest.raises(UserError, match=r"aggregation 'constant' needs length, .* no default"):
        table["constant"].settings({})
    assert table["constant"].settings({"length": 8}) == {"length": 8.0}


def test_messages_say_what_a_table_holds():
    table = Variants(noun="aggregation")
    with pytest.raises(UserError, match="unknown aggregation 'mean'; known: "):
        table["mean"]


def test_a_range_may_include_its_upper_end():
    share = Range(least=0, most=1)
    assert [share.admits(value) for value in (0, 0.5, 1, 1.01)] == [True, True, True, False]
    assert str(share) == "a finite number not below 0 and not above 1"
    assert not Range(most=math.inf).admits(math.inf)
