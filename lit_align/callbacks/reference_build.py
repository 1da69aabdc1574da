"""Computing the reference's log-probs of what no run has asked it about before."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import lightning as L
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedTokenizerBase

from lit_align.callbacks.reference_rows import Response, Responses, cut
from lit_align.callbacks.reference_store import ReferenceStore, Scored
from lit_align.errors import UserError
from lit_align.logprobs import Layout, response_logprobs, ways
from lit_align.modules.inference import inference
from lit_align.modules.ranks import from_all_ranks, turns
from lit_align.modules.window import replica

# What a run that is killed loses at most; one that stops with an exception loses nothing.
WRITE_EVERY_SECONDS = 30.0


class Sizes(NamedTuple):
    """How much one forward pass takes at most: tokens that it runs, and responses or None."""

    tokens: int
    responses: int | None


@dataclass
class Writer:
    """Collects entries and writes them to the store now and then, and at the end in any case."""

    store: ReferenceStore
    dtype: torch.dtype
    entries: dict[bytes, Scored] = field(default_factory=dict)
    _pending: dict[bytes, Scored] = field(default_factory=dict)
    _written: float = field(default_factory=time.monotonic)

    def add(self, entries: Mapping[bytes, Scored]) -> None:
        self.entries.update(entries)
        self._pending.update(entries)
        if time.monotonic() - self._written >= WRITE_EVERY_SECONDS:
            self._write()

    def _write(self) -> None:
        self.store.add(self._pending, self.dtype)
        self._pending, self._written = {}, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write()


def build(
    trainer: L.Trainer,
    model: nn.Module,
    responses: Responses,
    asked: Sequence[Response],
    sizes: Sizes,
    writer: Writer,
) -> None:
    """Let all ranks together score what is asked; each adds its own share to its writer.

    Which rank scores a batch changes nothing about it, so the numbers are the same bit for bit for
    any number of ranks.

    Args:
        trainer: its module says in which layout.
        model: the reference.
        responses: knows the tokens.
        asked: some of them, those of a prompt following each other.
        sizes: of a batch, at most.
        writer: of this rank.

    Raises:
        UserError: on all ranks, if a log-prob is not finite; it names the response.
    """
    _, replicas = replica(trainer)
    with _progress(trainer) as progress, inference(trainer, model), writer:
        bar = progress.add_task("reference", total=len(asked))
        batches = cut(asked, ways(model, _layout(trainer)), *sizes)
        for batch, counts in turns(trainer, batches):
            scored = _score(model, responses, batch, trainer)
            _refuse_non_finite(trainer, responses, scored)
            if counts:
                writer.add({response.key: entry for response, entry in scored.items()})
            progress.advance(bar, len(batch) * replicas)


def _score(
    model: nn.Module, responses: Responses, batch: Sequence[Response], trainer: L.Trainer
) -> dict[Response, Scored]:
    tensors = (tensor.to(trainer.strategy.root_device) for tensor in responses.batch(batch))
    scored = response_logprobs(model, *tensors, layout=_layout(trainer))
    sums, counts = scored.logprobs.sum(-1).tolist(), scored.mask.sum(-1).tolist()
    entries = map(Scored, sums, counts)
    return dict(zip(batch, entries, strict=True))


def _layout(trainer: L.Trainer) -> Layout:
    return trainer.lightning_module.layout  # type: ignore[return-value]


def _refuse_non_finite(
    trainer: L.Trainer,
    responses: Responses,
    scored: Mapping[Response, Scored],
) -> None:
    """Raise on all ranks if any of them has a number that is none."""
    bad = next((r for r, entry in scored.items() if not math.isfinite(entry.logps)), None)
    if not trainer.strategy.reduce_boolean_decision(bad is not None, all=False):
        return
    tokenizer: PreTrainedTokenizerBase = trainer.lightning_module.tokenizer
    fault = bad and (
        f"the reference gives {responses.name(bad, tokenizer)}, a log-probability of "
        f"{scored[bad].logps}: nothing can be compared with that. Check the row; if it is in order,"
        " load the model in float32, with another attn_implementation, or another model"
    )
    raise UserError(next(filter(None, from_all_ranks(trainer, fault))))


def _progress(trainer: L.Trainer) -> Progress:
    """A bar where the user has not switched bars off."""
    wanted = trainer.is_global_zero and trainer.progress_bar_callback is not None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not wanted,
    )
