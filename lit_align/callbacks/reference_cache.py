"""The reference's log-probs of every row, computed once and shared by all runs that need them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import ConcatDataset

from lit_align.callbacks.attached import answered_data, comparing_module
from lit_align.callbacks.reference_build import Sizes, Writer, build
from lit_align.callbacks.reference_check import check_start
from lit_align.callbacks.reference_rows import Responses, Rows
from lit_align.callbacks.reference_source import ReferenceSource, floating_dtype
from lit_align.callbacks.reference_store import ReferenceStore, Scored
from lit_align.data.cache import cache_root
from lit_align.errors import UserError
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.ranks import from_all_ranks

_INSTEAD = "a GRPOModule keeps the reference's log-probs in its rollouts"


class ReferenceCache(L.Callback):
    """Gives the module the reference's log-probs of all rows before the first step.

    Only responses that no earlier run has asked the same reference about are computed; a loss that
    reads no reference costs nothing, nor does one whose reference moves (`ReferenceRefresh`). The
    numbers do not depend on the loss, on hyperparameters or on the number of ranks, so a sweep
    computes them once. At the first step the policy is compared with its reference: a run that does
    not start from it ends there and says what may be wrong.

    Args:
        folder: shared by runs (and by nodes); None: `reference` in the cache folder of lit_align.
        batch_size: responses per forward pass, at most; None: as many as the tokens allow.
        max_tokens_per_batch: that a forward pass runs at most, a prompt that responses share
            counted as often as it is run, and padding if there is any; a longer response has a
            pass of its own. None: 2,048 on a CPU, whose caches hold no more, 8,192 elsewhere.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        max_tokens_per_batch: int | None = None,
    ) -> None:
        for name, size, unit in (
            ("batch_size", batch_size, "responses"),
            ("max_tokens_per_batch", max_tokens_per_batch, "tokens"),
        ):
            if size is not None and (type(size) is not int or size < 1):
                raise UserError(
                    f"reference_cache.{name} must be a whole number of {unit}, at least 1, "
                    f"not {size!r}"
                )
        self.folder = folder
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.store: ReferenceStore | None = None
        self._resumed_key: str | None = None
        self._fingerprint_is_new = False
        self._check_pending = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        comparing_module(pl_module, self, _INSTEAD)
        self.store = self._resumed_key = None
        self._check_pending = False
        # One that is older than this run may be of weights that have moved since.
        self._fingerprint_is_new = not hasattr(pl_module, "reference_fingerprint")

    def state_dict(self) -> dict[str, Any]:
        return {"key": None if self.store is None else self.store.key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Learn which reference the run had: before `on_fit_start`, or after it with sharding."""
        self._resumed_key = state_dict["key"]
        self._refuse_another_reference()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = comparing_module(pl_module, self, _INSTEAD)
        if _is_asked_for(module):
            rows = answered_data(trainer, self).rows_of_fit()
            source = self._provide(trainer, module, ConcatDataset(rows))
            self._check_pending = source.is_start_of_training

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = comparing_module(pl_module, self, _INSTEAD)
        if _is_asked_for(module) and trainer.state.fn == TrainerFn.VALIDATING:
            self._provide(trainer, module, answered_data(trainer, self).val_rows)

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Mapping[str, Tensor],
        batch_idx: int,
    ) -> None:
        # Under sharding a checkpoint shows only now, by the step it was written at.
        pending = self._check_pending and trainer.global_step == 0
        self._check_pending = False
        if not pending:
            return
        assert self.store is not None
        module = comparing_module(pl_module, self, _INSTEAD)
        faults = from_all_ranks(trainer, check_start(trainer, module, batch))
        if fault := next(filter(None, faults), None):
            raise UserError(
                f"{fault}. Likely causes: stale or damaged numbers (delete {self.store.folder}); "
                "an adapter that is not fresh (say what to compare with: reference=...); dropout "
                "that is on in evaluation mode; a precision or attention other than the numbers "
                "were made with; attention that is not deterministic"
            )

    def _provide(self, trainer: L.Trainer, module: ComparingModule, rows: Rows) -> ReferenceSource:
        """Set `module.reference_cache`, computing what no run has computed before."""
        responses = Responses(rows, module.asked_sides, module.reads_heads)
        source = ReferenceSource(trainer, module, fingerprint_is_new=self._fingerprint_is_new)
        self.store = ReferenceStore(self._root(), source.identity)
        self._refuse_another_reference()
        known = self.store.read()
        # One rank looks: another run may be filling the store, and all must do the same work.
        keys = [response.key for response in responses.absent_from(known)]
        keys = trainer.strategy.broadcast(keys)
        dtype = torch.promote_types(floating_dtype(module.policy), torch.float32)
        if keys:
            rank_zero_info(f"computing the reference's log-probs of {len(keys)} responses")
            known |= self._compute(trainer, source, responses, keys, dtype)
        rank_zero_info(
            f"reference: {len(responses.by_key)} responses, "
            f"{len(responses.by_key) - len(keys)} from cache, {len(keys)} computed "
            f"({self.store.folder})"
        )
        if responses.absent_from(known):
            raise UserError(
                f"the reference cache {self._root()} holds different rows on different ranks: "
                "choose a folder that all nodes share"
            )
        module.reference_cache = responses.cache(known, dtype)
        return source

    def _compute(
        self,
        trainer: L.Trainer,
        source: ReferenceSource,
        responses: Responses,
        keys: list[bytes],
        dtype: torch.dtype,
    ) -> dict[bytes, Scored]:
        """Entries of all `keys`, each rank having computed its share of them."""
        assert self.store is not None
        absent = [responses.by_key[key] for key in keys]
        on_cpu = trainer.strategy.root_device.type == "cpu"
        most_tokens = self.max_tokens_per_batch or (2048 if on_cpu else 8192)
        writer = Writer(self.store, dtype)
        with source.model() as model:
            build(trainer, model, responses, absent, Sizes(most_tokens, self.batch_size), writer)
        computed: dict[bytes, Scored] = {}
        for share in from_all_ranks(trainer, writer.entries):
            computed |= share
        return computed

    def _root(self) -> Path:
        return cache_root() / "reference" if self.folder is None else Path(self.folder)

    def _refuse_another_reference(self) -> None:
        """A resumed run must go on with the reference it began with."""
        if self.store is None or self._resumed_key in (None, self.store.key):
            return
        raise UserError(
            "this checkpoint was trained against another reference than this run would use "
            f"(in {self._root()}: {self._resumed_key} then, {self.store.key} now; meta.json there "
            "says what each is). The model it started from, its dtype, precision or attention has "
            "changed: set them as they were"
        )


def _is_asked_for(module: ComparingModule) -> bool:
    """Whether the loss reads a reference that stays where it is."""
    return module.loss.reads_reference and module.live_reference is None
