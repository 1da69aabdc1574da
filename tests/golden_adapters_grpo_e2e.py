"""Golden cases of whole GRPO steps on a tiny Llama, through the module itself.

The module's policy has the weights of the model "old" while it finishes the rollout, and those of
the model "policy" when it makes the step.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from golden_adapters_e2e import fill, grad_norm, tiny_llama
from golden_cases import Case, Result

from lit_align.losses import GRPOConfig
from lit_align.modules import GRPOModule
from lit_align.rollout import Rollout, RolloutPlan, Sample
from lit_align.rollout.batches import collate

AGGREGATIONS = {
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "grpo": "sequence_mean",
    "luspo": "sequence_sum",
    "vespo": "token_mean",
}


def samples(case: Case) -> list[Sample]:
    inputs = case.raw["inputs"]
    rewards = iter(inputs["rewards"])
    return [
        Sample(group, group, number, prompt, completion, "stop", reward=next(rewards))
        for group, prompt in enumerate(inputs["prompts"])
        for number, completion in enumerate(inputs["completions"][group])
    ]


def module_of(case: Case, config: GRPOConfig) -> GRPOModule:
    """With the weights of the model "old"."""
    module = GRPOModule(tiny_llama(case, "old"), config, reward=len)
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    module.live_reference.model = tiny_llama(case, "reference")
    return module


def finished(case: Case, config: GRPOConfig) -> tuple[GRPOModule, dict[str, torch.Tensor]]:
    """The module after the policy has moved, and the batch of its next step."""
    module = module_of(case, config)
    own = samples(case)
    plan = RolloutPlan(2, 4, batch_size=8, num_iterations=2)
    module.finish_rollout(Rollout(0, 0, own), plan, [(own, collate(own))])
    fill(module.policy, case.file["model"]["delta"]["policy"])
    return module, collate(own)


def step(case: Case, config: GRPOConfig) -> Result:
    module, batch = finished(case, config)
    loss = module.training_step(batch, 0)
    loss.backward()
    model = module.policy
    return Result(
        {
            "loss": loss,
            "grad_norm": grad_norm(*model.parameters()),
            "grad_norm_lm_head": grad_norm(model.lm_head.weight),
            "grad_norm_embed": grad_norm(model.model.embed_tokens.weight),
        }
    )


def e2e_grpo(case: Case) -> Result:
    """TRL's step: what it calls a loss type is an aggregation."""
    params = case.params
    options: dict[str, Any] = {
        "loss_fn": "clip",
        "clip_lower": params["epsilon_low"],
        "clip_higher": params["epsilon_high"],
    }
    if params["delta"] is not None:
        options |= {"loss_fn": "two_sided", "delta": params["delta"]}
    if params["loss_type"] == "vespo":
        options = {"loss_fn": "vespo"}
    tokens = sum(len(ids) for group in case.raw["inputs"]["completions"] for ids in group)
    assert params["num_items_in_batch"] == tokens
    config = GRPOConfig(
        **options,
        ratio_level=params["importance_sampling_level"],
        aggregation=AGGREGATIONS[params["loss_type"]],
        beta=params["beta"],
        kl_estimator="ratio_k3" if params["use_bias_correction_kl"] else "k3",
    )
    return step(case, config)


def e2e_grpo_open_instruct(case: Case) -> Result:
    options = {name: case.params[name] for name in ("clip_lower", "clip_higher", "beta")}
    loss_fn, kl_estimator = (case.params[name] for name in ("loss_fn", "kl_estimator"))
    return step(case, GRPOConfig(loss_fn, kl_estimator=kl_estimator, **options))


def e2e_grpo_token_logps(case: Case) -> Result:
    """Log-probs as the module's rollout keeps them, padded again as the case has them."""
    config = GRPOConfig(beta=0.04)
    module, batch = finished(case, config)
    with torch.no_grad():
        scored = module.scored(module.policy, batch, entropy=True)
    kept = {
        "policy_token_logps": scored.logprobs,
        "policy_entropies": scored.entropy,
        "old_token_logps": batch["old_logprobs"],
        "reference_token_logps": batch["ref_logprobs"],
    }
    width = len(case.raw["inputs"]["completion_ids"][0])
    padded = {name: torch.zeros(len(values), width) for name, values in kept.items()}
    for row, mask in enumerate(scored.mask):
        for name, values in kept.items():
            padded[name][row, : mask.sum()] = values[row, mask].float()
    return Result({**padded, "advantages": batch["advantages"]})


GRPO_E2E_ADAPTERS: dict[str, Callable[[Case], Result]] = {
    **{f"e2e_grpo[{name}]": e2e_grpo for name in AGGREGATIONS},
    "e2e_grpo_open_instruct": e2e_grpo_open_instruct,
    "e2e_grpo_token_logps": e2e_grpo_token_logps,
}
