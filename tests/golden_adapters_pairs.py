"""How our code answers the golden cases of preference losses other than DPO, SimPO and WPO."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from golden_adapters_e2e import e2e_dpo, e2e_training_trajectory
from golden_cases import Case, Result
from torch import Tensor

from lit_align.losses import (
    RUNNING,
    CombinedConfig,
    DPOConfig,
    PairLoss,
    TensorCache,
    UnpairedConfig,
    compute_loss,
    compute_unpaired_loss,
    moments,
    weighted_sum,
)
from lit_align.ops import masked_mean

Adapter = Callable[[Case], Result]
SIDES = ("chosen", "rejected")

# The same knob under a second name; which loss it is, where its adapter says so.
SYNONYMS = {"tau", "cpo_alpha", "loss_type", "f_divergence_type"}
RENAMED = {"alpha_official": "alpha"}
DIVERGENCES = {"forward_kl": "dpo_forward_kl", "js_divergence": "dpo_js"}

# Outputs of mapped cases that nothing of ours corresponds to, each with the reason.
PAIRS_LEFT_OUT = {
    "mean_log_sigmoid": "minus the loss over its weight, which is compared",
}


def config(loss_type: str, case: Case, *dropped: str) -> DPOConfig:
    """The case's parameters; any that the loss does not take is an error, unless dropped here."""
    omitted = SYNONYMS | set(dropped)
    given = {RENAMED.get(k, k): v for k, v in case.params.items() if k not in omitted}
    return DPOConfig(loss_type, **given)


def loss_of(
    args: DPOConfig, logps: dict[str, Tensor], batch: dict[str, Tensor] | None = None
) -> PairLoss:
    """Through the dispatcher; log-probs that are not there are 0, which is a flat reference."""
    policy = [logps[f"policy_{side}_logps"] for side in SIDES]
    reference = {
        f"{side}_logps": logps.get(f"reference_{side}_logps", torch.zeros_like(policy[0]))
        for side in SIDES
    }
    index = torch.arange(len(policy[0]))
    return compute_loss(args, {"index": index, **(batch or {})}, *policy, TensorCache(reference))


def result(pair: PairLoss, wrt: dict[str, Tensor]) -> Result:
    loss, margins = pair.losses.mean(), pair.chosen_rewards - pair.rejected_rewards
    outputs = {
        **pair._asdict(),
        # What the authors of f-DPO report is what stands inside the loss.
        **{f"f_{side}_rewards_official": getattr(pair, f"{side}_rewards") for side in SIDES},
        "log_odds": margins,
        "mean_log_odds": margins.mean(),
        "loss": loss,
    }
    return Result(outputs, loss, wrt)


def of_logps(loss_type: str, *dropped: str) -> Adapter:
    """A loss on log-probs that are sums or means already."""

    def adapter(case: Case) -> Result:
        logps = case.tensors()
        return result(loss_of(config(loss_type, case, *dropped), logps), logps)

    return adapter


def ipo_of_lengths(case: Case) -> Result:
    """From sums and lengths: means are made as the module makes them."""
    tensors = case.tensors()
    logps = {
        f"{model}_{side}_logps": tensors[f"{model}_{side}_logps"] / tensors[f"{side}_lengths"]
        for model, side in product(("policy", "reference"), SIDES)
    }
    return result(loss_of(config("ipo", case), logps), tensors)


def of_tokens(loss_type: str, *dropped: str) -> Adapter:
    """A loss on means, which the case gives token by token."""

    def adapter(case: Case) -> Result:
        tensors = case.tensors()
        logps = {
            f"{model}_{side}_logps": masked_mean(
                tensors[f"{model}_{side}_token_logps"], tensors[f"{side}_mask"].bool()
            )
            for model, side in product(("policy", "reference"), SIDES)
        }
        pair = loss_of(config(loss_type, case, *dropped), logps)
        # A gradient is expected of every input, of those that the loss does not read as well.
        unread = sum(0 * tensor.sum() for tensor in logps.values())
        return result(pair._replace(losses=pair.losses + unread), tensors)

    return adapter


def exo_official(case: Case) -> Result:
    """With the same label smoothing, which that code takes as a logarithm."""
    logps = case.tensors()
    smoothing = torch.tensor(case.params["log_epsilon"], dtype=torch.float64).exp().item()
    args = DPOConfig("exo_pair", beta=case.params["beta"], label_smoothing=smoothing)
    return result(loss_of(args, logps), logps)


