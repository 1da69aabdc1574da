"""Recorded rollouts instead of a model: tests and offline training that repeat to the bit."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from lit_align.errors import UserError
from lit_align.rollout.engine import Completion, Request, Sampling
from lit_align.rollout.recording import Recorded, read_recordings, shown
from lit_align.rollout.rows import GREEDY


class ReplayEngine:
    """Answers a prompt with what was recorded for it, by its ids and the sample's number.

    Nothing is drawn, and no order matters: of the sampling only the bound on the length is heeded.
    Where one prompt was recorded at several versions of the policy, the newest recording that is
    not newer than the weights answers, else the oldest; within one version, the first.

    The log-probs are those of the policy at recording, under the temperature of the recording.
    They are what a correction of the sampler's mismatch needs, and not those of the policy that is
    in training.

    Args:
        path: a JSONL file of rollouts, or a folder of them, one completion a line, as the rollout
            log writes it; files called validation-* are left alone. Read are prompt_ids,
            completion_ids, sample (-1 for the greedy one), finish_reason, and where present
            logprobs, version (else 0) and prompt (for messages).

    Raises:
        UserError: if there is no such file, or a line is broken, naming file and line.
    """

    in_process = False
    is_live = False

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path).expanduser()
        self._recorded = read_recordings(self._path)
        self.version: int | None = None

    def sync_weights(self, version: int, policy: nn.Module) -> None:
        """Note the version; the weights do not matter."""
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """See `Engine`.

        Raises:
            UserError: if a completion was not recorded, or is longer than `max_new_tokens`.
        """
        self._check_all_there(requests)
        answers = [
            [self._pick(request.prompt_ids, sample) for sample in request.samples]
            for request in requests
        ]
        for recorded in (recorded for group in answers for recorded in group):
            if len(recorded.completion.ids) > sampling.max_new_tokens:
                raise UserError(
                    f"{recorded.place}: a completion of {len(recorded.completion.ids)} tokens was "
                    f"recorded for {shown(recorded.prompt)}: raise max_new_tokens "
                    f"(now {sampling.max_new_tokens})"
                )
        return [[recorded.completion for recorded in group] for group in answers]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a replay does not move on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _pick(self, prompt_ids: Sequence[int], sample: int) -> Recorded:
        """The recording that stands for the weights' version; the dictionary is in its order."""
        by_version = self._recorded[tuple(prompt_ids)][sample]
        past = [version for version in by_version if version <= (self.version or 0)]
        return by_version[max(past) if past else min(by_version)]

    def _check_all_there(self, requests: Sequence[Request]) -> None:
        problems = [
            problem for request in requests if (problem := self._lacks(request)) is not None
        ]
        if problems:
            others = f" (and {len(problems) - 1} more prompts)" if len(problems) > 1 else ""
            raise UserError(
                f"{self._path}: {problems[0]}{others}; record a rollout of the same prompts, "
                "tokenizer and num_generations, or generate with another engine"
            )

    def _lacks(self, request: Request) -> str | None:
        """What was not recorded of that which is asked for, if so."""
        samples: Mapping[int, Mapping[int, Recorded]] = self._recorded.get(
            tuple(request.prompt_ids), {}
        )
        if not samples:
            ids = request.prompt_ids
            return f"nothing was recorded for a prompt of {len(ids)} tokens, {shown(ids)}"
        absent = [sample for sample in request.samples if sample not in samples]
        if not absent:
            return None
        prompt = next(iter(next(iter(samples.values())).values())).prompt
        return (
            f"{len(samples)} completions were recorded for the prompt {shown(prompt)}, and none "
            f"of them is sample {', '.join(map(str, absent))}"
            + " (the greedy one, which the advantage compares with)"
            * (GREEDY in absent)
        )
