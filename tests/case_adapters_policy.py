"""How our code answers the public faults of policy losses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lit_align.losses import (
    GRPOConfig,
    aggregate,
    compute_grpo_loss,
    grpo_terms,
    policy_ratio,
    window_counts,
)

Case = dict[str, Any]


def own_window(config: GRPOConfig, losses: Tensor, mask: Tensor) -> Tensor:
    """The loss of a batch that is a whole optimizer step, each row its own prompt."""
    return aggregate(config, losses, mask, window_counts(mask, torch.arange(len(mask))))


def four_reductions_are_four(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    losses, mask = torch.tensor(given["per_token_loss"]), torch.tensor(given["mask"]).bool()
    length = {"max_completion_length": given["max_completion_length"]}
    reductions: dict[str, dict[str, Any]] = {
        "token_mean": {"aggregation": "token_mean"},
        "seq_mean_token_mean": {"aggregation": "sequence_mean"},
        "seq_mean_token_sum": {"aggregation": "sequence_sum"},
        "dr_grpo": {"aggregation": "constant_length", **length},
    }
    for name, options in reductions.items():
        found = own_window(GRPOConfig(**options), losses, mask).item()
        assert found == pytest.approx(expected[name], abs=case["tolerance"]), name


def what_is_masked_leaves_both_sides(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    for name, right in (
        ("truncated", expected["dapo_loss"]),
        ("all_truncated_variant", expected["all_truncated"]["loss"]),
    ):
        losses = torch.tensor(given["per_token_loss"]).float().requires_grad_()
        mask = ~torch.tensor(given[name]).unsqueeze(-1).expand(losses.shape)
        loss = own_window(GRPOConfig("dapo"), losses, mask)
        assert loss.item() == pytest.approx(right, abs=case["tolerance"])
        loss.backward()
        if name == "all_truncated_variant":
            assert loss.requires_grad == expected["all_truncated"]["requires_grad"]
            assert not losses.grad.any()


def cispo_is_its_formula(case: Case) -> None:
    tokens, expected = case["input"]["tokens"], case["expected"]
    columns = {key: torch.tensor([[token[key] for token in tokens]]) for key in tokens[0]}
    logprobs = columns["logp"].requires_grad_()
    # Here the setting is what the cap exceeds 1 by.
    config = GRPOConfig("cispo", clip_higher=case["input"]["cap"] - 1)
    ratio = columns["ratio"].requires_grad_()
    _, _, losses, _ = compute_grpo_loss(logprobs, ratio, columns["advantage"], None, config)
    assert_close(losses[0].tolist(), expected["loss"], rtol=0, atol=case["tolerance"])
    losses.sum().backward()
    right = torch.tensor([expected["dloss_dlogp"]])
    assert_close(logprobs.grad, right, rtol=0, atol=case["tolerance"])
    assert ratio.grad is None
    with pytest.raises(ValueError, match="unknown loss_fn 'cisp'"):
        GRPOConfig("cisp")


def drifted_log_probs_stay_finite(case: Case) -> None:
    config = GRPOConfig(clip_lower=case["input"]["eps"], clip_higher=case["input"]["eps"])
    expected = zip(case["expected"]["loss"], case["expected"]["grad_new"], strict=True)
    for given, (right, gradient) in zip(case["input"]["cases"], expected, strict=True):
        new = torch.tensor([given["new"]]).requires_grad_()
        mask = torch.tensor([given["mask"]]).bool()
        ratio = policy_ratio(config, new, torch.tensor([given["old"]]), mask)
        advantages = torch.full_like(new, given["advantage"]).detach()
        loss = own_window(
            config, grpo_terms(new, ratio, advantages, None, config).policy.losses, mask
        )
        loss.backward()
        assert loss.isfinite()
        assert new.grad.isfinite().all()
        if right != "finite":
            assert loss.item() == pytest.approx(right, abs=case["tolerance"])
            assert_close(new.grad[0].tolist(), gradient, rtol=0, atol=case["tolerance"])


POLICY_CASES: dict[str, Callable[[Case], None]] = {
    "BC06": four_reductions_are_four,
    "BC07": what_is_masked_leaves_both_sides,
    "BC09": cispo_is_its_formula,
    "BC10": drifted_log_probs_stay_finite,
}
