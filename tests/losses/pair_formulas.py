"""The papers' formulas of preference losses, at our defaults, as naively as they read.

Probabilities are exponentials, a sigmoid is a fraction, a logarithm is taken last: right in float64
and for moderate numbers only, and nothing of the package is called. w is the preferred response, l
the other one, r the reference.
"""

import torch


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def logistic(x):
    return -torch.log(sigmoid(x))


def positive(x):
    return torch.where(x > 0, x, 0 * x)


class Pairs:
    """Ratios of probabilities of the responses, to the reference's and to each other's."""

    def __init__(self, w, l, rw=None, rl=None):
        self.w, self.l = torch.exp(w), torch.exp(l)
        self.odds = self.w / self.l
        if rw is not None:
            self.ratio_w, self.ratio_l = self.w / torch.exp(rw), self.l / torch.exp(rl)
            self.margin = torch.log(self.ratio_w / self.ratio_l)
            self.log_w, self.log_l = torch.log(self.ratio_w), torch.log(self.ratio_l)


def with_reference(formula):
    """Of a function of the ratios alone, a function of the arguments of a loss."""

    def losses(
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        **others,
    ):
        pairs = Pairs(
            policy_chosen_logps,
            policy_rejected_logps,
            reference_chosen_logps,
            reference_rejected_logps,
        )
        return formula(pairs, **others)

    return losses


def without_reference(formula):
    def losses(policy_chosen_logps, policy_rejected_logps, **others):
        return formula(Pairs(policy_chosen_logps, policy_rejected_logps), **others)

    return losses


def of_divergence(derivative, beta=0.1):
    """f-DPO: beta * f'(u) is the reward, whatever its constant."""
    return with_reference(
        lambda p: logistic(beta * derivative(p.ratio_w) - beta * derivative(p.ratio_l))
    )


def discopop(p, beta=0.05, tau=0.05):
    x = beta * p.margin
    blend = sigmoid(x / tau)
    return (1 - blend) * logistic(x) + blend * torch.exp(-x)


def exo_pair(p, beta=0.1, eps=1e-3):
    """The KL between two distributions over two responses."""
    strengths = torch.stack([p.ratio_w**beta, p.ratio_l**beta])
    preferred = strengths / strengths.sum(0)
    labels = torch.tensor([[1 - eps], [eps]], dtype=torch.float64)
    return (preferred * torch.log(preferred / labels)).sum(0)


def robust(p, margin, beta=0.1, eps=0.1):
    right, flipped = logistic(beta * p.margin - margin), logistic(-beta * p.margin - margin)
    return ((1 - eps) * right - eps * flipped) / (1 - 2 * eps)


def squares(p, beta=1e-3):
    return (p.log_w - 0.5 / beta) ** 2 + (p.log_l + 0.5 / beta) ** 2


def sppo_soft(p, label_prob, eta=1e3):
    """Each response's payoff is its chance to win, less the even one."""
    lost = 1 - label_prob
    return (p.log_w - eta * (label_prob - 0.5)) ** 2 + (p.log_l - eta * (lost - 0.5)) ** 2


def nca_pair(p, beta=0.01):
    w, l = p.ratio_w**beta, p.ratio_l**beta
    return torch.log(1 + 1 / w) + torch.log(1 + w) / 2 + torch.log(1 + l) / 2


def bco_pair(p, delta, beta=0.01):
    w, l = p.ratio_w**beta / torch.exp(delta), p.ratio_l**beta / torch.exp(delta)
    return -torch.log(w / (1 + w)) - torch.log(1 / (1 + l))


def beta_dpo(p, draws, lead_mean, lead_std, beta=0.1, alpha=0.6, dropped=0.2, momentum=0.9):
    """Kept are those whose waiting time, exponentially distributed, is over first."""
    mean = momentum * lead_mean + (1 - momentum) * p.margin.mean()
    std = momentum * lead_std + (1 - momentum) * p.margin.std()
    waiting = -torch.log(draws) / torch.exp(-(((p.margin - mean) / std) ** 2) / 2)
    number = int(len(waiting) * (1 - dropped))
    kept = waiting <= sorted(waiting)[number - 1]
    strength = beta * (1 + alpha * (p.margin[kept].mean() - mean))
    strength = torch.maximum(strength, 0 * strength + 1e-3).detach()
    return torch.where(kept, logistic(strength * p.margin), 0 * p.margin) * len(kept) / number


def by_rank(values, others):
    """For each of the others the one of the values with as many below it."""
    ranks = [int((others < other).sum()) for other in others]
    order = sorted(range(len(values)), key=values.tolist().__getitem__)
    return torch.stack([values[order[rank]] for rank in ranks])


def aot(
    policy_chosen_logps,
    policy_rejected_logps,
    reference_chosen_logps,
    reference_rejected_logps,
    beta=0.01,
):
    policy = policy_chosen_logps - policy_rejected_logps
    reference = reference_chosen_logps - reference_rejected_logps
    return logistic(beta * (policy - by_rank(reference, policy)))


