"""What the data modules share: a tokenizer, a share of the rows, and a place to go on from."""

from collections.abc import Mapping
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase

from lit_align.data.loader import Replica
from lit_align.errors import UserError
from lit_align.logprobs import Ways, ways


class Resumable(Protocol):
    """A loader that knows where it stands."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ResumableDataModule(L.LightningDataModule):
    """Keeps the position of its training loader in checkpoints.

    Lightning also keeps what the loader itself says, but never gives it back to a loader that was
    made early, as it is for a schedule that asks how many steps there will be.

    Args:
        tokenizer: None: that of the module in training.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._loader: Any = None
        self._loader_state: dict[str, Any] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one given, else that of the module in training."""
        module = self.trainer.lightning_module if self.trainer else None
        tokenizer = self._tokenizer or getattr(module, "tokenizer", None)
        if tokenizer is None:
            raise UserError(
                f"there is no tokenizer: {type(self).__name__}(..., tokenizer=...) outside a "
                "Trainer or with a module that has none"
            )
        return tokenizer

    def state_dict(self) -> dict[str, Any]:
        """The position of the training loader, and what it is in the midst of."""
        return {} if self._loader is None else {"loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._loader_state = state_dict.get("loader")
        # Under strategies that shard, checkpoints are read after such an early loader was made.
        self._restore()

    def _restore(self) -> None:
        """Give a state that was loaded to the loader, as soon as both are there."""
        if self._loader is not None and self._loader_state is not None:
            self._loader.load_state_dict(self._loader_state)
            self._loader_state = None

    def _take_over_accumulation(self, instead: str) -> int:
        """Micro-batches of a step as the user wants them; the Trainer is given others from now on.

        Args:
            instead: what says how many micro-batches make a step.

        Raises:
            UserError: if a schedule would change them.
        """
        trainer: Any = self.trainer
        if any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):
            raise UserError(
                "GradientAccumulationScheduler changes how many micro-batches make a step, which "
                f"{instead} here: leave it out"
            )
        asked: int = trainer.accumulate_grad_batches
        self._asked = asked
        return asked

    def on_exception(self, exception: BaseException) -> None:
        # There is no teardown then.
        self.teardown(TrainerFn.FITTING)

    def teardown(self, stage: str) -> None:
        """Leave the Trainer as it was: other data may want another accumulation."""
        if self.trainer is not None and stage == TrainerFn.FITTING and hasattr(self, "_asked"):
            self.trainer.accumulate_grad_batches = self._asked

    def _ways(self) -> Ways:
        """How batches go through the model in training; padded, if nothing is known of it."""
        module = self.trainer.lightning_module if self.trainer else None
        policy: Any = getattr(module, "policy", None)
        if policy is None:
            return Ways(packs=False, shares=False, chooses=False)
        found = ways(policy, module.layout)  # type: ignore[union-attr, arg-type]
        # Of the two rows of a pair only one is scored from its beginning on: they do not share it.
        scores_prompt = getattr(module.loss, "reads_prompt", False)  # type: ignore[union-attr]
        return found._replace(shares=found.shares and not scores_prompt)

    def needs_window(self) -> bool:
        """Whether the module in training looks at each optimizer step as a whole."""
        module = self.trainer.lightning_module if self.trainer else None
        return bool(getattr(module, "needs_window", False))

    def _replica(self) -> Replica:
        """Not the global rank: ranks that hold parts of one model must see the same rows."""
        shared = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return Replica(**(shared or {}))
