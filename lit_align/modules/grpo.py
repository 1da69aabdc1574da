"""Reinforcement learning with verifiable rewards as a LightningModule.

Everything that makes one policy loss differ from another is in its config (`GRPOConfig`). The
loader asks for completions when it has none left; `training_step` is a pure function of a batch, so
the same module trains on completions that somebody else has recorded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Layout, ResponseLogprobs, response_logprobs
from lit_align.losses import (
    DPOConfig,
    GRPOConfig,
    advantages,
    aggregate,
    correction_weights,
    grpo_terms,
    kept_tokens,
    policy_ratio,
    token_losses,
    window_counts,
)
from lit_align.modules.acting import ActingModule, Reward
from lit_align.modules.first_ratio import check_first_ratio, check_sampler
from lit_align.modules.frozen import FrozenReference
from lit_align.modules.grpo_checks import check_data, check_loss, sampler_readers
from lit_align.modules.inference import inference
from lit_align.modules.metrics import Sums, gradient_norm
from lit_align.modules.policy import Batch, Loadable
from lit_align.modules.ranks import from_all_ranks
from lit_align.modules.signal import TOKEN_SUMS, token_metrics, token_sums
from lit_align.modules.window import replica
from lit_align.rollout import Engine, Rollout, RolloutPlan, Sample, Sampling

COUNTS = ("window_tokens", "window_rows", "window_prompts", "row_prompt_tokens")


class GRPOModule(ActingModule):
    """Trains a policy on the completions it writes, by what rewards say of them.

    Args:
        policy: hub id, folder, GGUF file or "tiny"; or a recipe that says how to load one; or a
            loaded model, with an adapter of peft or without.
        loss: its config, or the config's values, or the name of a surrogate; None: `GRPOConfig()`.
        reward: judges completions: a suite, a function with TRL's signature, or several of them.
        engine: writes completions; None: the policy itself, in this process.
        sampling: how completions to train on are sampled; stop tokens are added.
        val_sampling: the same for validation; None: greedy, else as `sampling`.
        val_generations: completions of each prompt in validation.
        right_from: weighted sum of rewards from which a completion counts as right.
        filter_groups: leave out groups whose rewards all agree, which teach nothing; of no effect
            with an advantage that compares no completion with its group.
        max_refills: how often prompts are drawn in place of those that were left out.
        mask_truncated: completions that were cut for their length count in the baseline of their
            group, but not in the loss.
        tokenizer: of a loaded model that does not know where its own came from.
        reference: a second model to stay close to; None: the policy before step 0.
        optimizer: from parameters to an optimizer; None: AdamW, learning rate 1e-6.
        scheduler: from an optimizer (and `total_steps`) to a scheduler, stepped once per
            optimizer step; None: constant.
        layout: how a batch goes through the model: "padded", "packed", "shared" (prompts that
            repeat run once) or "auto", the cheapest that the model allows. Of no effect on results.
    """

    rows = "prompts"
    loss: GRPOConfig

    def __init__(  # noqa: PLR0913 - the configuration file sets each of them
        self,
        policy: Loadable | nn.Module,
        loss: str | GRPOConfig | Mapping[str, Any] | None = None,
        *,
        reward: Reward,
        engine: Engine | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        val_sampling: Sampling | Mapping[str, Any] | None = None,
        val_generations: int = 1,
        right_from: float = 1.0,
        filter_groups: bool = True,
        max_refills: int = 2,
        mask_truncated: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: Loadable | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        layout: Layout = "auto",
    ) -> None:
        config = _config(loss)
        super().__init__(
            policy,
            config,
            reward=reward,
            engine=engine,
            sampling=sampling,
            val_sampling=val_sampling,
            val_generations=val_generations,
            right_from=right_from,
            filter_groups=filter_groups and config.needs_group,
            max_refills=max_refills,
            mask_truncated=mask_truncated,
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            layout=layout,
        )
        check_loss(self.loss, self.sampling)
        if self.reference is not None and not self.loss.reads_reference:
            raise UserError(
                "a reference was given, and beta is 0, so that nothing compares with it: set "
                "loss.beta, or leave the reference out"
            )
        self.frozen = FrozenReference()
        self.sums = Sums("loss", *TOKEN_SUMS)
        self._steps_summed = 0

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, data that this loss cannot learn from."""
        super().setup(stage)
        check_data(self.loss, getattr(self.trainer, "datamodule", None))

    def note_reference(self) -> None:
        if self.loss.reads_reference:
            self.frozen.note(self.policy, self.reference, self.device_mesh)

    def scored(self, model: nn.Module, batch: Batch, *, entropy: bool = False) -> ResponseLogprobs:
        """Log-probs of a batch's completions: one way for policy, reference, old and new."""
        return response_logprobs(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            batch["labels"],
            temperature=self.sampling.temperature,
            entropy=entropy,
            layout=self.layout,
        )

    def finish_rollout(
        self, rollout: Rollout, plan: RolloutPlan, mine: Iterable[tuple[list[Sample], Batch]]
    ) -> None:
        """Give every sample what training compares it with, and its advantage.

        Args:
            rollout: the same on every rank.
            plan: if all of the rollout makes one optimizer step, the old log-probs are the new
                ones and are not computed twice.
            mine: this rank's micro-batches, their samples and their tensors, as training has them.
        """
        in_reward = self.loss.kl_in == "reward" and self.loss.reads_reference
        old = plan.steps > 1 or in_reward
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        if old or self.loss.reads_reference:
            with inference(self.trainer, self.policy):
                for samples, batch in mine:
                    found |= self._logprobs(samples, batch, old=old)
        everywhere = from_all_ranks(self.trainer, found)
        for sample in rollout.samples:
            place = (sample.group, sample.number)
            vars(sample).update(next((part[place] for part in everywhere if place in part), {}))
        self._give_advantages(rollout, in_reward=in_reward)

    def _logprobs(
        self, samples: Sequence[Sample], batch: Batch, *, old: bool
    ) -> dict[tuple[int, int], dict[str, list[float]]]:
        """Log-probs per token of the samples of one micro-batch."""
        batch = move_data_to_device(dict(batch), self.device)
        by_name: dict[str, Tensor] = {}
        if old:
            by_name["old_logprobs"] = self.scored(self.policy, batch).logprobs
        if self.loss.reads_reference:
            with self.frozen(self.trainer, self.policy) as reference:
                by_name["ref_logprobs"] = self.scored(reference, batch).logprobs
        return {
            (sample.group, sample.number): {
                name: _of_completion(rows[n], sample) for name, rows in by_name.items()
            }
            for n, sample in enumerate(samples)
        }

    def _give_advantages(self, rollout: Rollout, *, in_reward: bool) -> None:
        samples = rollout.samples
        rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
        if in_reward:
            rewards = rewards - self.loss.beta * torch.stack([self._kl(s) for s in samples])
        groups = torch.tensor([s.group for s in samples])
        lengths = torch.tensor([len(s.completion_ids) for s in samples])
        others = {"lengths": lengths, **self._rewards_by_name(samples)}
        given = advantages(self.loss, rewards, groups, **others).tolist()
        for sample, advantage in zip(samples, given, strict=True):
            sample.advantage = advantage

    def _rewards_by_name(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Each reward of each sample, NaN where it does not apply, and their weights."""
        if "rewards_by_name" not in self.loss.variants["advantage"].tensors:
            return {}
        weights = self.reward.weights
        rows = [[_number(sample.rewards[name]) for name in weights] for sample in samples]
        return {
            "rewards_by_name": torch.tensor(rows, dtype=torch.float64),
            "reward_weights": torch.tensor([*weights.values()], dtype=torch.float64),
        }

    def _kl(self, sample: Sample) -> Tensor:
        """Estimate of the KL between policy and reference on one completion, nats."""
        old, ref = (
            torch.tensor([getattr(sample, name)], dtype=torch.float64)
            for name in ("old_logprobs", "ref_logprobs")
        )
        estimate: Tensor = self.loss.variants["kl_estimator"](
            {"new_logprobs": old, "ref_logprobs": ref}, self.loss
        )
        return estimate.sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scored = self.scored(self.policy, batch, entropy=True)
        new, mask = scored.logprobs, scored.mask
        old = batch.get("old_logprobs", new.detach()).to(new.dtype)
        if batch.get("is_fresh"):
            check_first_ratio(self, new, old, mask)
            check_sampler(self, old, batch.get("sampler_logprobs"), mask)
        ratio = policy_ratio(self.loss, new, old, mask)
        weights = self._weights(batch, old, mask)
        gains = batch["advantages"].to(new.dtype).unsqueeze(-1).expand_as(new)
        context = {"old_logprobs": old, "mask": mask}
        kept = kept_tokens(
            self.loss,
            new_logprobs=new,
            advantages=gains,
            entropy=scored.entropy,
            sampler_logprobs=self._sampler(batch, old),
            **context,
        )
        if "draws" in self.loss.variants["loss_fn"].tensors:
            # Random numbers are those of the step, see `on_train_batch_start`.
            context["draws"] = torch.rand(mask.shape, device="cpu").to(mask.device)
        reference = batch.get("ref_logprobs")
        terms = grpo_terms(new, ratio, gains, reference, self.loss, weights, kept, **context)
        losses = token_losses(self.loss, terms)
        share = aggregate(self.loss, losses, mask, self._counts(batch, mask))
        if kept is not None:
            weights = kept if weights is None else weights * kept
        self.sums.update({"loss": share} | token_sums(batch, scored, terms, ratio, weights))
        return share * self._undivided(batch)

    def _sampler(self, batch: Batch, old: Tensor) -> Tensor | None:
        """What the engine says of its tokens, if it says it of all it could have drawn."""
        if self.loss.reads_sampler and "sampler_logprobs" not in batch:
            raise UserError(
                f"{sampler_readers(self.loss)} needs the sampler's log-probs, and this engine "
                "reports none: choose an engine that does, or loss.correction=none (and "
                "loss.token_filter=none)"
            )
        reported = batch.get("sampler_logprobs") if self.sampling.is_full else None
        return None if reported is None else reported.to(old.dtype)

    def _weights(self, batch: Batch, old: Tensor, mask: Tensor) -> Tensor | None:
        """What corrects that another engine than the policy sampled."""
        return correction_weights(self.loss, old, self._sampler(batch, old), mask)

    def _counts(self, batch: Batch, mask: Tensor) -> Mapping[str, Tensor]:
        """Counts of the window; a batch that says nothing of them is a window of its own."""
        if "window_tokens" in batch:
            return {name: batch[name] for name in COUNTS}
        return window_counts(mask, batch.get("group", torch.arange(len(mask), device=mask.device)))

    def _undivided(self, batch: Batch) -> int:
        """What Lightning and the strategy divide by: the window's counts did that already."""
        if "window_tokens" not in batch:
            return 1
        return int(self.trainer.accumulate_grad_batches * replica(self.trainer)[1])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # Every step, for it is a small part of one; Lightning's loggers take those they want.
        self._steps_summed += 1
        metrics: dict[str, Tensor | float] = {
            **self._train_metrics(),
            **self.rollout_means.compute_and_reset(),
        }
        # The loss of a policy gradient says little; what rises is the reward.
        if "reward" in metrics:
            self.log("train/reward", metrics.pop("reward"), prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in metrics.items()})
        self.log("train/grad_norm", gradient_norm(self.policy.parameters()))

    def on_train_epoch_end(self) -> None:
        if self._steps_summed:
            self._train_metrics()

    def _train_metrics(self) -> dict[str, Tensor]:
        """Means over the steps since the last ones; the loss must be a number."""
        sums = self.sums.compute()
        loss = sums.pop("loss") / self._steps_summed
        self.sums.reset()
        self._steps_summed = 0
        self.refuse_a_loss_that_is_no_number(loss)
        return {"loss": loss, **token_metrics(sums)}


def _config(loss: str | GRPOConfig | Mapping[str, Any] | None) -> GRPOConfig:
    if isinstance(loss, str):
        return GRPOConfig(loss)
    if isinstance(loss, DPOConfig):
        raise UserError(
            f"'{loss.loss_type}' is a loss of pairs: choose a loss of completions, such as dapo, "
            "or DPOModule (module=dpo)"
        )
    return loss if isinstance(loss, GRPOConfig) else GRPOConfig(**(loss or {}))


def _number(reward: float | None) -> float:
    """NaN for a reward that does not apply."""
    return float("nan") if reward is None else reward


def _of_completion(row: Tensor, sample: Sample) -> list[float]:
    """Log-probs of the completion's tokens, from a row of a batch."""
    values: list[float] = row[len(sample.prompt_ids) - 1 : sample.length - 1].tolist()
    return values
