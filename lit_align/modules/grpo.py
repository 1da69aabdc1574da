"""Reinforcement learning with verifiable rewards as a LightningModule.

Everything that makes one policy loss differ from another is in its config (`GRPOConfig`). The
loader asks for completions when it has none left; `training_step` is a pure function of a batch, so
the same module trains on completions that somebody else has recorded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Alignment, Layout, ResponseLogprobs, response_logprobs
from lit_align.losses import (
    EntropyBonus,
    GRPOConfig,
    PairConfig,
    UnpairedConfig,
    aggregate,
    correction_weights,
    grpo_terms,
    kept_tokens,
    next_entropy_bonus,
    policy_ratio,
    token_losses,
    window_counts,
)
from lit_align.modules.acting import ActingModule, Reward
from lit_align.modules.advantages import give_advantages
from lit_align.modules.compared_tokens import compared_tokens
from lit_align.modules.first_ratio import check_first_ratio, check_sampler
from lit_align.modules.frozen import FrozenReference
from lit_align.modules.grpo_checks import check_data, check_loss
from lit_align.modules.inference import inference
from lit_align.modules.metrics import MeanOfDicts, Sums, gradient_norm
from lit_align.modules.policy import Batch, Loadable
from lit_align.modules.ranks import from_all_ranks
from lit_align.modules.signal import TOKEN_SUMS, token_advantages, token_metrics, token_sums
from lit_align.modules.whole_window import Windows
from lit_align.modules.window import replica, with_gradient_of
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
    live_reference: FrozenReference

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
        self.live_reference = FrozenReference()
        # Since metrics were last logged; of a step, what the bonus on its entropy goes by.
        self.sums, self.step_sums = Sums("loss", *TOKEN_SUMS), Sums("tokens", "entropy")
        self._steps_summed = 0
        self.bonus_means = MeanOfDicts()
        self.windows = Windows()
        self.entropy_bonus = EntropyBonus(config.entropy_bonus, config.entropy_bonus)

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, data that this loss cannot learn from."""
        super().setup(stage)
        check_data(self.loss, getattr(self.trainer, "datamodule", None))

    @property
    def reads_greedy(self) -> bool:
        return self.loss.reads_greedy

    @property
    def needs_window(self) -> bool:
        """Whether the loss compares the tokens of an optimizer step with each other."""
        return bool(self.loss.reads_window)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.windows.forget()
        self._forget_sums()
        self.step_sums.reset()

    def note_reference(self) -> None:
        if self.loss.reads_reference:
            self.live_reference.note(self.policy, self.reference, self.device_mesh)

    def scored(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        alignment: Alignment | None = None,
    ) -> ResponseLogprobs:
        """Log-probs of a batch's completions: one way for policy, reference, old and new."""
        return response_logprobs(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            batch["labels"],
            temperature=self.sampling.temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            alignment=alignment,
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
        several = plan.steps > 1 and self.loss.old_policy == "trainer"
        old = several or in_reward or self.loss.reads_alignment
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        if old or self.loss.reads_reference:
            with inference(self.trainer, self.policy):
                for samples, batch in mine:
                    found |= self._logprobs(samples, batch, old=old)
        everywhere = from_all_ranks(self.trainer, found)
        for sample in rollout.samples:
            place = (sample.group, sample.number)
            vars(sample).update(next((part[place] for part in everywhere if place in part), {}))
        give_advantages(self.loss, rollout.samples, self.reward.weights)

    def _logprobs(
        self, samples: Sequence[Sample], batch: Batch, *, old: bool
    ) -> dict[tuple[int, int], dict[str, list[float]]]:
        """Log-probs per token of the samples of one micro-batch."""
        batch = move_data_to_device(dict(batch), self.device)
        by_name: dict[str, Tensor] = {}
        if old:
            wanted: Alignment | None = "sampled" if self.loss.reads_alignment else None
            scored = self.scored(self.policy, batch, alignment=wanted)
            by_name["old_logprobs"] = scored.logprobs
            if scored.alignment is not None:
                by_name["alignment"] = scored.alignment
        if self.loss.reads_reference:
            with self.live_reference(self.trainer, self.policy) as reference:
                by_name["ref_logprobs"] = self.scored(reference, batch).logprobs
        return {
            (sample.group, sample.number): {
                name: _of_completion(rows[n], sample) for name, rows in by_name.items()
            }
            for n, sample in enumerate(samples)
        }

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        bonus = self.entropy_bonus.weight
        batch, scored, own = self._compared(batch, entropy_gradient=bonus != 0)
        new, mask = scored.logprobs, scored.mask
        old, trainer, sampler = self._older(batch, new, mask)
        ratio = policy_ratio(self.loss, new, old, mask)
        weights = correction_weights(self.loss, trainer, sampler, mask)
        gains = token_advantages(batch, mask).to(new.dtype)
        context = {"old_logprobs": old, "mask": mask, **self._draws(mask)}
        kept = kept_tokens(
            self.loss,
            new_logprobs=new,
            advantages=gains,
            entropy=scored.entropy,
            old_logprobs=trainer,
            sampler_logprobs=sampler,
            mask=mask,
        )
        reference = batch.get("ref_logprobs")
        terms = grpo_terms(new, ratio, gains, reference, self.loss, weights, kept, **context)
        losses = token_losses(self.loss, terms, scored.entropy, bonus)
        counts = self._counts(batch, mask)
        share = aggregate(self.loss, losses, own, counts)
        if kept is not None:
            weights = kept if weights is None else weights * kept
        scored = scored._replace(mask=own)
        sums = {"loss": share, **token_sums(batch, scored, terms, ratio, weights)}
        self.sums.update(sums)
        if self.loss.has_entropy_bonus:
            self.step_sums.update(sums)
        if self.needs_window:
            share = with_gradient_of(share, aggregate(self.loss, losses, mask, counts))
        return share * self._undivided(batch)

    def _draws(self, mask: Tensor) -> dict[str, Tensor]:
        """Random numbers, one for each token, if the loss decides by lot."""
        if "draws" not in self.loss.variants["loss_fn"].tensors:
            return {}
        draws = torch.zeros_like(mask, dtype=torch.float32)
        return {"draws": draws.masked_scatter(mask, self.lot(int(mask.sum())))}

    def _compared(
        self, batch: Batch, *, entropy_gradient: bool
    ) -> tuple[Batch, ResponseLogprobs, Tensor]:
        """The completions that the loss is given at once, and the batch's own tokens, (B, T-1).

        They are those of the batch. A loss that compares tokens with all others is given those of
        the window: the batch's own live, and numbers for the others.
        """
        score = partial(self.scored, self.policy, entropy=True, entropy_gradient=entropy_gradient)
        if self.needs_window:
            return compared_tokens(self, self.windows, batch, score, self.loss.reads_window)
        scored = score(batch)
        return batch, scored, scored.mask

    def _older(
        self, batch: Batch, new: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What ratios divide by, what is compared with the sampler, and the sampler; (B, T-1)."""
        sampler = self._sampler(batch, new)
        own = batch.get("old_logprobs", new.detach()).to(new.dtype)
        if batch.get("is_fresh"):
            check_first_ratio(self, new, own, mask)
            check_sampler(self, own, batch.get("sampler_logprobs"), mask)
        if sampler is not None and self.loss.old_policy == "sampler":
            return sampler, new.detach(), sampler
        return own, own, sampler

    def _sampler(self, batch: Batch, new: Tensor) -> Tensor | None:
        """What the engine says of its tokens, if it says it of all it could have drawn."""
        if self.loss.reads_sampler and "sampler_logprobs" not in batch:
            raise UserError(
                f"{self.loss.sampler_readers} needs the sampler's log-probs, and this engine "
                "reports none: choose an engine that does, or loss.correction=none (and "
                "loss.token_filter=none, loss.old_policy=trainer)"
            )
        reported = batch.get("sampler_logprobs") if self.sampling.is_full else None
        return None if reported is None else reported.to(new.dtype)

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
        self._steps_summed += 1
        if self.loss.has_entropy_bonus:
            self._next_entropy_bonus()
        if self.is_logging_step():
            metrics: dict[str, Tensor | float] = {
                **self._train_metrics(),
                **self.rollout_means.compute_and_reset(),
                **self.bonus_means.compute_and_reset(),
                "grad_norm": gradient_norm(self.policy.parameters()),
            }
            self._forget_sums()
            # The loss of a policy gradient says little; what rises is the reward.
            self.log_step(metrics, on_bar="reward")

    def on_train_epoch_end(self) -> None:
        # What is left of the epoch's steps is logged with those that follow.
        if self._steps_summed:
            self._train_metrics()

    def _forget_sums(self) -> None:
        self.sums.reset()
        self._steps_summed = 0

    def _train_metrics(self) -> dict[str, Tensor]:
        """Means over the steps since metrics were last logged; the loss must be a number."""
        sums = self.sums.compute()
        loss = sums.pop("loss") / self._steps_summed
        self.refuse_a_loss_that_is_no_number(loss)
        return {"loss": loss, **token_metrics(sums)}

    def _next_entropy_bonus(self) -> None:
        """Note the weight that the step had; what it showed decides on the next one's."""
        self.bonus_means.update({"entropy_bonus": self.entropy_bonus.weight})
        sums = self.step_sums.compute()
        self.step_sums.reset()
        tokens = float(sums["tokens"])
        if tokens:  # nothing is shown by a step without any
            self.entropy_bonus = next_entropy_bonus(
                self.loss, self.entropy_bonus.coefficient, float(sums["entropy"]) / tokens
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["entropy_bonus"] = list(self.entropy_bonus)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "entropy_bonus" in checkpoint:
            self.entropy_bonus = EntropyBonus(*checkpoint["entropy_bonus"])


def _config(loss: str | GRPOConfig | Mapping[str, Any] | None) -> GRPOConfig:
    if isinstance(loss, str):
        return GRPOConfig(loss)
    if isinstance(loss, PairConfig):
        raise UserError(
            f"{loss.title} is a loss of pairs: choose a loss of completions, such as dapo, "
            "or DPOModule (module=dpo)"
        )
    if isinstance(loss, UnpairedConfig):
        raise UserError(
            f"{loss.title} is a loss of labelled completions: choose a loss of policies, such as "
            "dapo, or UnpairedModule (module=unpaired)"
        )
    if not isinstance(loss, GRPOConfig | Mapping | None):
        raise UserError(f"a loss is a name, a config or the values of one, not {loss!r}")
    return loss if isinstance(loss, GRPOConfig) else GRPOConfig(**(loss or {}))


def _of_completion(row: Tensor, sample: Sample) -> list[float]:
    """Log-probs of the completion's tokens, from a row of a batch."""
    values: list[float] = row[len(sample.prompt_ids) - 1 : sample.length - 1].tolist()
    return values