def wpo(p, chosen_lengths, rejected_lengths, **alignment):
    w = p.w / torch.exp(alignment["chosen_alignment_logps"])
    l = p.l / torch.exp(alignment["rejected_alignment_logps"])
    weights = w ** (1 / chosen_lengths.double()) * l ** (1 / rejected_lengths.double())
    return weights.detach().clamp(max=1) * logistic(0.01 * p.margin)


def r_dpo(p, chosen_lengths, rejected_lengths, beta=0.1, alpha=0.01):
    # A reward of which each token costs alpha, read off the optimal policy.
    w = p.ratio_w**beta * torch.exp(alpha * chosen_lengths.double())
    l = p.ratio_l**beta * torch.exp(alpha * rejected_lengths.double())
    return -torch.log(w / (w + l))


def ld_dpo(margin, beta=0.1, alpha=0.5, **logps):
    """Of each response the likelihood of its first tokens, times a power of that of the others."""

    def likelihood(response):
        whole, head = (torch.exp(logps[f"{response}_{kind}"]) for kind in ("logps", "head_logps"))
        return head * (whole / head) ** alpha

    w = likelihood("policy_chosen") / likelihood("reference_chosen")
    l = likelihood("policy_rejected") / likelihood("reference_rejected")
    return logistic(torch.log((w / l) ** beta) - margin)


def sft_whole(p, policy_prompt_logps, chosen_lengths, rejected_lengths, prompt_lengths):
    tokens = (prompt_lengths + chosen_lengths).double()
    return torch.log((torch.exp(policy_prompt_logps) * p.w) ** (-1 / tokens))


FORMULAS = {
    "alphapo": without_reference(
        lambda p: logistic(2.0 * ((1 - p.w**-0.25) / 0.25 - (1 - p.l**-0.25) / 0.25 - 0.5))
    ),
    "aot": aot,
    "aot_unpaired": with_reference(
        lambda p: logistic(0.01 * (p.log_w - by_rank(p.log_l, p.log_w)))
    ),
    "apo_down": with_reference(
        lambda p: sigmoid(0.1 * p.log_w) + 1 - sigmoid(0.1 * p.log_w - 0.1 * p.log_l)
    ),
    "apo_zero": with_reference(lambda p: 1 - sigmoid(0.1 * p.log_w) + sigmoid(0.1 * p.log_l)),
    "bco_pair": with_reference(bco_pair),
    "beta_dpo": with_reference(beta_dpo),
    "cal_dpo": with_reference(lambda p: logistic(p.margin) + squares(p)),
    "chi_po": with_reference(
        lambda p: logistic(
            (0.05 * (p.ratio_w + p.log_w) - 0.05 * (p.ratio_l + p.log_l)).clamp(-20, 20)
        )
    ),
    "cpo_preference": without_reference(
        lambda p, margin: torch.log(1 + p.odds**-0.1 * torch.exp(margin))
    ),
    "discopop": with_reference(discopop),
    "dpo": with_reference(lambda p, margin: logistic(0.1 * p.margin - margin)),
    "dpo_alpha": of_divergence(lambda u: (1 - u**-0.5) / 0.5),
    "dpo_forward_kl": of_divergence(lambda u: -1 / u),
    "dpo_js": of_divergence(lambda u: torch.log(2 * u / (1 + u))),
    "dpo_norm": with_reference(lambda p, margin: logistic(5.0 * p.margin - margin)),
    "dpop": with_reference(
        lambda p: logistic(0.3 * (p.margin - 50 * positive(torch.log(1 / p.ratio_w))))
    ),
    "exo_pair": with_reference(exo_pair),
    "hinge": with_reference(lambda p, margin: positive(1 + margin - 0.05 * p.margin)),
    "ipo": with_reference(lambda p: (p.margin - 5.0) ** 2),
    "ipo_sum": with_reference(lambda p: (p.margin - 5.0) ** 2),
    "ld_dpo": ld_dpo,
    "nca_pair": with_reference(nca_pair),
    "odpo": with_reference(lambda p, margin: logistic(0.1 * p.margin - torch.log(margin))),
    "orpo_odds_ratio": without_reference(
        lambda p: -torch.log(sigmoid(torch.log((p.w / (1 - p.w)) / (p.l / (1 - p.l)))))
    ),
    "r_dpo": with_reference(r_dpo),
    "robust": with_reference(robust),
    "sft": without_reference(lambda p: torch.log(1 / p.w)),
    "sft_whole": without_reference(sft_whole),
    "simper": without_reference(lambda p: p.l - p.w),
    "simpo": without_reference(lambda p, margin: logistic(2.0 * torch.log(p.odds) - 1.0 - margin)),
    "simpo_hinge": without_reference(
        lambda p, margin: positive(1 - (2.0 * torch.log(p.odds) - 1.0 - margin))
    ),
    "slic_calibration": without_reference(
        lambda p, margin: positive(1.0 - torch.log(p.odds) + margin)
    ),
    "sppo_hard": with_reference(squares),
    "sppo_soft": with_reference(sppo_soft),
    "wpo": with_reference(wpo),
}
