"""What modules share whose losses compare responses of the data with what a reference says of them.

The callbacks that provide the reference, and check it before the first step, know no more of a
module than what stands here.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_align.losses import TensorCache, cached_reference
from lit_align.modules.metrics import Sums, gradient_norm
from lit_align.modules.policy import Batch, PolicyModule
from lit_align.modules.running import RunningNumbers
from lit_align.modules.whole_window import Windows
from lit_align.policies import policy_fingerprint


class ComparingModule(PolicyModule):
    """Looks the reference up by the index of a row, or runs it.

    Attributes:
        sides: the responses that a row has, by the names of the data: `chosen_ids` is of `chosen`.
        reference_cache: what the reference says of each row.
        reference_fingerprint: of the policy before the first step: what the cache is a cache of.
        running: the numbers that losses remember.
        windows: the optimizer step that is being trained on, if it is looked at as a whole.
        train_sums: of the micro-batches since metrics were last logged.
    """

    loss: Any
    sides: ClassVar[tuple[str, ...]]
    reference_fingerprint: str
    reference_cache: TensorCache | None = None
    running: RunningNumbers
    windows: Windows
    train_sums: Sums

    @property
    def asked_sides(self) -> tuple[str, ...]:
        """Those of `sides` of which the loss reads what the reference says."""
        return self.sides

    @property
    def rewards_are_relative(self) -> bool:
        """Whether rewards compare with the reference: those of a policy that equals it are 0."""
        return True

    @property
    def reads_heads(self) -> bool:
        """Whether it also reads it of each response as far as the other one goes."""
        return False

    def response_logps(self, batch: Batch, model: nn.Module | None = None) -> Any:
        """Log-probs of all responses under the policy, or under another model.

        Returns:
            A named tuple: for each side, by its name, a sum, (B,) nats, and `*_lengths`, its scored
            tokens, (B,); None for what the loss does not read. It has a method `sums`.
        """
        raise NotImplementedError

    def response_loss(self, batch: Batch, logps: Any) -> Any:
        """What the loss says of each row.

        Args:
            batch: of the rows.
            logps: as `response_logps` gives it.

        Returns:
            A named tuple of (B,) each: losses, then rewards.
        """
        raise NotImplementedError

    def note_reference(self) -> None:
        """Keep the fingerprint of the policy that a cache is a cache of, and a live reference."""
        # Beside a live reference as well: a later run may have a cache.
        if self.loss.reads_reference and not hasattr(self, "reference_fingerprint"):
            self.reference_fingerprint = policy_fingerprint(self.policy)
        if self.live_reference is not None:
            self.live_reference.note(self.policy, self.reference, self.device_mesh)

    def reference_rows(self, batch: Batch) -> dict[str, Tensor]:
        """Log-probs of the responses under the reference, (B,), nats: always sums.

        Returns:
            `reference_*_logps` of each side, and what else the loss reads of the reference.
        """
        known = {name: rows for name, rows in batch.items() if name.startswith("reference_")}
        if known:  # of a window that was looked at
            return known
        if self.live_reference is None:
            return cached_reference(self.loss.title, batch, self.reference_cache)
        with self.live_reference(self.trainer, self.policy) as reference:
            sums: dict[str, Tensor] = self.response_logps(batch, reference).sums("reference")
        return sums

    def on_train_start(self) -> None:
        super().on_train_start()
        self.windows.forget()
        self.train_sums.reset()
        self.running.forget_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["running_numbers"] = self.running.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.running.load_state_dict(checkpoint.get("running_numbers", {}))

    def means_of(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is logged, from sums over micro-batches and ranks; `loss` among it."""
        raise NotImplementedError

    def train_metrics(self) -> dict[str, Tensor]:
        """Means over the micro-batches since the last call, on all ranks; nothing without any."""
        if self.train_sums.is_empty:
            return {}
        means = self.means_of(self.train_sums.compute())
        self.train_sums.reset()
        return means

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.running.end_step(self.trainer)
        if self.is_logging_step():
            means = self.train_metrics()
            self.refuse_a_loss_that_is_no_number(means["loss"])
            means["grad_norm"] = gradient_norm(self.policy.parameters())
            self.log_step(means, on_bar="loss")

    def on_train_epoch_end(self) -> None:
        # What is left of the epoch's steps is logged with those that follow.
        if not self.train_sums.is_empty:
            means = self.means_of(self.train_sums.compute())
            self.refuse_a_loss_that_is_no_number(means["loss"])
