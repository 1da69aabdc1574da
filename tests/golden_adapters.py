"""How our code answers each golden variant: one small function each, in a table by name.

An adapter feeds a case's inputs to the package and renames what comes back. It computes nothing
that the package should.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from golden_adapters_advantages import (
    ADVANTAGES_ADAPTERS,
    ADVANTAGES_LEFT_OUT,
    ADVANTAGES_OVERRULED_WHERE,
    NAMED_BY,
)
from golden_adapters_combined import COMBINED_ADAPTERS
from golden_adapters_e2e import E2E_ADAPTERS
from golden_adapters_grpo_e2e import GRPO_E2E_ADAPTERS
from golden_adapters_pairs import PAIRS_ADAPTERS, PAIRS_LEFT_OUT
from golden_adapters_policy import POLICY_ADAPTERS, POLICY_LEFT_OUT, POLICY_NAMED_BY
from golden_adapters_surrogates import SURROGATES_ADAPTERS, SURROGATES_LEFT_OUT
from golden_adapters_unpaired import UNPAIRED_ADAPTERS
from golden_adapters_weights import WEIGHTS_ADAPTERS, WEIGHTS_LEFT_OUT
from golden_cases import Case, Result
from golden_overruled_policy import POLICY_OVERRULED_WHERE
from golden_overruled_surrogates import SURROGATES_OVERRULED_WHERE
from replay import Replay
from torch import Tensor
from torch.nn import functional as F

from lit_align.logprobs import response_logprobs, token_terms
from lit_align.losses import DPOConfig, PairLoss, TensorCache, compute_loss, wpo_weights
from lit_align.ops import IGNORE_INDEX, completion_lengths, completion_mask, masked_mean, masked_sum

SIDES = ("chosen", "rejected")
# The same knob under another project's name; the case's own name for it is used.
SYNONYMS = {"simpo_gamma"}

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
LEFT_OUT = {
    "metrics/logits/*": "mean logits of a whole vocabulary are never computed",
    "metrics/mean_token_accuracy": "the likeliest token is never looked for",
    **ADVANTAGES_LEFT_OUT,
    **PAIRS_LEFT_OUT,
    **POLICY_LEFT_OUT,
    **SURROGATES_LEFT_OUT,
    **WEIGHTS_LEFT_OUT,
}


def config(loss_type: str, case: Case, *dropped: str) -> DPOConfig:
    """The case's parameters; any that the loss does not take is an error, unless dropped here."""
    omitted = SYNONYMS | set(dropped)
    return DPOConfig(loss_type, **{k: v for k, v in case.params.items() if k not in omitted})


def loss_of(
    args: DPOConfig, logps: dict[str, Tensor], batch: dict[str, Tensor] | None = None
) -> PairLoss:
    """Through the dispatcher, the reference looked up in a cache."""
    cache = None
    if args.variant.reads_reference:
        cache = TensorCache({f"{s}_logps": logps[f"reference_{s}_logps"] for s in SIDES})
    policy = [logps[f"policy_{side}_logps"] for side in SIDES]
    index = torch.arange(len(policy[0]))
    return compute_loss(args, {"index": index, **(batch or {})}, *policy, cache)


def pair_result(pair: PairLoss, wrt: dict[str, Any], **outputs: Tensor) -> Result:
    loss = pair.losses.mean()
    return Result({**pair._asdict(), "loss": loss, **outputs}, loss, wrt)


def dpo(case: Case) -> Result:
    logps = case.tensors()
    return pair_result(loss_of(config("sigmoid", case), logps), logps)


def dpo_reference_free(case: Case) -> Result:
    """With a reference to which all responses are alike."""
    logps = case.tensors()
    flat = {f"reference_{s}_logps": torch.zeros_like(logps[f"reference_{s}_logps"]) for s in SIDES}
    return pair_result(loss_of(config("dpo", case, "reference_free"), {**logps, **flat}), logps)


def simpo(case: Case) -> Result:
    logps = case.tensors()
    return pair_result(loss_of(config("simpo", case), logps), logps)


