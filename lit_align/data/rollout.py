"""Prompts for a Trainer whose module writes the answers itself."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lit_align.data.loader import no_loaders
from lit_align.data.module import ResumableDataModule
from lit_align.data.preference import split_rows
from lit_align.data.prompt_format import PromptFormat
from lit_align.data.prompt_loader import PromptLoader
from lit_align.data.prompts import PromptRows, PromptSource, open_prompts
from lit_align.data.token_loader import refuse_fixed_accumulation
from lit_align.errors import UserError
from lit_align.rollout import PromptStream, RolloutLoader, RolloutPlan


class RolloutDataModule(ResumableDataModule):
    """Prompts, and how many of them and of their completions make an optimizer step.

    Any combination of the sizes works: `prompts_per_step * num_generations` completions are cut
    into as many micro-batches of at most `batch_size` as that takes, of like many tokens, and
    `trainer.accumulate_grad_batches` is set to their number (or left as it is, if that is more).

    Args:
        path: a JSONL, JSON or Parquet file, a folder written by `save_to_disk`, a name on the hub,
            a task (`lit_align.data.tasks`), a list of dictionaries or a `datasets.Dataset`.
        split: part of a folder or hub data set to train on.
        val_path: a second file, folder, name or task to validate on.
        val_split: or a further split of `path`; or the share of its prompts, between 0 and 1, to
            take from training for that, chosen by `seed`.
        prompt_column: that holds the prompt, a text or a list of messages; all other columns go to
            the rewards, by name.
        system_prompt: put before conversations that have none of their own.
        as_chat: whether a text is what a user says in a conversation; None: if the tokenizer has a
            chat template.
        chat_template_kwargs: variables of the chat template; those of a row come first.
        max_prompt_length: tokens; longer prompts are left out and counted. None: no limit.
        on_bad_row: "raise" stops at a row that cannot be used; "skip" leaves it out and counts.
        prompts_per_step: prompts of an optimizer step, over all ranks.
        num_generations: completions of each prompt.
        batch_size: completions of a micro-batch on each rank, at most.
        max_tokens_per_batch: tokens that a micro-batch runs at most, in place of `batch_size`: a
            prompt once for its completions if the model can share it, padding too if it has to
            stay padded. Nobody knows beforehand how long completions become: a step is cut into as
            many micro-batches as it needs if all are as long as they may be. None: `batch_size`.
        steps_per_rollout: optimizer steps made of one rollout.
        num_iterations: how often each completion is trained on.
        val_batch_size: prompts that are answered at once in validation, on each rank.
        seed: of the order of the prompts and of the share for validation.
        shuffle: whether prompts come in a new order every pass.
        max_rows: train on the first so many prompts only.
        val_max_rows: validate on the first so many prompts only.
        tokenizer: None: that of the module in training.

    Attributes:
        train_rows: after `setup`.
        val_rows: after `setup`; None without validation.
        plan: how a rollout is cut; after `setup` for a fit.
    """

    rows = "prompts"
    train_rows: PromptRows
    val_rows: PromptRows | None
    plan: RolloutPlan

    def __init__(  # noqa: PLR0913 - the configuration file sets each of them
        self,
        path: PromptSource,
        *,
        split: str = "train",
        val_path: PromptSource | None = None,
        val_split: str | float | None = None,
        prompt_column: str = "prompt",
        system_prompt: str | None = None,
        as_chat: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_length: int | None = 512,
        on_bad_row: str = "raise",
        prompts_per_step: int = 8,
        num_generations: int = 8,
        batch_size: int = 8,
        max_tokens_per_batch: int | None = None,
        steps_per_rollout: int = 1,
        num_iterations: int = 1,
        val_batch_size: int = 64,
        seed: int = 0,
        shuffle: bool = True,
        max_rows: int | None = None,
        val_max_rows: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.path = path
        self.split = split
        self.val_path = val_path
        # A source of its own takes the place of a share; a split by name would be a second one.
        self.val_split = (
            None if val_path is not None and isinstance(val_split, float) else val_split
        )
        self.how = PromptFormat(
            prompt_column=prompt_column,
            system_prompt=system_prompt,
            as_chat=as_chat,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            max_prompt_length=max_prompt_length,
            on_bad_row=on_bad_row,
        )
        self.sizes = RolloutPlan(
            prompts_per_step=prompts_per_step,
            num_generations=num_generations,
            batch_size=batch_size,
            steps_per_rollout=steps_per_rollout,
            num_iterations=num_iterations,
        )
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_generations = num_generations
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.max_rows = max_rows
        self.val_max_rows = val_max_rows
        self._check()

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "train_rows"):
            self.train_rows, self.val_rows = self._rows()
        if self.trainer is not None and stage == TrainerFn.FITTING:
            self._take_over_accumulation("data.prompts_per_step and data.num_generations say")
            if self.max_tokens_per_batch is None:
                self.plan = self._planned(self.trainer, self.sizes)
            else:
                refuse_fixed_accumulation(self.trainer)
            self._loader = self._loader_state = None

    def train_dataloader(self) -> RolloutLoader:
        """The loader of this fit; when asked again, the same one, which goes on."""
        if self._loader is None:
            self._loader = self._train_loader()
        self._restore()
        loader: RolloutLoader = self._loader
        return loader

    def _train_loader(self) -> RolloutLoader:
        trainer: Any = self.trainer
        if trainer is None:
            raise UserError(
                "RolloutDataModule makes batches of what the module in training writes: hand it to "
                "trainer.fit(module, datamodule=...)"
            )
        actor = trainer.lightning_module
        if not hasattr(actor, "make_rollout"):
            raise UserError(
                "RolloutDataModule serves a module that writes completions, such as GRPOModule, "
                f"not a {type(actor).__name__}"
            )
        # Until the policy is there, nobody knows how batches go through it.
        if self.max_tokens_per_batch is None:
            self.plan = replace(self.plan, ways=self._ways())
        else:
            self.plan = self._planned(trainer, self._sizes_in_tokens(actor))
        return RolloutLoader(
            PromptStream(self.train_rows, seed=self.seed, shuffle=self.shuffle),
            actor,
            self.plan,
            rank=self._replica().rank,
            limit_batches=lambda: trainer.limit_train_batches,
            whole_window=self.needs_window(),
        )

    def val_dataloader(self) -> PromptLoader | list[PromptLoader]:
        if self.val_rows is None:
            return no_loaders()
        return PromptLoader(self.val_rows, batch_size=self.val_batch_size, replica=self._replica())

    def describe_plan(self, trainer: L.Trainer) -> str:
        """What a fit of this Trainer draws, how a step is put together, and what is rewarded."""
        rows, plan = len(self.train_rows), self.plan
        steps = trainer.estimated_stepping_batches
        passes = steps / plan.steps * plan.prompts / rows
        ratio = (
            "on-policy: a rollout makes a single step, where the ratio is 1 and no clip acts"
            if plan.steps == 1
            else f"off-policy from the second of a rollout's {plan.steps} steps on: the ratio "
            "leaves 1 and clips act"
        )
        suite = getattr(trainer.lightning_module, "reward", None)
        weights = getattr(suite, "weights", {}).items()
        greedy = getattr(trainer.lightning_module, "reads_greedy", False)
        return "\n".join(
            [
                f"plan: {steps} steps over {rows:,} prompts ({passes:.2g} passes), "
                f"{plan.describe()}; {len(self.val_rows or ()):,} prompts to validate on",
                *["and of each prompt a greedy completion, which is only compared with"] * greedy,
                ratio,
                f"rewards: {', '.join(f'{weight:g} x {name}' for name, weight in weights)}",
            ]
        )

    def _planned(self, trainer: L.Trainer, sizes: RolloutPlan) -> RolloutPlan:
        """The sizes on this Trainer, which learns from them how many micro-batches a step has."""
        plan = sizes.on(self._replica().num_replicas, None if self._asked == 1 else self._asked)
        trainer.accumulate_grad_batches = plan.micro_batches
        return plan

    def _sizes_in_tokens(self, actor: Any) -> RolloutPlan:
        """The sizes of steps that are cut by tokens, made for the longest completions."""
        prompt = max(len(row.ids) for row in self.train_rows.prompts)
        completion: int = actor.sampling.max_new_tokens
        if prompt + completion > (self.max_tokens_per_batch or 0):
            rank_zero_warn(
                f"a prompt and its completion may have {prompt} + {completion} tokens, more than "
                f"the {self.max_tokens_per_batch} of data.max_tokens_per_batch: such a one has a "
                "micro-batch of its own. If memory does not suffice for that, lower "
                "data.max_prompt_length or module.sampling.max_new_tokens"
            )
        return replace(
            self.sizes,
            ways=self._ways(),
            most_tokens=self.max_tokens_per_batch,
            longest=(prompt, completion),
        )

    def _rows(self) -> tuple[PromptRows, PromptRows | None]:
        """Prompts for training and validation."""
        if isinstance(self.val_split, float):
            whole = open_prompts(self.path, self.tokenizer, self.how, split=self.split)
            train, val = split_rows(len(whole), self.val_split, self.seed)
            return whole.select(train[: self.max_rows]), whole.select(val[: self.val_max_rows])
        train_rows = open_prompts(
            self.path, self.tokenizer, self.how, split=self.split, max_rows=self.max_rows
        )
        if self.val_path is None and self.val_split is None:
            return train_rows, None
        source, split = (
            (self.val_path, "train") if self.val_path is not None else (self.path, self.val_split)
        )
        val_rows = open_prompts(
            source, self.tokenizer, self.how, split=str(split), max_rows=self.val_max_rows
        )
        return train_rows, val_rows

    def _check(self) -> None:
        """Refuse at once what cannot work."""
        if self.val_path is not None and self.val_split is not None:
            raise UserError(
                f"data.val_path and the split '{self.val_split}' exclude each other: "
                "set one of data.val_path and data.val_split to null"
            )
        is_share = isinstance(self.val_split, float) and 0 < self.val_split < 1
        if not (is_share or self.val_split is None or isinstance(self.val_split, str)):
            raise UserError(
                "data.val_split must be the name of a split or a share between 0 and 1, "
                f"not {self.val_split!r}"
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not isinstance(self.shuffle, bool):
            raise UserError(f"data.shuffle must be true or false, not {self.shuffle!r}")
        if type(self.seed) is not int:
            raise UserError(f"data.seed must be a whole number, not {self.seed!r}")
        names = ("max_rows", "val_max_rows", "max_tokens_per_batch")
        limits = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in limits.items() if value is not None}
        for name, value in {**given, "val_batch_size": self.val_batch_size}.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and value >= 1):
                raise UserError(f"data.{name} must be a whole number of at least 1, not {value!r}")
