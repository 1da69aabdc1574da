"""Greedy answers in batches against one token at a time, without padding or cache."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback

from lit_align.callbacks import ExactMatch
from lit_align.callbacks.exact_match import _until_end
from lit_align.data import PreferenceDataModule
from lit_align.modules import DPOModule
from lit_align.resources import resource
from lit_align.rollout import stop_token_ids

ROWS = 24
END = 2


class AtSanityCheck(Callback):
    """Keeps what was logged before the first step."""

    metrics: dict

    def on_sanity_check_end(self, trainer, pl_module):
        self.metrics = dict(trainer.callback_metrics)


@pytest.fixture
def fit(tools, tmp_path):
    """A run of two steps of the bundled policy, which gets about every other sum right."""

    def run(*callbacks, policy=None, change=lambda policy: None, **options):
        module = DPOModule(
            {"pretrained": "tiny", **(policy or {})},
            "simpo",
            optimizer=partial(torch.optim.AdamW, lr=options.pop("lr", 1e-3)),
        )
        module.configure_model()
        change(module.policy)
        data = PreferenceDataModule(
            resource("arithmetic/train.jsonl"),
            val_path=resource("arithmetic/val.jsonl"),
            max_rows=16,
            val_max_rows=ROWS,
            cache_dir=tmp_path,
        )
        sanity = AtSanityCheck()
        torch.manual_seed(0)
        trainer = tools.quiet_trainer(
            **{"max_steps": 2, "num_sanity_val_steps": -1} | options,
            callbacks=[*callbacks, sanity],
        )
        trainer.fit(module, data)
        return SimpleNamespace(
            module=module, data=data, before=sanity.metrics, after=dict(trainer.callback_metrics)
        )

    return run


def by_hand(model, rows):
    hits = 0
    for row in rows:
        ids = list(row["prompt_ids"])
        while ids[-1] != END and len(ids) < len(row["prompt_ids"]) + 8:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        hits += ids == row["prompt_ids"] + row["chosen_ids"]
    return hits


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_share_of_right_answers_before_and_after(fit, batch_size):
    result = fit(ExactMatch(batch_size=batch_size))
    rows = [result.data.val_rows[n] for n in range(ROWS)]
    after = by_hand(result.module.policy.eval(), rows)
    assert result.after["val/exact_match"] == pytest.approx(after / ROWS)
    start = DPOModule("tiny")
    start.configure_model()
    before = by_hand(start.policy.eval(), rows)
    assert result.before["val/exact_match"] == pytest.approx(before / ROWS)
    assert 0 < before < ROWS


def test_only_the_first_rows_can_be_asked(fit):
    result = fit(ExactMatch(rows=5), lr=0.0)
    rows = [result.data.val_rows[n] for n in range(5)]
    hits = by_hand(result.module.policy.eval(), rows)
    assert result.after["val/exact_match"] == pytest.approx(hits / 5)


def test_answers_longer_than_allowed_are_wrong(fit):
    # Two digits and the end are three tokens.
    assert fit(ExactMatch(max_new_tokens=2)).after["val/exact_match"] == 0


def test_gradient_checkpointing_changes_no_answer_and_stays_on(fit):
    plain = fit(ExactMatch(), lr=0.0)
    spared = fit(ExactMatch(), lr=0.0, policy={"gradient_checkpointing": True})
    assert spared.after["val/exact_match"] == plain.after["val/exact_match"] > 0
    assert spared.module.policy.model.gradient_checkpointing
    assert spared.module.policy.training


def test_what_the_model_would_sample_with_changes_no_answer(fit):
    def change(policy):
        settings = policy.generation_config
        settings.do_sample, settings.temperature, settings.top_p = True, 0.7, 0.9
        settings.repetition_penalty, settings.no_repeat_ngram_size = 9.0, 1

    plain = fit(ExactMatch(), lr=0.0)
    assert fit(ExactMatch(), lr=0.0, change=change).after == plain.after


def test_training_does_not_notice(fit):
    def weights(result):
        return torch.cat([p.detach().flatten() for p in result.module.policy.parameters()])

    def dropout(policy):
        for layer in policy.model.layers:
            layer.self_attn.attention_dropout = 0.3

    options = {"change": dropout, "val_check_interval": 1}
    assert torch.equal(weights(fit(ExactMatch(), **options)), weights(fit(**options)))


def test_a_sanity_check_of_a_few_batches_is_left_alone(fit):
    result = fit(ExactMatch(), num_sanity_val_steps=1)
    assert "val/exact_match" not in result.before
    assert "val/exact_match" in result.after


def test_an_answer_ends_with_its_end_token():
    assert _until_end([5, 6, 2, 7], {2, 3}) == [5, 6, 2]
    assert _until_end([5, 3, 2, 7], {2, 3}) == [5, 3]
    assert _until_end([5, 6], {2}) == [5, 6]


def test_every_token_that_may_end_an_answer_is_known():
    def module(of_model, of_tokenizer):
        return SimpleNamespace(
            policy=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=of_model)),
            tokenizer=SimpleNamespace(eos_token_id=of_tokenizer),
        )

    def ends(one):
        return set(stop_token_ids(one.policy, one.tokenizer))

    assert ends(module([4, 5], 6)) == {4, 5, 6}
    assert ends(module(4, 4)) == {4}
    assert ends(module(None, 6)) == {6}
    assert ends(module(None, None)) == set()