def averages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over each response of log-probs per token."""
    return {
        f"{model}_{side}_logps": masked_mean(
            tensors[f"{model}_{side}_token_logps"], tensors[f"{side}_mask"].bool()
        )
        for model in ("policy", "reference")
        for side in SIDES
        if f"{model}_{side}_token_logps" in tensors
    }


def from_tokens(loss_type: str) -> Callable[[Case], Result]:
    """A loss on means, which the case gives token by token."""

    def adapter(case: Case) -> Result:
        tensors = case.tensors()
        logps = averages(tensors)
        shown = {name.replace("_logps", "_avg_logps"): value for name, value in logps.items()}
        return pair_result(loss_of(config(loss_type, case), logps), tensors, **shown)

    return adapter


def wpo(case: Case) -> Result:
    """From logits: log-probs and alignment terms are made by the package as well."""
    tensors = case.tensors()
    logps, batch, wrt = {}, {}, {}
    for side in SIDES:
        labels, mask = tensors[f"{side}_labels"], tensors[f"{side}_mask"].bool()
        terms = token_terms(tensors[f"{side}_logits"], labels.clamp(min=0), alignment="sampled")
        wrt[f"policy_{side}_token_logps"] = terms.logprobs
        logps[f"policy_{side}_logps"] = masked_sum(terms.logprobs, mask)
        logps[f"reference_{side}_logps"] = tensors[f"reference_{side}_token_logps"].sum(-1)
        batch[f"{side}_alignment_logps"] = masked_sum(terms.alignment, mask)
        # The case's labels stand where they are predicted from, ours one place later.
        batch[f"{side}_labels"] = F.pad(labels, (1, 0), value=IGNORE_INDEX)
    wrt["policy_logits_grad_norm"] = tuple(tensors[f"{side}_logits"] for side in SIDES)
    policy = {name: logps[name] for name in ("policy_chosen_logps", "policy_rejected_logps")}
    weights = wpo_weights(
        *policy.values(),
        *(completion_lengths(batch[f"{side}_labels"]) for side in SIDES),
        *(batch[f"{side}_alignment_logps"] for side in SIDES),
    )
    pair = loss_of(config("wpo", case), logps, batch)
    return pair_result(pair, wrt, weights=weights, **policy)


def wpo_of_sums(case: Case) -> Result:
    """From sums and lengths alone."""
    logps = case.tensors()
    labels = {f"{s}_labels": F.pad(logps[f"{s}_mask"] - 1, (1, 0)) for s in SIDES}
    batch = {name: labels[name].where(labels[name] == 0, IGNORE_INDEX) for name in labels}
    return pair_result(loss_of(config("wpo", case), logps, batch), logps)


def sequence_logps(case: Case) -> Result:
    """Through `response_logprobs`, on a model that has the case's logits already."""
    logits, labels = (tensors := case.tensors())["logits"], tensors["labels"]
    scored = response_logprobs(Replay(logits), labels, torch.ones_like(labels), labels)
    outputs = {
        "sum_logps": masked_sum(scored.logprobs, scored.mask),
        "average_logps": masked_mean(scored.logprobs, scored.mask),
        "token_logps_masked": scored.logprobs,
        "n_tokens": completion_lengths(labels),
    }
    asked = outputs["average_logps" if case.params["average_log_prob"] else "sum_logps"]
    return Result(outputs, asked.sum(), tensors)


def token_logps_entropy(case: Case) -> Result:
    tensors = case.tensors()
    temperature = case.params["temperature"]
    terms = token_terms(tensors["logits"], tensors["index"], temperature=temperature, entropy=True)
    return Result({"token_logps": terms.logprobs, "entropy": terms.entropy})


def sequence_logps_packed(case: Case) -> Result:
    """Documents of a pack, each a row of its own: the two layouts must agree."""
    tensors = case.tensors()
    ends = tensors["cu_seq_lens"].tolist()
    spans = [slice(a, b) for a, b in pairwise(ends)]
    logits = [tensors["logits"][0, span] for span in spans]
    labels = [tensors["labels"][0, span] for span in spans]
    logits = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    scored = response_logprobs(Replay(logits), labels, torch.ones_like(labels), labels)
    return Result({"logps": masked_mean(scored.logprobs, scored.mask)})


def sequence_logps_from_token_logps(case: Case) -> Result:
    tensors = case.tensors()
    logprobs = tensors["per_token_logps"][:, :-1]
    return Result({"average_logps": masked_mean(logprobs, completion_mask(tensors["labels"]))})


ADAPTERS: dict[str, Callable[[Case], Result]] = {
    "dpo_norm": from_tokens("sigmoid_norm"),
    "dpo_reference_free": dpo_reference_free,
    "dpo_sigmoid": dpo,
    "dpo_sigmoid__trl_ignores_label_smoothing": dpo,
    "sequence_logps_avg": sequence_logps,
    "sequence_logps_from_token_logps": sequence_logps_from_token_logps,
    "sequence_logps_packed": sequence_logps_packed,
    "sequence_logps_sum": sequence_logps,
    "simpo": simpo,
    "simpo_tokens": from_tokens("simpo"),
    "token_logps_entropy": token_logps_entropy,
    "wpo": wpo,
    "wpo__open_instruct": wpo_of_sums,
    "wpo__trl_no_clamp": wpo,
    **ADVANTAGES_ADAPTERS,
    **COMBINED_ADAPTERS,
    **E2E_ADAPTERS,
    **GRPO_E2E_ADAPTERS,
    **PAIRS_ADAPTERS,
    **POLICY_ADAPTERS,
    **SURROGATES_ADAPTERS,
    **UNPAIRED_ADAPTERS,
    **WEIGHTS_ADAPTERS,
}


def a_weight_passes_1(case: Case) -> bool:
    """Whether WPO's bound makes a difference."""
    tensors = case.tensors()
    means = [
        masked_mean(
            tensors[f"policy_{side}_token_logps"] - tensors[f"{side}_log_sum_sq_probs"],
            tensors[f"{side}_mask"].bool(),
        )
        for side in SIDES
    ]
    return bool((sum(means) > 0).any())


# Variants that DISAGREEMENTS.md overrules in part: where they must differ from us.
OVERRULED_WHERE = {
    "wpo__trl_no_clamp": a_weight_passes_1,
    **ADVANTAGES_OVERRULED_WHERE,
    **POLICY_OVERRULED_WHERE,
    **SURROGATES_OVERRULED_WHERE,
}

# What does not make another loss of an end-to-end case.
PLAIN = {"loss_type", "beta", "lr", "optimizer", "weight_decay", "betas", "eps", "steps"}
PLAIN |= {"gradient_clipping"}


def mapped_as(case: Case) -> str:
    """The name an adapter goes by: the variant, and what it was set to where that matters."""
    named_by = {**NAMED_BY, **POLICY_NAMED_BY, "e2e_grpo": lambda case: case.params["loss_type"]}
    if case.variant in named_by:
        return f"{case.variant}[{named_by[case.variant](case)}]"
    losses = case.params.get("loss_type")
    if not isinstance(losses, list):
        return case.variant
    return f"{case.variant}[{' '.join([*losses, *sorted(case.params.keys() - PLAIN)])}]"
