"""How our code answers the golden cases of sums of losses, and of what reads more than responses.

All go through the module, which makes of token log-probs what the terms read.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from golden_adapters_e2e import batch, grad_norm, score, tiny_llama
from golden_cases import Case, Result
from replay import Replay
from torch import Tensor
from torch.nn import functional as F

from lit_align.losses import CombinedConfig, DPOConfig, PairConfig, PairLoss, TensorCache
from lit_align.modules import DPOModule
from lit_align.modules.pair_logps import PairLogps, head_mask, pair_logps
from lit_align.modules.pair_metrics import pair_metrics
from lit_align.ops import masked_sum

Adapter = Callable[[Case], Result]
SIDES = ("chosen", "rejected")


def losses_of(
    config: PairConfig,
    rows: Mapping[str, Tensor],
    logps: PairLogps,
    reference: PairLogps | None = None,
) -> tuple[PairLoss, dict[str, PairLoss]]:
    """The sum and its terms, as a step of the module has them."""
    module = DPOModule("unused", config)
    if reference is not None:
        sums = reference.sums("")
        module.reference_cache = TensorCache({k.removeprefix("_"): v for k, v in sums.items()})
    return module.pair_loss(rows, logps), module.pair_losses(rows, logps)


def of_tokens(make: Callable[[Mapping[str, Any]], PairConfig]) -> Adapter:
    """From log-probs token by token, with the config that is made of the case's parameters."""

    def adapter(case: Case) -> Result:
        tensors = case.tensors()
        mask = stacked(tensors, "{}_mask").bool()
        index = torch.arange(len(mask) // 2)
        policy, reference = (sums(tensors, mask, model) for model in ("policy", "reference"))
        pair, terms = losses_of(make(case.params), {"index": index}, policy, reference)
        of_terms = {f"{TERMS[name]}_loss": term.losses.mean() for name, term in terms.items()}
        return result(pair, tensors, **of_terms)

    return adapter


def stacked(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Chosen above rejected, padded with zeros to one width."""
    halves = [tensors[name.format(side)] for side in SIDES]
    width = max(half.shape[1] for half in halves)
    fillers = [[0] * (2 * half.dim() - 3) for half in halves]
    return torch.cat(
        [
            F.pad(half, (*zeros, width - half.shape[1]))
            for half, zeros in zip(halves, fillers, strict=True)
        ]
    )


def sums(tensors: Mapping[str, Tensor], mask: Tensor, model: str) -> PairLogps:
    logprobs = stacked(tensors, f"{model}_{{}}_token_logps")
    chosen_head, rejected_head = masked_sum(logprobs, head_mask(mask)).chunk(2)
    return PairLogps(
        *masked_sum(logprobs, mask).chunk(2),
        *mask.sum(-1).chunk(2),
        chosen_head=chosen_head,
        rejected_head=rejected_head,
    )


def of_logits(make: Callable[[Mapping[str, Any]], PairConfig], nll: str) -> Adapter:
    """From ids and logits; `nll` is the term of likelihood, also shown by itself."""

    def adapter(case: Case) -> Result:
        tensors, config = case.tensors(), make(case.params)
        logps = pair_logps(Replay(stacked(tensors, "{}_full_logits")), tensors, config)
        pair, terms = losses_of(config, tensors, logps)
        logits = tuple(tensors[f"{side}_full_logits"] for side in SIDES)
        return result(
            pair,
            {"grad_norm_wrt_logits": logits},
            nll_loss=terms[nll].losses.mean() if nll in terms else torch.tensor(0.0),
            mean_log_odds=(pair.chosen_rewards - pair.rejected_rewards).mean(),
            **reported(logps, config),
        )

    return adapter


def reported(logps: PairLogps, config: PairConfig) -> dict[str, Tensor]:
    """Means over the batch of sums, of means per token, and of which of the two the loss reads."""
    policy = logps.sums("mean")
    averages = logps.per_token(policy)
    first = next(iter(config.terms.values())).config
    read = averages if first.average_logps else policy
    return {
        **{f"mean_{side}_logps": read[f"mean_{side}_logps"].mean() for side in SIDES},
        **{f"mean_{side}_avg_logps": averages[f"mean_{side}_logps"].mean() for side in SIDES},
    }


def result(pair: PairLoss, wrt: Mapping[str, Any], **outputs: Tensor) -> Result:
    loss = pair.losses.mean()
    means = {f"mean_{side}_rewards": getattr(pair, f"{side}_rewards").mean() for side in SIDES}
    return Result({"loss": loss, "losses": pair.losses, **means, **outputs}, loss, wrt)


def e2e(make: Callable[[Mapping[str, Any]], PairConfig]) -> Adapter:
    """On the tiny Llama, from token ids to gradients."""

    def adapter(case: Case) -> Result:
        model, config = tiny_llama(case), make(case.params)
        halves = {name: rows.chunk(2) for name, rows in batch(case).items()}
        rows = {
            f"{side}_{name}": half
            for name, both in halves.items()
            for side, half in zip(SIDES, both, strict=True)
        }
        rows["index"] = torch.arange(len(rows["chosen_labels"]))
        logps = pair_logps(model, rows, config)
        with torch.no_grad():
            reference = pair_logps(tiny_llama(case, "reference"), rows, config)
        pair, terms = losses_of(config, rows, logps, reference)
        loss = pair.losses.mean()
        loss.backward()
        metrics = {name: value.double().mean() for name, value in pair_metrics(pair, logps).items()}
        metrics["entropy"] = score(model, case, DPOConfig("dpo"))["entropy"]
        if "sft" in terms:
            metrics["nll_loss"] = terms["sft"].losses.mean()
        return Result(
            {
                "loss": loss,
                "grad_norm": grad_norm(*model.parameters()),
                "grad_norm_lm_head": grad_norm(model.lm_head.weight),
                "grad_norm_embed": grad_norm(model.model.embed_tokens.weight),
                "metrics": metrics,
            }
        )

    return adapter


def slic_of_halos(case: Case) -> Result:
    """Sums stand for responses of one token, as in the case."""
    logps = case.tensors()
    ones = torch.ones(len(logps["policy_chosen_logps"]), dtype=torch.int64)
    sums = PairLogps(*(logps[f"policy_{side}_logps"] for side in SIDES), ones, ones)
    pair, _ = losses_of(slic(case.params), {}, sums)
    return Result({"loss": pair.losses.mean(), "losses_matrix": pair.losses})


# What the terms of a sum are called in the cases.
TERMS = {"dpo": "dpo", "sft": "nll", "bco_pair": "bco", "ld_dpo": "ld"}


def ld_dpo(params: Mapping[str, Any]) -> PairConfig:
    return DPOConfig("ld_dpo", beta=params["beta"], ld_alpha=params["ld_alpha"])


def rpo(params: Mapping[str, Any]) -> PairConfig:
    weight = params.get("rpo_alpha", params.get("nll_loss_coef"))
    return CombinedConfig(
        {"dpo": {"weight": 1.0, "beta": params["beta"]}, "sft": {"weight": weight}}
    )


def mpo(params: Mapping[str, Any]) -> PairConfig:
    """A list of losses with one beta, each by TRL's name."""
    weights = dict(zip(params["loss_types"], params["loss_weights"], strict=True))
    options = {name: {} if name == "sft" else {"beta": params["beta"]} for name in weights}
    return CombinedConfig({name: {"weight": weights[name], **options[name]} for name in weights})


def cpo(params: Mapping[str, Any]) -> PairConfig:
    """TRL's gamma is the whole lead of rewards; a term of weight 0 is left out."""
    beta = params["beta"]
    preference = {"cpo_preference": {"weight": 1.0, "beta": beta}}
    if params["loss_type"] == "simpo":
        ratio = params["simpo_gamma"] / beta
        preference = {"simpo": {"weight": 1.0, "beta": beta, "gamma_beta_ratio": ratio}}
    likelihood = {"sft": {"weight": params["cpo_alpha"]}} if params["cpo_alpha"] else {}
    return CombinedConfig({**preference, **likelihood})


def orpo(params: Mapping[str, Any]) -> PairConfig:
    odds = {"weight": params["lambda"]}
    return CombinedConfig({"orpo_odds_ratio": odds, "sft_whole": {"weight": 1.0}})


def slic(params: Mapping[str, Any]) -> PairConfig:
    calibration = {"weight": 1.0, "delta": params["delta"]}
    likelihood = {"weight": params["lambda_coef"]}
    return CombinedConfig({"slic_calibration": calibration, "sft": likelihood})


COMBINED_ADAPTERS: dict[str, Adapter] = {
    "cpo_total": of_logits(cpo, "sft"),
    "e2e_cpo": e2e(cpo),
    "e2e_dpo[sigmoid ld_alpha]": e2e(ld_dpo),
    "ld_dpo": of_tokens(ld_dpo),
    "mpo_mixture": of_tokens(mpo),
    "orpo_total": of_logits(orpo, "sft_whole"),
    "rpo_sigmoid_plus_nll__openrlhf": of_tokens(rpo),
    "rpo_sigmoid_plus_sft": of_tokens(rpo),
    "slic_hf__halos_broadcast": slic_of_halos,
}
