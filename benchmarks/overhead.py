"""What a step costs beside its arithmetic: `Trainer.fit` against a plain loop over the batches.

    python benchmarks/overhead.py

The model is tiny, so that what the Trainer and our modules do around it shows; what they do costs
the same beside a large one. Both sides run the same forward pass, loss, backward pass and optimizer
step on the same ready-made batches, and both let the forward pass say what is only logged (entropy
and the like); `Trainer.fit` alone has hooks, sums over ranks and loggers.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from logging import ERROR, getLogger
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lit_align import DPOModule, GRPOModule, PolicyRecipe
from lit_align.logprobs import response_logprobs
from lit_align.losses import (
    GRPOConfig,
    TensorCache,
    aggregate,
    cached_reference,
    compute_loss,
    grpo_terms,
    policy_ratio,
    token_losses,
)
from lit_align.modules.pair_logps import stacked_pairs

STEPS = 200
ROUNDS = 5
LENGTH = 10
ROWS = 4
VOCABULARY = 64
# Of the recipes, and Lightning's own.
LOG_EVERY = (5, 50)

Batch = dict[str, Tensor]
Module = DPOModule | GRPOModule


def model() -> LlamaForCausalLM:
    """Two layers of width 32, random."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **size, **heads))


def _rows(seed: int) -> Batch:
    """ROWS rows of one length: a prompt of 4 tokens and a response."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def pairs(number: int) -> Batch:
    """A batch as the data module makes it."""
    sides = {"chosen": _rows(2 * number), "rejected": _rows(2 * number + 1)}
    batch = {f"{side}_{name}": rows[name] for side, rows in sides.items() for name in rows}
    stamps = {"pair_mask": torch.ones(ROWS, dtype=torch.bool), "window_pairs": torch.tensor(ROWS)}
    return batch | stamps | {"index": torch.arange(ROWS)}


def completions(number: int) -> Batch:
    """A recorded micro-batch that is a window of its own."""
    return _rows(number) | {
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "window_tokens": torch.tensor(6 * ROWS),
        "window_rows": torch.tensor(ROWS),
        "window_prompts": torch.tensor(1),
        "row_prompt_tokens": torch.full((ROWS,), 6 * ROWS),
    }


def preference_module(loss: str) -> DPOModule:
    """Around a new model, with a reference that is known."""
    module = DPOModule(model(), loss)
    cache = torch.full((ROWS,), -25.0)
    module.reference_cache = TensorCache({"chosen_logps": cache, "rejected_logps": cache})
    return module


def policy_module(loss: str) -> GRPOModule:
    """Around a new model; the tokenizer is never used."""
    tokenizer = PolicyRecipe().tokenizer()
    return GRPOModule(model(), GRPOConfig(loss), reward=len, tokenizer=tokenizer)


def preference_loss(module: DPOModule, batch: Batch) -> Tensor:
    """The arithmetic of a preference loss, and nothing else."""
    scored = response_logprobs(module.policy, *stacked_pairs(batch), statistics=True)
    logps = scored.logprobs.sum(-1)
    config = next(iter(module.loss.terms.values())).config
    given = dict(batch)
    if module.loss.reads_reference:
        given |= cached_reference(module.loss.title, batch, module.reference_cache)
    if config.average_logps:
        logps = logps / scored.mask.sum(-1)
    return compute_loss(config, given, *logps.chunk(2)).losses.mean()


def policy_loss(module: GRPOModule, batch: Batch) -> Tensor:
    """The arithmetic of a policy loss, and nothing else."""
    scored = response_logprobs(
        module.policy, batch["input_ids"], batch["attention_mask"], batch["labels"], entropy=True
    )
    new, mask, config = scored.logprobs, scored.mask, module.loss
    old = new.detach()
    ratio = policy_ratio(config, new, old, mask)
    gains = batch["advantages"].unsqueeze(-1).expand_as(mask)
    terms = grpo_terms(new, ratio, gains, None, config, None, None, old_logprobs=old, mask=mask)
    losses = token_losses(config, terms, scored.entropy, 0.0)
    return aggregate(config, losses, mask, batch)


def bare(case: "Case", batches: Sequence[Batch]) -> float:
    """CPU seconds of a plain loop."""
    module = case.module()
    module.policy.train()
    optimizer = module.optimizer(list(module.policy.parameters()))
    start = time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        case.loss(module, batch).backward()
        optimizer.step()
    return time.process_time() - start


class Clock(L.Callback):
    """CPU seconds from the first step to the end of training."""

    seconds: float

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.process_time()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.process_time() - self._start


def fitted(
    module: Callable[[], Module], batches: Sequence[Batch], log_every: int, *, logs: bool
) -> float:
    """CPU seconds of `Trainer.fit`."""
    clock = Clock()
    with TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[clock],
            logger=CSVLogger(folder) if logs else False,
            log_every_n_steps=log_every,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module(), DataLoader(batches, batch_size=None))
    return clock.seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's hints about loaders and loggers."""
    getLogger("lightning.pytorch").setLevel(ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Case(NamedTuple):
    """What is run, and on what."""

    module: Callable[[], Module]
    loss: Callable[[Any, Batch], Tensor]
    batch: Callable[[int], Batch]


CASES = {
    "dpo": Case(partial(preference_module, "dpo"), preference_loss, pairs),
    "simpo": Case(partial(preference_module, "simpo"), preference_loss, pairs),
    "grpo": Case(partial(policy_module, "clip"), policy_loss, completions),
}


def overhead(steps: int = STEPS, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds that a step of `Trainer.fit` takes more than one of a plain loop, one thread.

    Args:
        steps: of each run.
        rounds: of all runs, one after the other, every other one in reverse order.

    Returns:
        Medians over the rounds of the differences within one, in CPU time: by the loss, how often
        is logged, and whether to a file, such as `dpo, every 50 steps, CSV`; and `dpo, plain loop`,
        what a step of that takes.
    """
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with _quiet():
        for name, case in CASES.items():
            _round(name, case, steps // 4, is_reversed=False)  # warm-up
            for number in range(rounds):
                took = _round(name, case, steps, is_reversed=number % 2 == 1)
                for label, milliseconds in took.items():
                    found.setdefault(label, []).append(milliseconds)
    return {label: statistics.median(every) for label, every in found.items()}


def _round(name: str, case: Case, steps: int, *, is_reversed: bool) -> dict[str, float]:
    """One run of each kind, in milliseconds per step: of the plain loop, and beyond it."""
    batches = [case.batch(number) for number in range(steps)]
    plain = f"{name}, plain loop"
    runs: dict[str, Callable[[], float]] = {plain: partial(bare, case, batches)}
    for every, logs in product(LOG_EVERY, (False, True)):
        label = f"{name}, every {every} steps, {'CSV' if logs else 'no logger'}"
        runs[label] = partial(fitted, case.module, batches, every, logs=logs)
    order = list(runs)[::-1] if is_reversed else list(runs)
    took = {label: runs[label]() / steps * 1000 for label in order}
    return {label: took[label] - (0 if label == plain else took[plain]) for label in runs}


if __name__ == "__main__":
    for said, milliseconds in overhead().items():
        sys.stdout.write(f"{said:34} {milliseconds:6.2f} ms per step\n")
