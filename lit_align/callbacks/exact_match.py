"""Whether the policy, left to answer by itself, gives the preferred answer word for word."""

from collections.abc import Sequence
from itertools import islice

import lightning as L
import torch
from torch import Tensor
from transformers import GenerationConfig

from lit_align.callbacks.attached import answered_data, comparing_module
from lit_align.errors import UserError
from lit_align.modules.inference import inference
from lit_align.modules.policy import PolicyModule
from lit_align.modules.ranks import from_all_ranks, is_sharded, turns
from lit_align.rollout import stop_token_ids

Answered = tuple[list[int], list[int]]  # ids of a prompt and of the answer that is wanted
_INSTEAD = "a GRPOModule logs val/pass@1 in its place"


class ExactMatch(L.Callback):
    """Logs `val/exact_match`: the share of prompts whose greedy answer is the chosen one.

    Of labelled completions that is a desirable one. It is measured at each validation, and before
    training if Lightning's sanity check runs over the whole validation set. A policy can learn to
    rank answers and forget how to give them; this number shows it.

    Args:
        rows: how many validation rows, the first ones; None: all.
        batch_size: prompts that are answered at once.
        max_new_tokens: upper bound of an answer, in tokens; None: what the chosen answers need.
    """

    def __init__(
        self, rows: int | None = None, batch_size: int = 64, max_new_tokens: int | None = None
    ) -> None:
        for name, value in (
            ("rows", rows),
            ("batch_size", batch_size),
            ("max_new_tokens", max_new_tokens),
        ):
            if value is not None and value < 1:
                raise UserError(f"exact_match.{name} must be at least 1, not {value}")
        self.rows = rows
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        comparing_module(pl_module, self, _INSTEAD)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf"):
            return
        module = comparing_module(pl_module, self, _INSTEAD)
        picked = list(islice(answered_data(trainer, self).val_rows.answers(), self.rows))
        if not picked:  # labelled completions, none of them desirable
            return
        batches = [picked[i : i + self.batch_size] for i in range(0, len(picked), self.batch_size)]
        hits = answers = 0
        with inference(trainer, module.policy):
            for batch, counts in turns(trainer, batches):
                matches = self._matches(module, batch)
                hits += counts * sum(matches)
                answers += counts * len(matches)
        shares = from_all_ranks(trainer, (hits, answers))
        all_hits, all_answers = (sum(column) for column in zip(*shares, strict=True))
        pl_module.log("val/exact_match", all_hits / all_answers, sync_dist=True)

    def _matches(self, module: PolicyModule, rows: Sequence[Answered]) -> list[bool]:
        """Per row, whether the greedy answer is the wanted one, up to where either ends."""
        ends = set(stop_token_ids(module.policy, module.tokenizer))
        wanted = [_until_end(answer, ends) for _, answer in rows]
        # No answer that is longer than all of these can be right.
        length = max(map(len, wanted))
        if self.max_new_tokens is not None:
            length = min(length, self.max_new_tokens)
        given = _greedy(module, [prompt for prompt, _ in rows], ends, length)
        return [_until_end(a, ends) == b for a, b in zip(given, wanted, strict=True)]


def _greedy(
    module: PolicyModule, prompts: Sequence[Sequence[int]], ends: set[int], length: int
) -> list[list[int]]:
    """The likeliest next token, again and again, after each prompt: ids of the answers."""
    pad = module.tokenizer.pad_token_id
    width = max(map(len, prompts))
    # Padding on the left: an answer must begin where its prompt ends.
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answers: Tensor = module.policy.generate(
        input_ids=ids.to(module.device),
        attention_mask=real.to(module.device),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
            use_cache=True,
            **_PLAIN,
        ),
        synced_gpus=is_sharded(module.policy),
    )
    return [answer[width:].tolist() for answer in answers]


# What a model's own generation config may set would change the greedy answer, or be warned about.
_PLAIN = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}


def _until_end(ids: Sequence[int], ends: set[int]) -> list[int]:
    """Ids up to the first that ends the answer, with it; chat templates write more after it."""
    stop = next((n for n, i in enumerate(ids, 1) if i in ends), len(ids))
    return list(ids[:stop])