def bco_running_mean(case: Case) -> Result:
    """Each response by itself, with the mean over everything seen up to and with this batch."""
    logps, args = case.tensors(), UnpairedConfig("bco", beta=case.params["beta"])
    both = {
        f"{model}_logps": torch.cat([logps[f"{model}_{side}_logps"] for side in SIDES])
        for model in ("policy", "reference")
    }
    number = len(both["policy_logps"])
    rows = {**both, "labels": torch.arange(number) < number // 2}
    mean = RUNNING["delta"]
    seen = moments(mean.values(args, compute_unpaired_loss(args, rows, both["policy_logps"])))
    delta = mean.read(mean.after(mean.start, seen, args))
    losses, rewards = compute_unpaired_loss(args, {**rows, "delta": delta}, both["policy_logps"])
    chosen, rejected = rewards.chunk(2)
    outputs = {"losses": losses, "loss": losses.mean(), "delta": delta}
    outputs |= {"chosen_rewards": chosen, "rejected_rewards": rejected}
    return Result(outputs, losses.mean(), logps)


def sppo_soft(case: Case) -> Result:
    """That code takes both responses' chances to win, which add up to 1 here."""
    logps, params = case.tensors(), case.params
    wins = torch.full_like(logps["policy_chosen_logps"], params["chosen_probs_win"])
    lost = torch.full_like(wins, params["chosen_probs_lose"])
    torch.testing.assert_close(wins + lost, torch.ones_like(wins))
    args = DPOConfig("sppo_soft", beta=params["beta"])
    return result(loss_of(args, logps, {"label_prob": wins}), logps)


def dpo_alpha_of_trl(case: Case) -> Result:
    """TRL counts its coefficient from the other end."""
    logps, params = case.tensors(), case.params
    args = DPOConfig("dpo_alpha", beta=params["beta"], alpha=1 - params["f_alpha_divergence_coef"])
    return result(loss_of(args, logps), logps)


def e2e_f_divergence(case: Case) -> Result:
    return e2e_dpo(DIVERGENCES[case.params["f_divergence_type"]], case)


def alphapo(case: Case) -> Result:
    """TRL's gamma is the whole lead of rewards, ours its share of beta."""
    logps, params = case.tensors(), case.params
    gamma = (params["simpo_gamma"] or 0.0) / params["beta"]
    args = DPOConfig("alphapo", beta=params["beta"], alpha=params["alpha"], gamma_beta_ratio=gamma)
    return result(loss_of(args, logps), logps)


def orpo_or_term(case: Case) -> Result:
    """What others call beta is the weight of the term."""
    logps = case.tensors()
    args = CombinedConfig({"orpo_odds_ratio": {"weight": case.params["beta"]}})
    ((name, term),) = args.terms.items()
    return result(weighted_sum(args, {name: loss_of(term.config, logps)}), logps)


PAIRS_ADAPTERS: dict[str, Adapter] = {
    "alphapo": alphapo,
    "aot": of_logps("aot"),
    "aot_unpaired": of_logps("aot_unpaired"),
    "apo_down": of_logps("apo_down"),
    "apo_zero": of_logps("apo_zero"),
    "bco_pair": of_logps("bco_pair"),
    "bco_running_mean": bco_running_mean,
    "cpo": of_logps("cpo_preference"),
    "cpo_hinge": of_logps("hinge", "label_smoothing"),
    "cpo_ipo": of_logps("ipo", "label_smoothing"),
    "discopop": of_logps("discopop"),
    "dpo_f_alpha_divergence": of_logps("dpo_alpha", "f_alpha_divergence_coef_trl"),
    "dpo_f_alpha_divergence__trl_f32": dpo_alpha_of_trl,
    "dpo_f_forward_kl": of_logps("dpo_forward_kl"),
    "dpo_f_js_divergence": of_logps("dpo_js"),
    "e2e_dpo[aot]": partial(e2e_dpo, "aot"),
    "e2e_dpo[aot_unpaired]": partial(e2e_dpo, "aot_unpaired"),
    "e2e_dpo[apo_zero]": partial(e2e_dpo, "apo_zero"),
    "e2e_dpo[bco_pair]": partial(e2e_dpo, "bco_pair"),
    "e2e_dpo[exo_pair label_smoothing]": partial(e2e_dpo, "exo_pair"),
    "e2e_dpo[hinge]": partial(e2e_dpo, "hinge"),
    "e2e_dpo[ipo]": partial(e2e_dpo, "ipo"),
    "e2e_dpo[robust label_smoothing]": partial(e2e_dpo, "robust"),
    "e2e_dpo[sigmoid f_divergence_type]": e2e_f_divergence,
    "e2e_dpo[sppo_hard]": partial(e2e_dpo, "sppo_hard"),
    "e2e_training_trajectory[ipo]": partial(e2e_training_trajectory, "ipo"),
    "exo_pair": of_logps("exo_pair"),
    "exo_pair__official_code": exo_official,
    "hinge": of_logps("hinge"),
    "ipo_avg": ipo_of_lengths,
    "ipo_avg_tokens": of_tokens("ipo"),
    "ipo_avg__halos_nonzero_count": of_tokens("ipo"),
    "ipo_sum": of_logps("ipo_sum"),
    "nca_pair": of_logps("nca_pair"),
    "orpo_or_term": orpo_or_term,
    "orpo_or_term__official_code": orpo_or_term,
    "orpo_or_term__trl_f32": orpo_or_term,
    "robust": of_logps("robust"),
    "sft_term": of_tokens("sft"),
    "simpo_hinge": of_logps("simpo_hinge"),
    "slic_hf_calibration": of_logps("slic_calibration"),
    "sppo_hard": of_logps("sppo_hard"),
    "sppo_hard__official_code": of_logps("sppo_hard", "chosen_probs_win", "chosen_probs_lose"),
    "sppo_soft__official_code": sppo_soft,
}
