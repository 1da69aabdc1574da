"""What validation finds out about a policy that writes: pass@k and what stands beside it."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses import pass_at_k, pass_hat_k, standard_error
from lit_align.rollout import Sample


class Evaluation:
    """Collects the completions of one validation and sums them up.

    Args:
        generations: completions of each prompt, at least 1.
        right_from: weighted sum of rewards from which a completion counts as right.

    Attributes:
        samples: of the last validation, on all ranks, in the order of the prompts.
    """

    def __init__(self, generations: int, right_from: float) -> None:
        whole = isinstance(generations, int) and not isinstance(generations, bool)
        if not whole or generations < 1:
            raise UserError(f"val_generations must be a whole number >= 1, not {generations!r}")
        if isinstance(right_from, bool) or not isinstance(right_from, int | float):
            raise UserError(f"right_from must be a number, not {right_from!r}")
        self.generations = generations
        self.right_from = right_from
        self.samples: list[Sample] = []

    def reset(self) -> None:
        """Forget the last validation."""
        self.samples = []

    def add(self, samples: Sequence[Sample]) -> None:
        """Completions that this rank has had written."""
        self.samples += samples

    def gather(self, from_all_ranks: Callable[[list[Sample]], list[list[Sample]]]) -> None:
        """Put together what the ranks have.

        Args:
            from_all_ranks: brings what each rank holds to all of them.
        """
        samples = [sample for mine in from_all_ranks(self.samples) for sample in mine]
        self.samples = sorted(samples, key=lambda sample: (sample.row, sample.number))

    def metrics(self) -> dict[str, float]:
        """Means over prompts, each with its standard error under `.../stderr`.

        `pass@k` is the unbiased estimate (Chen et al. 2021) for k = 1, 2, 4, ... up to the number
        of completions, `pass^k` that all k are right. With one prompt there is no standard error.

        A completion without a reward is not right. It is left out of the prompt's mean reward, and
        a prompt without any of the mean over prompts; where nothing is left, that is NaN.
        """
        rows = sorted({sample.row for sample in self.samples})
        right = self._table(rows, lambda s: float(s.reward >= self.right_from)).sum(-1).long()
        drawn = torch.full_like(right, self.generations)
        of_prompts = {
            "reward": self._table(rows, lambda s: s.reward).nanmean(-1),
            "completions/mean_length": self._table(rows, lambda s: len(s.completion_ids)).mean(-1),
            "completions/clipped_ratio": self._table(
                rows, lambda s: float(s.finish_reason == "length")
            ).mean(-1),
        }
        for k in powers_of_two(self.generations):
            of_prompts[f"pass@{k}"] = pass_at_k(drawn, right, k)
            if k > 1:
                of_prompts[f"pass^{k}"] = pass_hat_k(drawn, right, k)
        return _with_errors(of_prompts)

    def _table(self, rows: Sequence[int], value: Callable[[Sample], float]) -> Tensor:
        """A value of each completion, (prompts, completions), float64."""
        values = torch.tensor([value(sample) for sample in self.samples], dtype=torch.float64)
        return values.view(len(rows), self.generations)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... as far as `most`."""
    return [2**n for n in range(most.bit_length())]


def _with_errors(of_prompts: dict[str, Tensor]) -> dict[str, float]:
    """Means of the numbers among the values of each name, (prompts,), and their errors."""
    found: dict[str, float] = {}
    for name, every in of_prompts.items():
        values = every[~every.isnan()]
        found[name] = values.mean().item()
        if not math.isnan(error := standard_error(values).item()):
            found[f"{name}/stderr"] = error
    return found
