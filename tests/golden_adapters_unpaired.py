"""How our code answers the golden cases of labelled completions."""

from collections.abc import Callable

import torch
from golden_cases import Case, Result, tensor
from torch import Tensor

from lit_align.losses import UnpairedConfig, UnpairedLoss, compute_unpaired_loss, reference_point

Adapter = Callable[[Case], Result]


def loss_of(loss_type: str, case: Case, **tensors: Tensor) -> UnpairedLoss:
    """Through the dispatcher, with the case's parameters."""
    policy = tensors.pop("policy_logps")
    return compute_unpaired_loss(UnpairedConfig(loss_type, **case.params), tensors, policy)


def labelled(loss_type: str) -> Adapter:
    """Rows in the case's order; some of its outputs have the desirable ones first."""

    def adapter(case: Case) -> Result:
        numbers = dict(case.raw["inputs"])
        labels = torch.tensor(numbers.pop("label"))
        given = {name: tensor(values).requires_grad_() for name, values in numbers.items()}
        shown = {}
        if "policy_KL_logps" in given:
            shown["kl"] = reference_point(given["policy_KL_logps"] - given["reference_KL_logps"])
        rows = {name: given[name] for name in ("policy_logps", "reference_logps")}
        losses, rewards = loss_of(loss_type, case, **rows, **shown, labels=labels)
        ratios = rewards / case.params["beta"]
        outputs = {
            "loss": losses.mean(),
            "losses_chosen_then_rejected": torch.cat([losses[labels], losses[~labels]]),
            "chosen_logratios": ratios[labels],
            "rejected_logratios": ratios[~labels],
            "mean_rewards_chosen": rewards[labels].mean(),
            "mean_rewards_rejected": rewards[~labels].mean(),
            **shown,
        }
        return Result(outputs, losses.mean(), given)

    return adapter


def kto_pair_legacy(case: Case) -> Result:
    """Each half of the pairs with the other half for its reference point."""
    given = case.tensors()
    sides = {"chosen": "rejected", "rejected": "chosen"}
    losses = [
        loss_of(
            "kto",
            case,
            policy_logps=given[f"policy_{side}_logps"],
            reference_logps=given[f"reference_{side}_logps"],
            labels=torch.full_like(given[f"policy_{side}_logps"], side == "chosen").bool(),
            kl=reference_point(given[f"policy_{other}_logps"] - given[f"reference_{other}_logps"]),
        ).losses
        for side, other in sides.items()
    ]
    both = torch.cat(losses)
    return Result({"losses": both, "loss": both.mean()}, both.mean(), given)


UNPAIRED_ADAPTERS: dict[str, Adapter] = {
    "apo_zero_unpaired": labelled("apo_zero_unpaired"),
    "kto": labelled("kto"),
    "kto__halos_kl_skips_zeros": labelled("kto"),
    "kto_pair_legacy": kto_pair_legacy,
}
