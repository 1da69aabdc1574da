"""WPO's weights on losses other than DPO."""

from types import SimpleNamespace

import pytest
import torch
from losses.small_pairs import numbers
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import PREFERENCE_LOSSES, DPOConfig, compute_loss, wpo_weights

LENGTHS = {"chosen_lengths": torch.tensor([4, 1, 5]), "rejected_lengths": torch.tensor([2, 3, 5])}
ALIGNMENT = {
    "chosen_alignment_logps": numbers(-3.0, -0.5, -2.0),
    "rejected_alignment_logps": numbers(-1.0, -2.0, -6.0),
}
SUMS = {
    "policy_chosen_logps": numbers(-8.0, -1.0, -4.0),
    "policy_rejected_logps": numbers(-3.0, -6.0, -9.0),
    "reference_chosen_logps": numbers(-7.0, -2.0, -5.0),
    "reference_rejected_logps": numbers(-4.0, -5.0, -8.0),
}
OTHERS = {
    "policy_prompt_logps": numbers(-2.0, -2.0, -2.0),
    "prompt_lengths": torch.tensor([3, 3, 3]),
    **{name.replace("logps", "head_logps"): logps / 2 for name, logps in SUMS.items()},
}
WEIGHTED = [n for n, v in PREFERENCE_LOSSES.items() if not (v.whole_window or v.reads_alignment)]
# By hand, means per token less those of the alignment terms: -1.25 - 1, -0.5 - 4/3 and -0.4 - 0.6.
WEIGHTS = numbers(-2.25, -0.5 - 4 / 3, -1.0).exp()


def pairs(name):
    """A batch, with means for a loss of means."""
    given = {**LENGTHS, **ALIGNMENT, **OTHERS}
    for key, logps in SUMS.items():
        length = LENGTHS[f"{key.split('_')[1]}_lengths"]
        given[key] = logps / length if PREFERENCE_LOSSES[name].average_logps else logps
    needed = PREFERENCE_LOSSES[name].columns
    return given | {column: numbers(0.5, 1.0, 0.75) for column in needed}


def loss_of(name, batch, **options):
    policy = [batch[f"policy_{side}_logps"] for side in ("chosen", "rejected")]
    return compute_loss(DPOConfig(name, **options), batch, *policy)


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_weights_multiply_any_loss_of_sums_or_of_means(name):
    plain = loss_of(name, pairs(name))
    assert plain.losses.ne(0).any()
    for kind in ("sampled", "greedy"):
        weighted = loss_of(name, pairs(name), wpo=kind)
        assert_close(weighted.losses, WEIGHTS * plain.losses)
        assert_close(weighted.chosen_rewards, plain.chosen_rewards)
    without = wpo_weights(*list(SUMS.values())[:2], *LENGTHS.values())
    assert_close(loss_of(name, pairs(name), wpo="none").losses, without * plain.losses)


@pytest.mark.parametrize("name", WEIGHTED)
def test_gradients_do_not_pass_through_the_weights(name):
    def gradients(**options):
        batch = pairs(name)
        leaves = [batch[f"policy_{side}_logps"].requires_grad_() for side in ("chosen", "rejected")]
        losses = loss_of(name, batch, **options).losses
        return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)

    for weighted, plain in zip(gradients(wpo="sampled"), gradients(), strict=True):
        assert_close(weighted, WEIGHTS * plain)


@pytest.mark.parametrize("kind", ["none", "sampled", "greedy"])
def test_wpo_is_dpo_with_the_weights(kind):
    options = {"beta": 0.3, "label_smoothing": 0.1}
    whole = loss_of("wpo", pairs("wpo"), alignment=kind, **options)
    parts = loss_of("dpo", pairs("dpo"), wpo=kind, **options)
    for part, other in zip(parts, whole, strict=True):
        assert_close(part, other)


def test_lengths_may_be_counted_in_the_labels():
    batch = pairs("ipo")
    for side, lengths in zip(("chosen", "rejected"), LENGTHS.values(), strict=True):
        del batch[f"{side}_lengths"]
        scored = torch.arange(6)[None] > 5 - lengths[:, None]
        batch[f"{side}_labels"] = torch.zeros(3, 6, dtype=torch.int64).where(scored, -100)
    expected = loss_of("ipo", pairs("ipo"), wpo="sampled")
    assert_close(loss_of("ipo", batch, wpo="sampled").losses, expected.losses)


def test_the_weight_of_a_row_is_on_top():
    weight = numbers(0.0, 2.0, 3.0)
    plain = loss_of("dpo", pairs("dpo")).losses
    both = loss_of("dpo", pairs("dpo") | {"weight": weight}, wpo="sampled").losses
    assert_close(both, weight * WEIGHTS * plain)


def test_a_config_has_the_option_only_if_it_is_set():
    assert "wpo" not in DPOConfig("ipo").as_dict()
    config = DPOConfig("ipo", wpo="greedy")
    assert config.as_dict() == {"loss_type": "ipo", "beta": 0.1, "wpo": "greedy"}
    assert DPOConfig(**config.as_dict()) == config != DPOConfig("ipo")
    assert (config.reads_alignment, config.alignment_kind) == (True, "greedy")
    assert DPOConfig("ipo", wpo="none").alignment_kind is None
    assert DPOConfig("ipo").alignment_kind is None
    assert DPOConfig("wpo").alignment_kind == "sampled"


def test_any_object_may_say_it():
    batch = pairs("dpo")
    policy = [batch[f"policy_{side}_logps"] for side in ("chosen", "rejected")]
    args = SimpleNamespace(loss_type="dpo", beta=0.1, wpo="sampled")
    expected = loss_of("dpo", batch, wpo="sampled").losses
    assert_close(compute_loss(args, batch, *policy).losses, expected)
    with pytest.raises(UserError, match="loss 'dpo': wpo must be one of None, none, sampled"):
        compute_loss(SimpleNamespace(loss_type="dpo", wpo=True), batch, *policy)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("dpo", "sample", "loss 'dpo': wpo must be one of None, none, sampled, greedy"),
        ("dpo", True, "wpo must be one of"),
        ("wpo", "sampled", "loss 'wpo' has these weights without the option wpo"),
        ("aot", "sampled", "loss 'aot' compares all pairs .*cannot honour wpo"),
        ("aot_unpaired", "none", "loss 'aot_unpaired' compares all pairs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name, kind, said):
    with pytest.raises(UserError, match=said):
        DPOConfig(name, wpo=kind)


@pytest.mark.parametrize("missing", ["chosen_lengths", "rejected_alignment_logps"])
def test_what_the_weights_need_must_be_there(missing):
    batch = pairs("ipo")
    del batch[missing]
    with pytest.raises(ValueError, match=f"wpo 'sampled' needs {missing}"):
        loss_of("ipo", batch, wpo="sampled")
