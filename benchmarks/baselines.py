"""What others do with the same batches: TRL as it ships, TRL on response tokens, full logits.

On a GPU, TRL projects response tokens only; on the CPU it projects every position. `response_only`
switches its CPU path to the GPU's set of tokens, so that an advantage that comes from the CPU alone
can be told from one that carries over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from text import Group, Pair
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

BETA = 0.1
# Of every pair. What it is does not matter to speed; here the loss is in its linear part, where it
# shows differences of log-probs as they are instead of magnifying or hiding them.
REFERENCE = (0.0, -1000.0)

_COMMON = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def dpo_trainer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, pairs: int, **options: Any
) -> DPOTrainer:
    """TRL's trainer around the model, for its collator and its loss."""
    rows = [{"prompt": "hello there", "chosen": " general", "rejected": " who are you"}] * pairs
    settings = {**_COMMON, "bf16": False, "max_length": None, "precompute_ref_log_probs": True}
    args = DPOConfig(
        mkdtemp(), per_device_train_batch_size=pairs, beta=BETA, **{**settings, **options}
    )
    return DPOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def dpo_step(
    trainer: DPOTrainer,
    model: nn.Module,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Sequence[Pair]], Tensor]:
    """Collate, loss with TRL's metrics, backward.

    Args:
        trainer: of `dpo_trainer`.
        model: that it was made around.
        precision: what the forward pass runs in; the trainer's own would be that of the first
            trainer of the process, whatever it asks for.
    """

    def step(pairs: Sequence[Pair]) -> Tensor:
        rows = [
            {
                "prompt_ids": pair.prompt,
                "chosen_ids": pair.chosen,
                "rejected_ids": pair.rejected,
                "ref_chosen_logps": REFERENCE[0],
                "ref_rejected_logps": REFERENCE[1],
            }
            for pair in pairs
        ]
        inputs = trainer.data_collator(rows)
        with trainer.compute_loss_context_manager(), precision():
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    return step


def grpo_trainer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, completions: int, **options: Any
) -> GRPOTrainer:
    """TRL's trainer around the model, for its loss."""
    settings = {**_COMMON, "bf16": False, "beta": 0.0, "max_completion_length": 128}
    args = GRPOConfig(
        mkdtemp(),
        per_device_train_batch_size=completions,
        num_generations=8,
        **{**settings, **options},
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "hello there"}] * completions),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def grpo_step(trainer: GRPOTrainer, model: nn.Module) -> Callable[[Sequence[Group]], Tensor]:
    """Pad, loss with TRL's metrics, backward."""

    def step(groups: Sequence[Group]) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, _grpo_inputs(groups))
        loss.backward()
        return loss.detach()

    return step


def advantages(completions: int) -> Tensor:
    """Of the completions of a batch: any numbers that differ."""
    return torch.linspace(-1.3, 1.7, completions)


def _grpo_inputs(groups: Sequence[Group]) -> dict[str, Tensor]:
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [row for group in groups for row in group.completions]
    prompt_ids, prompt_mask = _padded(prompts, left=True)
    completion_ids, completion_mask = _padded(completions, left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages(len(completions)),
        "num_items_in_batch": completion_mask.sum(),
    }


def _padded(rows: Sequence[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, longest)."""
    width = max(map(len, rows))
    fillers = [[0] * (width - len(row)) for row in rows]
    both = list(zip(rows, fillers, strict=True))
    ids = [gap + row if left else row + gap for row, gap in both]
    ones = [([0] * len(g) + [1] * len(r)) if left else [1] * len(r) + [0] * len(g) for r, g in both]
    return torch.tensor(ids), torch.tensor(ones)


@contextmanager
def response_only() -> Iterator[None]:
    """Let TRL project the tokens that it projects on a GPU; its own kernels stay off."""
    usual = trl_utils._use_triton
    trl_utils._use_triton = lambda _: True
    try:
        yield
    finally:
        trl_utils._use_triton = usual


def full_logits_pairs(model: nn.Module) -> Callable[[Sequence[Pair]], Tensor]:
    """The plain loop: all logits of the padded batch, log-softmax, gather."""

    def step(pairs: Sequence[Pair]) -> Tensor:
        answers = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        prompts = [pair.prompt for pair in pairs] * 2
        logprobs, scored = _full_logprobs(model, prompts, answers)
        chosen, rejected = (logprobs * scored).sum(-1).chunk(2)
        lead = (chosen - REFERENCE[0]) - (rejected - REFERENCE[1])
        loss = -F.logsigmoid(BETA * lead).mean()
        loss.backward()
        return loss.detach()

    return step


def full_logits_groups(model: nn.Module) -> Callable[[Sequence[Group]], Tensor]:
    """The same for completions: the gradient of a policy that has not moved, mean over tokens."""

    def step(groups: Sequence[Group]) -> Tensor:
        prompts = [group.prompt for group in groups for _ in group.completions]
        answers = [row for group in groups for row in group.completions]
        logprobs, scored = _full_logprobs(model, prompts, answers)
        ratio = (logprobs - logprobs.detach()).exp()
        gains = ratio * advantages(len(answers)).unsqueeze(-1) * scored
        loss = -gains.sum() / scored.sum()
        loss.backward()
        return loss.detach()

    return step


def _full_logprobs(
    model: nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens but the first, and which are of the answers; (B, T-1) each."""
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    ids, mask = _padded(rows, left=False)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    scored = mask[:, 1:].bool() & (torch.arange(1, ids.shape[1]) >= starts.unsqueeze(-1))
    return logprobs, scored
