"""Makes the bundled model and its preference pairs.

    python -m lit_align.resources.make_arithmetic OUT

Writes `OUT/tiny` (a Hugging Face folder) and `OUT/arithmetic/{train,val}.jsonl`. One thread and
fixed seeds: the same versions of torch and of this file give the same bytes on the same machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_align.resources.arithmetic import Sum, held_out_sums, training_sums

SEED = 0
BATCH = 128
LEARNING_RATE = 2e-3
WARMUP = 100
MEASURE_EVERY = 5  # steps: the model passes from a third right to nearly all in about fifty
ENOUGH = 0.5  # greedy exact match on training sums at which supervision ends
ACCEPTED = (0.45, 0.6)  # on held-out sums, from the stored weights
MAX_STEPS = 1000
MAX_ANSWER = 5  # tokens: three digits and the end, and one to spare
MAX_ROUNDS = 100  # of sampling, until each sum has a wrong answer
TRAIN_PAIRS = 3200
VAL_PAIRS = 500
IGNORE = -100  # the label that transformers' own loss leaves out

SPECIAL_TOKENS = ["<bos>", "<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
  {%- elif message['role'] in ['system', 'user'] -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
  {%- else -%}
    {{- raise_exception("unknown role '" + message['role'] + "': use system, user or assistant") -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

log = logging.getLogger("make_arithmetic")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be encoded and numbers are read digit by digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def untrained_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.82 M parameters, head and embedding tied."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def prompt_text(tokenizer: PreTrainedTokenizerFast, question: Sum) -> str:
    """The chat as the model sees it when it is its turn to answer."""
    messages = [{"role": "user", "content": question.prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(tokenizer: PreTrainedTokenizerFast, sums: Sequence[Sum]) -> tuple[Tensor, Tensor]:
    """Chats with the right answer, right padded.

    Returns:
        Token ids, (N, T) int64; labels, (N, T): `IGNORE` but for the answer and its end.
    """
    prompts = [prompt_text(tokenizer, question) for question in sums]
    chats = [f"{p}{q.answer}<|end|>" for p, q in zip(prompts, sums, strict=True)]
    lengths = [len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts]
    padded = tokenizer(chats, add_special_tokens=False, padding=True, return_tensors="pt").input_ids
    positions = torch.arange(padded.shape[1])
    scored = (positions >= torch.tensor(lengths)[:, None]) & (padded != tokenizer.pad_token_id)
    return padded, padded.masked_fill(~scored, IGNORE)


def batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Row numbers for ever, every epoch in a new order; what does not fill a batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(rows, generator=generator)
        yield from order[: rows - rows % size].view(-1, size)


def supervise(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> None:
    """Cross-entropy on the answers, until about half of them come out right.

    The learning rate stays up: weights that were annealed lose a third of their right answers to
    the first steps of whatever trains them next.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    probe = torch.randperm(len(ids), generator=torch.Generator().manual_seed(SEED))[:1000]
    model.train()
    for step, rows in zip(range(1, MAX_STEPS + 1), batches(len(ids), BATCH, SEED), strict=False):
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % MEASURE_EVERY == 0:
            share = exact_match(model, ids[probe], labels[probe])
            log.info("step %d: loss %.3f, exact match %.3f", step, loss.item(), share)
            if share >= ENOUGH:
                break
    model.eval()


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Share of the chats whose answer greedy decoding gives, from one forward pass.

    Greedy decoding gives the answer just when each of its tokens is the likeliest one after the
    right tokens before it, and so nothing need be generated.
    """
    likeliest = model(input_ids=ids).logits[:, :-1].argmax(-1)
    right = (likeliest == labels[:, 1:]) | (labels[:, 1:] == IGNORE)
    return float(right.all(-1).float().mean())


@torch.no_grad()
def sampled_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sums: Sequence[Sum]
) -> list[str | None]:
    """One answer to each sum at temperature 1, or None for a text that does not end."""
    prompts = [prompt_text(tokenizer, question) for question in sums]
    inputs = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=MAX_ANSWER,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :])
    return [text.split("<|end|>")[0] if "<|end|>" in text else None for text in texts]


def wrong_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    sums: Sequence[Sum],
    *,
    wanted: int,
    seed: int,
) -> list[tuple[Sum, str]]:
    """One wrong answer of the model's own to each of `wanted` sums drawn at random.

    A sum that was answered rightly is asked again: the pairs stand for all sums, not for those
    that the model finds hard.
    """
    torch.manual_seed(seed)
    drawn = random.Random(seed).sample(sums, wanted)
    found: dict[Sum, str] = {}
    for _ in range(MAX_ROUNDS):
        left = [question for question in drawn if question not in found]
        if not left:
            break
        asked = zip(left, sampled_answers(model, tokenizer, left), strict=True)
        found.update({q: text for q, text in asked if text and _is_wrong_number(q, text)})
    return [(question, found[question]) for question in drawn if question in found]


def _is_wrong_number(question: Sum, text: str) -> bool:
    """Whether the text is a number, and not the right one."""
    return text.isascii() and text.isdigit() and text != question.answer


def write_pairs(path: Path, pairs: Iterable[tuple[Sum, str]]) -> None:
    """Preference pairs as conversational JSON lines: the right answer is chosen.

    If an answer's score is minus how far it is off, and the right one has a point more (a wrong one
    may be 038), `margin` is the difference of the two scores.
    """

    def message(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:
        for question, wrong in pairs:
            row = {
                "prompt": message("user", question.prompt),
                "chosen": message("assistant", question.answer),
                "rejected": message("assistant", wrong),
                "margin": 1 + abs(int(question.answer) - int(wrong)),
            }
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")


def make(out: Path) -> None:
    """Tokenizer, model, pairs, in that order; the weights are measured as they are stored."""
    tokenizer = byte_tokenizer()
    # Before its first use: tokenizer.json also keeps the padding of the latest call.
    tokenizer.save_pretrained(out / "tiny")
    torch.manual_seed(SEED)
    model = untrained_model(tokenizer)
    supervise(model, *encode(tokenizer, training_sums()))
    model.to(torch.bfloat16).save_pretrained(out / "tiny")
    (out / "tiny" / "model.safetensors").chmod(0o644)  # safetensors keeps it from other users

    model = LlamaForCausalLM.from_pretrained(out / "tiny", dtype=torch.float32).eval()
    share = exact_match(model, *encode(tokenizer, held_out_sums()))
    log.info("%d parameters, exact match on held-out sums %.3f", model.num_parameters(), share)
    if not ACCEPTED[0] <= share <= ACCEPTED[1]:
        raise SystemExit(f"exact match {share:.3f} is outside {ACCEPTED}: try another SEED")
    train = wrong_answers(model, tokenizer, training_sums(), wanted=TRAIN_PAIRS, seed=SEED)
    val = wrong_answers(model, tokenizer, held_out_sums(), wanted=VAL_PAIRS, seed=SEED + 1)
    write_pairs(out / "arithmetic" / "train.jsonl", train)
    write_pairs(out / "arithmetic" / "val.jsonl", val)
    log.info("%d training and %d held-out pairs", len(train), len(val))


def main() -> None:
    """Reads the folder from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder that gets tiny/ and arithmetic/")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    make(parser.parse_args().out)
    log.info("%.0f CPU seconds", time.process_time())


if __name__ == "__main__":
    main()
