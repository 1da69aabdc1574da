"""A policy that writes completions and has them judged, in training and in validation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.modules.evaluation import Evaluation
from lit_align.modules.inference import inference
from lit_align.modules.metrics import MeanOfDicts
from lit_align.modules.policy import Loadable, LossConfig, PolicyModule
from lit_align.modules.ranks import from_all_ranks
from lit_align.modules.window import replica
from lit_align.rewards import RewardSuite
from lit_align.rollout import (
    Completer,
    Drawn,
    Engine,
    HuggingFaceEngine,
    Rollout,
    RolloutPlan,
    Sample,
    Sampling,
    collect,
    grouped,
    is_informative,
    rollout_metrics,
    stop_token_ids,
)

Reward = RewardSuite | Callable[..., Any] | Mapping[str, Callable[..., Any]]
Groups = list[list[Sample]]
# Validation's seeds never meet those of training, whose prompts are drawn for the 0th time first.
VALIDATION = -1


class ActingModule(PolicyModule):
    """Writes completions for a loader and for validation; how to learn from them is not said here.

    Args:
        policy: see `PolicyModule`, as for what is not listed.
        loss: its config.
        reward: judges completions: a suite, a function with TRL's signature, or several by name.
        engine: writes completions; None: the policy itself, in this process.
        sampling: how completions to train on are sampled; stop tokens are added.
        val_sampling: the same for validation; None: greedy, else as `sampling`.
        val_generations: completions of each prompt in validation.
        right_from: weighted sum of rewards from which a completion counts as right.
        filter_groups: leave out groups whose rewards all agree, which teach nothing.
        max_refills: how often prompts are drawn in place of those that were left out.
        mask_truncated: completions that were cut for their length count in the baseline of their
            group, but not in the loss.

    Attributes:
        rollout: the last one that was made, for callbacks to look at; None after a resume.
        evaluation: what validation found; its samples, for callbacks to look at.
    """

    def __init__(  # noqa: PLR0913 - one for each thing that a run can vary
        self,
        policy: Loadable | nn.Module,
        loss: LossConfig,
        *,
        reward: Reward,
        engine: Engine | None,
        sampling: Sampling | Mapping[str, Any] | None,
        val_sampling: Sampling | Mapping[str, Any] | None,
        val_generations: int,
        right_from: float,
        filter_groups: bool,
        max_refills: int,
        mask_truncated: bool,
        tokenizer: PreTrainedTokenizerBase | None,
        reference: Loadable | None,
        optimizer: Callable[..., Optimizer] | None,
        scheduler: Callable[..., Any] | None,
    ) -> None:
        super().__init__(
            policy,
            loss,
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
        )
        self.reward = reward if isinstance(reward, RewardSuite) else RewardSuite(_by_name(reward))
        self.engine: Engine = engine or HuggingFaceEngine()
        self.sampling = _sampling(sampling) or Sampling()
        self.val_sampling = _sampling(val_sampling) or replace(self.sampling, temperature=0.0)
        self.filter_groups = filter_groups
        self.max_refills = max_refills
        self.mask_truncated = mask_truncated
        self.rollout: Rollout | None = None
        self.rollout_means = MeanOfDicts()
        self.evaluation = Evaluation(val_generations, right_from)
        self._check()

    def _check(self) -> None:
        """Refuse at once what cannot work."""
        if self.sampling.is_greedy:
            raise UserError(
                "sampling.temperature is 0: greedy completions of a prompt are all alike, and "
                "their probability is no ratio's denominator; only val_sampling may be greedy"
            )
        if not isinstance(self.max_refills, int) or self.max_refills < 0:
            raise UserError(f"max_refills must be a whole number >= 0, not {self.max_refills!r}")
        if self.val_sampling.is_greedy and self.evaluation.generations > 1:
            raise UserError(
                f"val_generations is {self.evaluation.generations}, and val_sampling.temperature "
                "0 writes the same completion each time: raise the temperature or take 1"
            )

    def make_rollout(
        self, draw: Callable[[int], list[Drawn]], plan: RolloutPlan, number: int
    ) -> Rollout:
        """Completions of freshly drawn prompts, scored and filtered, the same on every rank."""
        kept: Groups = []
        left_out: Groups = []
        with self._acting(self.sampling) as complete:
            for _ in range(1 + self.max_refills):
                groups = self._groups(complete, draw(plan.prompts - len(kept)), plan)
                for group in groups:
                    teaches = is_informative(group) or not self.filter_groups
                    (kept if teaches else left_out).append(group)
                if len(kept) == plan.prompts or not self.filter_groups:
                    break
        metrics = rollout_metrics(kept + left_out, self.evaluation.right_from)
        if not kept:
            rank_zero_warn(
                f"all {len(left_out)} groups drawn for step {self.trainer.global_step} have equal "
                "rewards: nothing to learn from; see groups/all_right and groups/all_wrong"
            )
            kept, left_out = left_out[: plan.prompts], left_out[plan.prompts :]
        self.rollout = Rollout(number, self.trainer.global_step, _flat(kept), metrics)
        self.rollout.left_out = _flat(left_out)
        for sample in self.rollout.samples:
            sample.is_trained = not (self.mask_truncated and sample.finish_reason == "length")
        self.rollout_means.update(metrics | {"groups_trained": float(len(kept))})
        return self.rollout

    def _groups(self, complete: Completer, drawn: Sequence[Drawn], plan: RolloutPlan) -> Groups:
        """Scored completions of each prompt, on all ranks."""
        rank, replicas = replica(self.trainer)
        samples = collect(
            complete,
            lambda mine: from_all_ranks(self.trainer, mine),
            drawn,
            num_generations=plan.num_generations,
            rank=rank,
            replicas=replicas,
        )
        return grouped(samples)

    @contextmanager
    def _acting(self, sampling: Sampling) -> Iterator[Completer]:
        """The policy in the state in which it may write."""
        version = self.trainer.global_step
        with inference(self.trainer, self.policy):
            self.engine.sync_weights(version, self.policy)
            stops = stop_token_ids(self.policy, self.tokenizer)
            yield Completer(
                self.engine,
                self.reward,
                self.tokenizer,
                replace(sampling, stop_token_ids=stops),
                self.run_seed,
                version,
            )

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Answer the batch's prompts; what a filler prompt is answered does not count."""
        numbers = list(range(self.evaluation.generations))
        tasks = [(Drawn(p.row, VALIDATION, p), numbers) for p in batch["prompts"]]
        with self._acting(self.val_sampling) as complete:
            # The same seeds each time: what differs between two validations is the policy.
            samples = replace(complete, version=0)(tasks)
        real = {
            p.row for p, is_real in zip(batch["prompts"], batch["is_real"], strict=True) if is_real
        }
        self.evaluation.add([sample for sample in samples if sample.row in real])

    def on_validation_epoch_start(self) -> None:
        self.evaluation.reset()

    def on_validation_epoch_end(self) -> None:
        self.evaluation.gather(lambda mine: from_all_ranks(self.trainer, mine))
        # They are those of all ranks already; Lightning warns of what it did not reduce itself.
        metrics = {f"val/{name}": value for name, value in self.evaluation.metrics().items()}
        self.log_dict(metrics, sync_dist=True)

    def teardown(self, stage: str) -> None:
        """Let go of processes that must not outlive the run; they start again when asked."""
        self.reward.close()


def _by_name(reward: Callable[..., Any] | Mapping[str, Callable[..., Any]]) -> Any:
    return (
        reward if isinstance(reward, Mapping) else {getattr(reward, "__name__", "reward"): reward}
    )


def _sampling(given: Sampling | Mapping[str, Any] | None) -> Sampling | None:
    return Sampling(**given) if isinstance(given, Mapping) else given


def _flat(groups: Groups) -> list[Sample]:
    return [sample for group in groups for sample in group]
