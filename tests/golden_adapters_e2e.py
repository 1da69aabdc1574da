"""Golden cases on a tiny Llama: from token ids to loss, metrics, gradients and trained weights."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from golden_cases import Case, Result
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lit_align.logprobs import response_logprobs
from lit_align.logprobs.causal_lm import take_apart
from lit_align.losses import DPOConfig, PairLoss, TensorCache, compute_loss, wpo_weights
from lit_align.ops import IGNORE_INDEX, completion_lengths, masked_mean, masked_sum

SIDES = ("chosen", "rejected")
OPTIONS = ("beta", "label_smoothing")


def tiny_llama(case: Case, role: str = "policy") -> LlamaForCausalLM:
    """The model that the file describes: every weight from a formula, in float64."""
    described = case.file["model"]
    config = {k: v for k, v in described["config"].items() if k != "rotary"}
    # What initialises the weights is overwritten; the caller's random state is not to move.
    with torch.random.fork_rng():
        model = LlamaForCausalLM(LlamaConfig(**config)).double()
    fill(model, described["delta"][role])
    return model


@torch.no_grad()
def fill(model: LlamaForCausalLM, delta: float) -> None:
    """`weights_formula` of the file."""
    for number, parameter in enumerate(model.parameters(), start=1):
        j = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(0.37 * number + 0.731 * j + 0.0137 * j * j)
        base = 1 + 0.1 * wave if parameter.dim() == 1 else 0.15 * wave
        moved = base + delta * torch.sin(1.91 * number + 1.113 * j + 0.0071 * j * j)
        parameter.copy_(moved.view_as(parameter))


@cache
def batch_of(*pairs: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """All chosen rows, then all rejected ones, padded on the right with 0."""
    rows = [(prompt, pair[which]) for which in (0, 1) for prompt, *pair in pairs]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    filler = [width - len(prompt) - len(response) for prompt, response in rows]
    padded = list(zip(rows, filler, strict=True))
    return {
        "input_ids": torch.tensor([[*p, *r, *[0] * n] for (p, r), n in padded]),
        "attention_mask": torch.tensor([[1] * (width - n) + [0] * n for n in filler]),
        "labels": torch.tensor(
            [[*[IGNORE_INDEX] * len(p), *r, *[IGNORE_INDEX] * n] for (p, r), n in padded]
        ),
    }


def batch(case: Case) -> dict[str, Tensor]:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return batch_of(*(tuple(tuple(p[n]) for n in names) for p in case.raw["inputs"]["pairs"]))


def score(model: LlamaForCausalLM, case: Case, args: DPOConfig) -> dict[str, Tensor]:
    """Sums of log-probs, alignment terms and entropies over each response, (2B,) each."""
    rows = batch(case)
    scored = response_logprobs(model, **rows, alignment="sampled", entropy=True)
    logps = masked_mean if args.variant.average_logps else masked_sum
    return {
        "logps": logps(scored.logprobs, scored.mask),
        "sums": masked_sum(scored.logprobs, scored.mask),
        "alignment": scored.alignment.sum(-1),
        "entropy": scored.entropy.sum() / completion_lengths(rows["labels"]).sum(),
    }


def reference_cache(case: Case, args: DPOConfig) -> TensorCache:
    with torch.no_grad():
        logps = score(tiny_llama(case, "reference"), case, args)["logps"]
    return TensorCache(dict(zip(("chosen_logps", "rejected_logps"), logps.chunk(2), strict=True)))


def pair_loss(
    scored: Mapping[str, Tensor], reference: TensorCache, case: Case, args: DPOConfig
) -> PairLoss:
    """Through the dispatcher, like a training step."""
    chosen_labels, rejected_labels = batch(case)["labels"].chunk(2)
    alignment = dict(
        zip(
            (f"{side}_alignment_logps" for side in SIDES),
            scored["alignment"].chunk(2),
            strict=True,
        )
    )
    inputs = {
        "index": torch.arange(len(reference)),
        "chosen_labels": chosen_labels,
        "rejected_labels": rejected_labels,
        **alignment,
    }
    return compute_loss(args, inputs, *scored["logps"].chunk(2), reference)


def grad_norm(*parameters: Tensor) -> Tensor:
    return torch.cat([p.grad.flatten() for p in parameters]).norm()


def metrics(pair: PairLoss, scored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    margins = pair.chosen_rewards - pair.rejected_rewards
    chosen, rejected = scored["sums"].chunk(2)
    return {
        "rewards/chosen": pair.chosen_rewards.mean(),
        "rewards/rejected": pair.rejected_rewards.mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "entropy": scored["entropy"],
    }


def e2e_dpo(loss_type: str, case: Case) -> Result:
    set_to = {name: case.params[name] for name in OPTIONS if name in case.params}
    args = DPOConfig(loss_type, **set_to)
    model = tiny_llama(case)
    scored = score(model, case, args)
    pair = pair_loss(scored, reference_cache(case, args), case, args)
    loss = pair.losses.mean()
    loss.backward()
    lengths = completion_lengths(batch(case)["labels"])
    per_side = (scored["sums"], lengths, scored["alignment"])
    weights = wpo_weights(*(half for both in per_side for half in both.chunk(2)))
    return Result(
        {
            "loss": loss,
            "losses": pair.losses,
            "weights": weights,
            "grad_norm": grad_norm(*model.parameters()),
            "grad_norm_lm_head": grad_norm(model.lm_head.weight),
            "grad_norm_embed": grad_norm(model.model.embed_tokens.weight),
            "metrics": metrics(pair, scored),
        }
    )


def e2e_training_trajectory(loss_type: str, case: Case) -> Result:
    params = case.params
    assert params["optimizer"] == "adamw"
    assert params["gradient_clipping"] is None
    args = DPOConfig(loss_type, beta=params["beta"])
    model, reference = tiny_llama(case), reference_cache(case, args)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=params["lr"],
        betas=params["betas"],
        eps=params["eps"],
        weight_decay=params["weight_decay"],
    )
    losses, norms = [], []
    for step in range(params["steps"] + 1):
        pair = pair_loss(score(model, case, args), reference, case, args)
        losses.append(pair.losses.mean())
        if step < params["steps"]:
            optimizer.zero_grad()
            losses[-1].backward()
            norms.append(grad_norm(*model.parameters()))
            optimizer.step()
    return Result(
        {
            "loss_before_each_step_then_final": torch.stack(losses),
            "grad_norm_before_each_step": torch.stack(norms),
            "final_rewards_margin": (pair.chosen_rewards - pair.rejected_rewards).mean(),
        }
    )


def e2e_model(case: Case) -> Result:
    """Logits of the real tokens, as body and head make them."""
    ids, attention_mask = (
        torch.tensor(case.raw["inputs"]["collated"][name])
        for name in ("input_ids", "attention_mask")
    )
    body_and_head = take_apart(tiny_llama(case))
    with torch.no_grad():
        logits = body_and_head.head(body_and_head.hidden_states(ids, attention_mask))
    real = logits[attention_mask.bool()]
    return Result(
        {
            "policy_logits_row0_last": logits[0, attention_mask[0].sum() - 1],
            "policy_logits_sum": real.sum(),
            "policy_logits_abs_sum": real.abs().sum(),
        }
    )


def e2e_sequence_logps(case: Case) -> Result:
    outputs: dict[str, Any] = {}
    for role in ("policy", "reference"):
        with torch.no_grad():
            scored = response_logprobs(tiny_llama(case, role), **batch(case))
        outputs[f"{role}_token_logps"] = scored.logprobs
        halves = masked_sum(scored.logprobs, scored.mask).chunk(2)
        outputs |= {f"{role}_{side}_logps": half for side, half in zip(SIDES, halves, strict=True)}
    return Result(outputs)


E2E_ADAPTERS: dict[str, Callable[[Case], Result]] = {
    "e2e_dpo[sigmoid]": partial(e2e_dpo, "sigmoid"),
    "e2e_dpo[sigmoid use_weighting]": partial(e2e_dpo, "wpo"),
    "e2e_dpo[sigmoid_norm]": partial(e2e_dpo, "sigmoid_norm"),
    "e2e_model": e2e_model,
    "e2e_sequence_logps": e2e_sequence_logps,
    "e2e_training_trajectory[sigmoid]": partial(e2e_training_trajectory, "sigmoid"),
    "e2e_training_trajectory[sigmoid_norm]": partial(e2e_training_trajectory, "sigmoid_norm"),
    "e2e_wpo_official": partial(e2e_dpo, "wpo"),
}
