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
from lit_align.logprobs import Layout, base_model
from lit_align.modules.evaluation import Evaluation
from lit_align.modules.inference import inference
from lit_align.modules.metrics import MeanOfDicts
from lit_align.modules.policy import Loadable, LossConfig, PolicyModule
from lit_align.modules.ranks import from_all_ranks
from lit_align.modules.window import replica
from lit_align.rewards import RewardSuite
from lit_align.rollout import (
    GREEDY,
    Completer,
    Drawn,
    Engine,
    HuggingFaceEngine,
    Rollout,
    RolloutPlan,
    Sample,
    Sampling,
    collect,
    compare_with_greedy,
    context_length,
    is_informative,
    rollout_metrics,
    stop_token_ids,
)

Function = Callable[..., Any]
Reward = RewardSuite | Function | Mapping[str, Function] | Sequence[Function]
Groups = list[list[Sample]]
# Validation's seeds never meet those of training, whose prompts are drawn for the 0th time first.
VALIDATION = -1


class ActingModule(PolicyModule):
    """Writes completions for a loader and for validation; how to learn from them is not said here.

    Args:
        policy: see `PolicyModule`, as for what is not listed.
        loss: its config.
        reward: judges completions: a suite, a function with TRL's signature, or several of them, in
            a list or by name.
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
        layout: Layout,
    ) -> None:
        super().__init__(
            policy,
            loss,
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            layout=layout,
        )
        self.reward = reward if isinstance(reward, RewardSuite) else RewardSuite(_by_name(reward))
        self.engine: Engine = engine or HuggingFaceEngine()
        # What was recorded says nothing of the policy in training.
        self.val_engine = self.engine if self.engine.is_live else HuggingFaceEngine()
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
        for name in ("filter_groups", "mask_truncated"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if type(self.max_refills) is not int or self.max_refills < 0:
            raise UserError(f"max_refills must be a whole number >= 0, not {self.max_refills!r}")
        if self.val_sampling.is_greedy and self.evaluation.generations > 1:
            raise UserError(
                f"val_generations is {self.evaluation.generations}, and val_sampling.temperature "
                "0 writes the same completion each time: raise the temperature or take 1"
            )

    def on_fit_start(self) -> None:
        """Refuse prompts that leave no room for an answer, before the first is answered."""
        if not stop_token_ids(self.policy, self.tokenizer):
            rank_zero_warn(
                "neither the model nor its tokenizer has an end token: every completion runs to "
                "sampling.max_new_tokens; give sampling.stop_token_ids"
            )
        context = context_length(base_model(self.policy).config)
        data: Any = getattr(self.trainer, "datamodule", None)
        for name in ("train_rows", "val_rows"):
            rows: Any = getattr(data, name, None) or ()
            for prompt in rows:
                if context is not None and len(prompt.ids) >= context:
                    raise UserError(
                        f"row {prompt.row} of {rows.name}: its prompt of {len(prompt.ids)} tokens "
                        f"leaves no room for an answer in the model's context of {context}: set "
                        f"data.max_prompt_length to less than {context}"
                    )

    @property
    def reads_greedy(self) -> bool:
        """Whether completions are compared with the prompt's greedy one; by default they are not.

        It is then written for every prompt that is trained on, judged alike, and not trained on.
        """
        return False

    def make_rollout(
        self, draw: Callable[[int], list[Drawn]], plan: RolloutPlan, number: int
    ) -> Rollout:
        """Completions of freshly drawn prompts, scored and filtered, the same on every rank."""
        prompts: dict[int, Drawn] = {}
        with self._acting(self.engine, self.sampling) as completer:
            kept, left_out = self._drawn_groups(completer, draw, plan, prompts)
            metrics = rollout_metrics(kept + left_out, self.evaluation.right_from)
            metrics["groups_trained"] = float(len(kept))
            if not kept:
                rank_zero_warn(
                    f"all {len(left_out)} groups drawn for step {self.trainer.global_step} have "
                    "equal rewards: nothing to learn from; see groups/all_right and "
                    "groups/all_wrong"
                )
                kept, left_out = left_out[: plan.prompts], left_out[plan.prompts :]
            answered = [prompts[group[0].group] for group in kept]
            greedy = self._greedy(completer, answered) if self.reads_greedy else []
        self.rollout = Rollout(number, self.trainer.global_step, _flat(kept), metrics)
        self.rollout.left_out, self.rollout.greedy = _flat(left_out), greedy
        for sample in self.rollout.samples:
            sample.is_trained = not (self.mask_truncated and sample.finish_reason == "length")
        compare_with_greedy(self.rollout)
        self.rollout_means.update(metrics)
        return self.rollout

    def _drawn_groups(
        self,
        completer: Completer,
        draw: Callable[[int], list[Drawn]],
        plan: RolloutPlan,
        prompts: dict[int, Drawn],
    ) -> tuple[Groups, Groups]:
        """Groups to train on and groups left out, of prompts that are noted by the group."""
        kept: Groups = []
        left_out: Groups = []
        for _ in range(1 + self.max_refills):
            drawn = draw(plan.prompts - len(kept))
            prompts.update({one.group: one for one in drawn})
            for group in self._groups(completer, drawn, range(plan.num_generations)):
                teaches = is_informative(group) or not self.filter_groups
                (kept if teaches else left_out).append(group)
            if len(kept) == plan.prompts or not self.filter_groups:
                break
        return kept, left_out

    def _greedy(self, completer: Completer, drawn: Sequence[Drawn]) -> list[Sample]:
        """The scored greedy completion of each prompt, on all ranks."""
        return _flat(self._groups(completer.greedy, drawn, [GREEDY]))

    def _groups(
        self, completer: Completer, drawn: Sequence[Drawn], numbers: Sequence[int]
    ) -> Groups:
        """Scored completions of each prompt, on all ranks."""
        rank, replicas = replica(self.trainer)
        return collect(
            completer,
            lambda mine: from_all_ranks(self.trainer, mine),
            drawn,
            numbers=numbers,
            rank=rank,
            replicas=replicas,
        )

    @contextmanager
    def _acting(self, engine: Engine, sampling: Sampling) -> Iterator[Completer]:
        """The policy in the state in which it may write."""
        version = self.trainer.global_step
        with inference(self.trainer, self.policy):
            engine.sync_weights(version, self.policy)
            stops = {*sampling.stop_token_ids, *stop_token_ids(self.policy, self.tokenizer)}
            yield Completer(
                engine,
                self.reward,
                self.tokenizer,
                replace(sampling, stop_token_ids=tuple(sorted(stops))),
                self.run_seed,
                version,
            )

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Answer the batch's prompts; what a filler prompt is answered does not count."""
        numbers = list(range(self.evaluation.generations))
        tasks = [(Drawn(p.row, VALIDATION, p), numbers) for p in batch["prompts"]]
        with self._acting(self.val_engine, self.val_sampling) as completer:
            # The same seeds each time: what differs between two validations is the policy.
            samples = replace(completer, version=0).write(tasks)
            completer.judge(samples, [drawn for drawn, _ in tasks])
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


def _by_name(reward: Function | Mapping[str, Function] | Sequence[Function]) -> Any:
    if isinstance(reward, Mapping):
        return reward
    functions = list(reward) if isinstance(reward, Sequence) else [reward]
    names = [getattr(fn, "__name__", f"reward_{n}") for n, fn in enumerate(functions)]
    if len(set(names)) < len(names):
        raise UserError(f"two rewards have one name ({', '.join(names)}): give {{name: function}}")
    return dict(zip(names, functions, strict=True))


def _sampling(given: Sampling | Mapping[str, Any] | None) -> Sampling | None:
    return Sampling(**given) if isinstance(given, Mapping) else given


def _flat(groups: Groups) -> list[Sample]:
    return [sample for group in groups for sample in group]
