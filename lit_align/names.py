"""Names that other projects give to what is here; nothing is imported, so that they cost nothing.

TRL's are those of its release 1.16, but for a few that older ones had.
"""

# Losses of pairs: theirs, and ours for the same.
LOSS_ALIASES = {"sigmoid": "dpo", "sigmoid_norm": "dpo_norm"}
# Losses that are no option here, and what is in their place.
LOSSES = {
    "aot_pair": "loss=aot",
    "bnpo": "loss=grpo loss.aggregation=token_mean, over the whole step, not a micro-batch",
    "kto_pair": "no loss of pairs here: loss=kto learns from labelled completions",
}

_A_TERM = "the weight of the term sft of a sum of losses, as in loss=rpo loss.terms.sft.weight=1"
_A_LOSS = "not an option but a loss:"
# Options that no loss here has under that name: what they are here.
OPTIONS = {
    "average_log_prob": f"{_A_LOSS} dpo is of sums, dpo_norm of means per token",
    "delta": "the largest ratio, of loss.loss_fn=two_sided +loss.delta=4, or the lead that "
    "loss=slic_calibration asks for; bco and bco_pair measure their own",
    "epsilon": "clip_lower and clip_higher",
    "epsilon_high": "clip_higher, but of cispo 1 + clip_higher",
    "importance_sampling_level": "ratio_level",
    "mask_truncated_completions": "module.mask_truncated",
    "num_generations": "data.num_generations",
    "num_iterations": "data.num_iterations",
    "ref_model_mixup_alpha": "callbacks.reference_refresh.alpha, with loss=tr_dpo",
    "ref_model_sync_steps": "callbacks.reference_refresh.every_n_steps, with loss=tr_dpo",
    "scale_rewards": "the choice of advantage: group_mean_std, batch_std, or group_mean for none",
    "sync_ref_model": "a callback, ReferenceRefresh, which loss=tr_dpo adds",
    "top_entropy_quantile": "1 - entropy_share of token_filter=top_entropy",
    "vllm_importance_sampling_correction": "the choice of correction: none, tis, ...",
    "cpo_alpha": f"{_A_TERM}; of CPO, loss=cpo and loss=cpo_simpo have it",
    "f_alpha_divergence_coef": "1 - alpha of loss=dpo_alpha",
    "f_divergence_type": f"{_A_LOSS} dpo_forward_kl, dpo_js or dpo_alpha; reverse_kl is dpo",
    "gamma": "beta * gamma_beta_ratio of loss=simpo",
    "ipo_tau": "beta of loss=ipo",
    "ld_alpha": f"{_A_LOSS} ld_dpo has it",
    "loss_weights": "the weights of a sum of losses: terms with a weight each, as in loss=mpo",
    "nll_loss_coef": _A_TERM,
    "orpo_alpha": "the weight of the term orpo_odds_ratio of loss=orpo",
    "pref_ftx": _A_TERM,
    "reference_free": f"{_A_LOSS} cpo_preference is dpo without a reference",
    "rpo_alpha": _A_TERM,
    "sft_weight": _A_TERM,
    "simpo_gamma": "beta * gamma_beta_ratio of loss=simpo",
    "tau": "beta of loss=ipo, discopop_tau of loss=discopop",
    "use_weighting": "wpo=sampled, of any loss of pairs",
}
# Options of losses that, where the loss is a term of a sum, are something else of the term.
TERM_OPTIONS = {("orpo_odds_ratio", "beta"): "weight"}


def elsewhere(name: str, known: dict[str, str] = OPTIONS) -> str:
    """What an option that another project knows is called here, to end a message with."""
    return f"; {name} is {known[name]}" if name in known else ""
