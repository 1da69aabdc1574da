"""Validation also where training ends in the middle of an epoch."""

from typing import Any

import lightning as L


class ValidateAtEnd(L.Callback):
    """Lets Lightning validate once more when `max_steps` is reached.

    Lightning validates after so many batches and at the end of an epoch; a run that `max_steps`
    ends between two of those would never show what it arrived at.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
