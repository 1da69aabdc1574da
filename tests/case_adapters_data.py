"""How our code answers the public faults of tokenisation, truncation and padding.

The tokenizers are made from the case's own ids, so that its right values can be compared as they
stand.
"""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from small_tokenizers import greedy
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_align.data.pairs import PairCollate, PairRows
from lit_align.data.rows import read_row
from lit_align.data.tokenise import Pair, PairTokeniser, keep_end, keep_start
from lit_align.ops import IGNORE_INDEX

Case = dict[str, Any]


def batch_of(*pairs: Pair, pad_id: int) -> Mapping[str, Any]:
    """The pairs as they reach the model."""
    rows = PairRows(Dataset.from_list([pair._asdict() for pair in pairs]))
    return PairCollate(pad_id)(list(rows))


def each_row_is_cut_on_its_own_tokens(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    for how, cut in (("keep_end", keep_end), ("keep_start", keep_start)):
        # The other answer is as long and differs everywhere: it must not change what is kept.
        pairs = [
            Pair(row["prompt"], row["completion"], [100 + token for token in row["completion"]])
            for row in given["rows"]
        ]
        batch = batch_of(
            *(cut(pair, given["max_length"]) for pair in pairs), pad_id=given["pad_id"]
        )
        mask = (batch["chosen_labels"] != IGNORE_INDEX).long()
        assert batch["chosen_input_ids"].tolist() == expected[how]["ids"]
        assert mask.tolist() == expected[how]["completion_mask"]
        assert batch["chosen_attention_mask"].all()


def a_token_across_the_border_never_parts_the_prompts(case: Case) -> None:
    """Of the two right ways that the case names, ours moves the border for both answers."""
    given, expected = case["input"], case["expected"]
    texts = {name: given[name] for name in ("prompt", "chosen", "rejected")}
    tokenizer = greedy(given["vocab_greedy_longest_match"])
    [kept] = PairTokeniser(tokenizer)([read_row(texts)])
    assert (
        tokenizer(texts["prompt"] + texts["rejected"]).input_ids
        == (expected["joint_ids_of_rejected_to_avoid"])
    ), "the tokenizer does not merge as the case says"
    for name, ids in (("chosen", kept.ids.chosen_ids), ("rejected", kept.ids.rejected_ids)):
        whole = tokenizer.decode(kept.ids.prompt_ids + ids)
        assert whole == texts["prompt"] + texts[name]
        # All of the answer is scored.
        assert tokenizer.decode(ids).endswith(texts[name])
    apart = tuple(expected[f"{name}_ids"] for name in texts)
    assert kept.ids in (apart, moved_left(given["vocab_greedy_longest_match"], texts))


def moved_left(vocab: Mapping[str, int], texts: Mapping[str, str]) -> tuple[list[int], ...]:
    """The border moved left for both answers, worked out by hand from the vocabulary."""

    def pieces(text: str) -> list[int]:
        ids = []
        while text:
            piece = max((piece for piece in vocab if text.startswith(piece)), key=len)
            ids.append(vocab[piece])
            text = text[len(piece) :]
        return ids

    prompt = pieces(texts["prompt"])
    answers = [pieces(texts["prompt"] + texts[name]) for name in ("chosen", "rejected")]
    border = len(prompt)
    while any(ids[:border] != prompt[:border] for ids in answers):
        border -= 1
    return prompt[:border], *(ids[border:] for ids in answers)


def masks_follow_lengths_and_not_ids(case: Case) -> None:
    """What is generated is cut elsewhere; here the training row and the prompt."""
    given, expected = case["input"], case["expected"]
    row, prompt = given["training_row"], given["prompt_with_pad_id_inside"]
    ids = row["ids"][: row["length"]]
    longer = [given["eos_id"] + 1] * len(row["ids"])
    batch = batch_of(Pair([], ids, ids), Pair([], longer, longer), pad_id=given["pad_id"])
    assert batch["chosen_input_ids"][0].tolist() == row["ids"]
    assert batch["chosen_labels"][0].tolist() == expected["labels"]
    answered = Pair(prompt["ids"], [given["eos_id"]], [given["eos_id"]])
    attention = batch_of(answered, pad_id=given["pad_id"])["chosen_attention_mask"]
    assert attention[0, : len(prompt["ids"])].tolist() == expected["prompt_attention"]


def words(bos: int | None, eos: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Each id below ten is a word, "t5" for 5; "bos" is put before every text if there is one."""
    names = {number: f"t{number}" for number in range(10)} | {eos: "eos"}
    names |= {} if bos is None else {bos: "bos"}
    vocab = {name: number for number, name in names.items()}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "eos"}
    if bos is not None:
        special["bos_token"] = "bos"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="bos $A", special_tokens=[("bos", bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, **special
    )


def text(ids: list[int]) -> str:
    return "".join(f" t{token}" for token in ids)


def one_beginning_and_one_end(case: Case) -> None:
    given = case["input"]
    bos, eos = given["bos"], given["eos"]
    template = (
        "{{ bos_token }}{{ messages[0]['content'] }}"
        "{% if messages | length > 1 %}{{ messages[1]['content'] + ' eos' }}{% endif %}"
    )
    chat = words(bos, eos, template)
    templated, without_bos, chat_answer, plain_answer = given["cases"]
    prompt = templated["ids_without_special"][1:]
    ids = chat_answer["completion"][:-1]
    row = {"prompt": [{"role": "user", "content": text(prompt)}], "chosen": text(ids)}
    [of_chat] = PairTokeniser(chat)([read_row({**row, "rejected": " t9"})])
    plain = {"prompt": text(without_bos["ids_without_special"]), "rejected": " t9"}
    [of_text] = PairTokeniser(words(without_bos["bos"], eos))(
        [read_row({**plain, "chosen": text(plain_answer["completion"])})]
    )
    found = [
        of_chat.ids.prompt_ids,
        of_text.ids.prompt_ids,
        of_chat.ids.chosen_ids,
        of_text.ids.chosen_ids,
    ]
    assert found == case["expected"]["ids"]
    # And a text gets the beginning that the template writes in a conversation.
    [with_bos] = PairTokeniser(words(bos, eos))([read_row({**plain, "chosen": " t7"})])
    assert with_bos.ids.prompt_ids == [bos, *without_bos["ids_without_special"]]


def a_shared_beginning_is_the_prompt(case: Case) -> None:
    pairs = zip(case["input"]["pairs"], case["expected"]["results"], strict=True)
    for (chosen, rejected), expected in pairs:
        row = read_row({"chosen": turns(chosen), "rejected": turns(rejected)})
        reason = {"identical": "chosen equals rejected"}.get(row.drop_reason, row.drop_reason)
        assert reason == expected.get("drop")
        for name in expected.keys() - {"drop"}:
            assert getattr(row, name) == turns(expected[name]), name


def turns(value: str) -> str | list[dict[str, str]]:
    """Messages for what the case writes as "[u1,a1]", a text as it is."""
    value = value.removeprefix("turns:")
    if not value.startswith("["):
        return value
    roles = {"u": "user"}
    return [
        {"role": roles.get(name[0], "assistant"), "content": name}
        for name in value.strip("[]").split(",")
    ]


DATA_CASES: dict[str, Callable[[Case], None]] = {
    "BC12": each_row_is_cut_on_its_own_tokens,
    "BC13": a_token_across_the_border_never_parts_the_prompts,
    "BC14": masks_follow_lengths_and_not_ids,
    "BC15": one_beginning_and_one_end,
    "BC16": a_shared_beginning_is_the_prompt,
}
