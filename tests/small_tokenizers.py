"""Tokenizers small enough to read, one for each way in which real ones differ."""

from string import printable

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)

# As Llama's: the template itself writes the first token.
WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '[' + message['role'] + ']' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

# As DeepSeek-R1's: an opened block of reasoning stands in the prompt and nowhere else.
OPENS_THINK = (
    "{% for message in messages %}"
    "{{ '[' + message['role'] + ']' + message['content'].split('</think>')[-1] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}"
)

# As Qwen's: reasoning stays only in the last turn of the assistant.
DROPS_THINK = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{{ message['content'] if loop.index0 == ns.last else message['content'].split('</think>')[-1]"
    " }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

STRICT = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

WITH_TOOLS = (
    "{% if tools %}{{ 'tools:' + (tools | tojson) + '\n' }}{% endif %}"
    "{% if date is defined %}{{ 'date:' + date + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def char_level(chat_template=None, *, merges=(), bos=False, adds_eos=False, **special):
    """One token a character, but for special tokens and the merges asked for.

    Args:
        chat_template: of conversations.
        merges: pairs of pieces that become one token, e.g. (" ", "$").
        bos: puts "<s>" before each text, as Llama's does.
        adds_eos: puts "</s>" behind each text.
        special: eos_token=None for a tokenizer without, or another one.
    """
    vocab = {token: number for number, token in enumerate([*SPECIAL, *printable])}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    if bos or adds_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(["<s>"] * bos + ["$A"] + ["</s>"] * adds_eos),
            special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])],
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", **special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=chat_template,
        **{name: token for name, token in names.items() if token is not None},
    )


def greedy(vocab, **special):
    """The longest piece of a vocabulary first, whatever words it spans."""
    model = models.WordPiece(vocab=vocab, unk_token=next(iter(vocab)), continuing_subword_prefix="")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def numbered_rows(numbers):
    """One row for each number, which its prompt tells."""
    return [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "x"} for n in numbers]
