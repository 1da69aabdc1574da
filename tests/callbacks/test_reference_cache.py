"""What is computed, what is not, and that the numbers are those of the reference."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from lit_align.callbacks import ReferenceCache
from lit_align.callbacks.reference_rows import Responses, cut
from lit_align.errors import UserError
from lit_align.logprobs import Ways, layouts
from lit_align.modules import DPOModule

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def by_hand(folder, datamodule):
    """Sums and lengths of all responses: one at a time, unpadded, straight from the logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sums, lengths = {}, {}
    for side in ("chosen", "rejected"):
        rows = [datamodule.train_rows[n] for n in range(len(datamodule.train_rows))]
        values = []
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            tokens = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
            values.append(tokens[len(row["prompt_ids"]) - 1 :].sum())
        sums[f"{side}_logps"] = torch.stack(values).float()
        lengths[f"{side}_logps"] = torch.tensor([len(row[f"{side}_ids"]) for row in rows])
    return sums, lengths


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def assert_same(cache, other):
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor, other.tensors[name])


# What is computed, and what is not


def test_the_numbers_are_the_log_probs_of_each_response(run, llama):
    result = run()
    sums, _ = by_hand(llama, result.datamodule)
    assert_close(result.cache.tensors, sums, rtol=0, atol=2e-5)
    assert result.scored == 14


def test_a_second_run_computes_nothing_and_trains_to_the_same_weights(run):
    first, second = run(), run()
    assert second.scored == 0
    assert_same(first.cache, second.cache)
    # Building the cache has drawn no random number and left no module in another mode.
    assert torch.equal(weights(first.module), weights(second.module))


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.5},
        {"loss": {"loss_type": "dpo", "beta": 2.0}},
        {"loss": "dpo_norm"},
        {"loss": "wpo"},
        {"batch_size": 5},
        {"seed": 9},
        {"data_options": {"seed": 4}},
        {"data_options": {"shuffle": False}},
        {"accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_what_the_numbers_do_not_depend_on_makes_no_new_ones(run, change):
    run()
    assert run(**change).scored == 0


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"policy": {"dtype": "bfloat16"}},
        {"policy": {"attn_implementation": "eager"}},
    ],
    ids=str,
)
def test_another_precision_or_attention_has_numbers_of_its_own(run, llama, change):
    run()
    policy = {"pretrained": str(llama), **change.pop("policy", {})}
    assert run(policy, **change).scored == 14
    assert run(policy, **change).scored == 0


def test_other_weights_under_the_same_path_are_another_reference(run, llama, tools, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(llama, folder)
    run(folder)
    tools.save_llama(folder, seed=1)
    changed = run(folder)
    assert changed.scored == 14
    sums, _ = by_hand(folder, changed.datamodule)
    assert_close(changed.cache.tensors, sums, rtol=0, atol=2e-5)


def test_another_rotary_base_is_another_reference_though_the_weights_are_equal(
    run, llama, tmp_path
):
    folder = tmp_path / "policy"
    shutil.copytree(llama, folder)
    run(folder)
    config = folder / "config.json"
    assert "10000.0" in config.read_text()
    config.write_text(config.read_text().replace("10000.0", "100.0"))
    assert run(folder).scored == 14


def test_a_shorter_max_length_computes_only_what_it_cuts(run):
    whole = run()
    rows = [whole.datamodule.train_rows[n] for n in range(7)]
    longer = [
        len(row["prompt_ids"]) + len(row[side]) > 12
        for row in rows
        for side in ("chosen_ids", "rejected_ids")
    ]
    cut = run(data_options={"max_length": 12})
    assert cut.scored == sum(longer) < 14
    assert len(cut.datamodule.train_rows) == 7


def test_after_a_subset_only_the_rest_is_computed(run, llama):
    assert run(data_options={"max_rows": 3}).scored == 6
    full = run()
    assert full.scored == 8
    sums, _ = by_hand(llama, full.datamodule)
    assert_close(full.cache.tensors, sums, rtol=0, atol=2e-5)
    assert run(data_options={"max_rows": 5}).scored == 0


def test_a_short_run_computes_only_the_rows_that_it_reads(run):
    """One step of two micro-batches of one pair: two of the seven pairs."""
    short = run(steps=1, batch_size=1, accumulate_grad_batches=2)
    assert short.scored == 4
    # Another end of the same run: the rest is added, and what is there is not computed again.
    assert run(steps=-1, batch_size=1, max_epochs=1).scored == 10


def test_a_response_of_two_rows_is_computed_once_and_found_by_both(run, tools, tmp_path, llama):
    one, other = tools.pair(0), tools.pair(1)
    # The third row shares a response with the first and the prompt with it, the fourth repeats it.
    rows = [one, other, one | {"rejected": other["rejected"]}, one]
    result = run(data=tools.write_pairs(tmp_path / "twins.jsonl", rows))
    assert result.scored == 5
    sums, _ = by_hand(llama, result.datamodule)
    assert_close(result.cache.tensors, sums, rtol=0, atol=2e-5)


def test_rows_in_another_order_find_their_own_numbers(run, tools, tmp_path, llama):
    run()
    backwards = tools.write_pairs(
        tmp_path / "backwards.jsonl", [tools.pair(n) for n in reversed(range(7))]
    )
    result = run(data=backwards)
    assert result.scored == 0
    sums, _ = by_hand(llama, result.datamodule)
    assert_close(result.cache.tensors, sums, rtol=0, atol=2e-5)


def test_validation_rows_are_in_it_under_their_own_index(run, tools, tmp_path, llama):
    held_out = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9)])
    result = run(data_options={"val_path": held_out}, num_sanity_val_steps=-1)
    assert result.scored == 18
    assert len(result.cache) == 9
    alone = run(data=held_out)
    assert alone.scored == 0
    for name, tensor in alone.cache.tensors.items():
        assert torch.equal(result.cache.tensors[name][7:], tensor)


def test_validation_that_is_switched_off_costs_nothing(run, tools, tmp_path):
    held_out = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(8)])
    assert run(data_options={"val_path": held_out}, limit_val_batches=0).scored == 14


def test_a_loss_without_reference_computes_and_writes_nothing(run, tmp_path):
    result = run(loss="simpo")
    assert result.scored == 0
    assert result.cache is None
    assert not (tmp_path / "reference").exists()


def test_a_loss_of_means_reads_the_sums_of_any_other(run, llama, tmp_path):
    summed, averaged = run(loss="dpo"), run(loss="dpo_norm")
    sums, _ = by_hand(llama, summed.datamodule)
    assert_close(summed.cache.tensors, sums, rtol=0, atol=2e-5)
    assert_same(averaged.cache, summed.cache)
    assert averaged.scored == 0
    assert len(list((tmp_path / "reference").iterdir())) == 1


def heads_by_hand(folder, datamodule):
    """Sums over as many tokens of each response as the other one of its row has."""
    rows = [datamodule.train_rows[n] for n in range(len(datamodule.train_rows))]
    shared = [min(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    cut = [
        {**row, **{f"{side}_ids": row[f"{side}_ids"][:n] for side in ("chosen", "rejected")}}
        for row, n in zip(rows, shared, strict=True)
    ]
    sums, _ = by_hand(folder, SimpleNamespace(train_rows=cut))
    return {name.replace("logps", "head_logps"): values for name, values in sums.items()}


def test_a_loss_of_heads_asks_for_them_and_keeps_them_like_any_response(run, llama, tmp_path):
    plain, headed = run(loss="dpo"), run(loss="ld_dpo")
    sums, lengths = by_hand(llama, headed.datamodule)
    heads = heads_by_hand(llama, headed.datamodule)
    assert_close(headed.cache.tensors, sums | heads, rtol=0, atol=2e-5)
    # A head that is the whole response is not computed again, nor what an earlier run has asked.
    longer = (lengths["chosen_logps"] != lengths["rejected_logps"]).sum()
    assert 0 < headed.scored <= longer
    assert len(list((tmp_path / "reference").iterdir())) == 1
    again = run(loss="dpo")
    assert again.scored == 0
    assert_same(again.cache, plain.cache)
    assert run(loss="ld_dpo").scored == 0


def test_the_responses_of_a_batch_can_be_limited(run, tmp_path, scored):
    run(folder=tmp_path / "four", cache_batch_size=4)
    run(folder=tmp_path / "five", cache_batch_size=5)
    run(folder=tmp_path / "one", cache_batch_size=1)
    # Both responses of a prompt in one batch, unless it has room for one only.
    assert scored == [4, 4, 4, 2] * 2 + [1] * 14


def test_without_such_a_limit_tokens_decide(run, tmp_path, scored, llama):
    run(folder=tmp_path / "all", cache_batch_size=None)
    assert scored == [14]
    cut = run(folder=tmp_path / "cut", cache_batch_size=None, cache_tokens=40)
    assert len(scored) > 3
    sums, _ = by_hand(llama, cut.datamodule)
    assert_close(cut.cache.tensors, sums, rtol=0, atol=2e-5)
    # None has room for two rows.
    del scored[:]
    run(folder=tmp_path / "single", cache_batch_size=None, cache_tokens=1)
    assert scored == [1] * 14


def rows_of(*prompts):
    """Rows whose responses have the given lengths: (tokens of the prompt, chosen, rejected)."""
    return [
        {
            "index": n,
            "prompt_ids": [n + 1] * prompt,
            "chosen_ids": [7] * chosen,
            "rejected_ids": [8] * rejected,
        }
        for n, (prompt, chosen, rejected) in enumerate(prompts)
    ]


def test_responses_to_a_prompt_follow_each_other_the_longest_prompt_first():
    responses = Responses(rows_of((20, 2, 9), (40, 1, 2), (20, 8, 30)))
    asked = responses.absent_from({})
    assert [(one.position, one.tokens) for one in asked] == [
        *[(2, 30), (2, 8)],
        *[(1, 2), (1, 1)],
        *[(0, 9), (0, 2)],
    ]


def test_batches_count_a_shared_prompt_once_and_split_no_prompt_that_fits():
    rows = rows_of((20, 2, 9), (40, 1, 2), (20, 8, 30))
    asked = Responses(rows).absent_from({})
    shared = Ways(packs=True, shares=True, chooses=False)

    def sizes(most_tokens, ways=shared, most_rows=None):
        batches = cut(asked, ways, most_tokens, most_rows)
        assert [one for batch in batches for one in batch] == asked
        return [[one.position for one in batch] for batch in batches]

    # 20 + 29 + 7, 40 + 1 + 0, 20 + 8 + 1: what a response ends with is not run.
    assert sizes(56 + 41) == [[2, 2, 1, 1], [0, 0]]
    assert sizes(56 + 41 - 1) == [[2, 2], [1, 1, 0, 0]]
    assert sizes(56 + 41 + 29) == [[2, 2, 1, 1, 0, 0]]
    # A prompt that does not fit is run again.
    assert sizes(55) == [[2], [2], [1, 1], [0, 0]]
    # Packed 49, 27, 41, 40, 28, 21; padded a batch is as wide as its first.
    assert sizes(76, shared._replace(shares=False)) == [[2, 2], [1], [1], [0, 0]]
    assert sizes(100, Ways(packs=False, shares=False, chooses=False)) == [[2, 2], [1, 1], [0, 0]]
    assert sizes(10_000, most_rows=3) == [[2, 2], [1, 1], [0, 0]]


def test_a_prompt_of_many_responses_is_run_once(run, tools, tmp_path, monkeypatch):
    """Four pairs of one prompt of 21 tokens: it is in one sequence once, not eight times."""
    prompt = "a long enough prompt "
    rows = [{"prompt": prompt, "chosen": "b" * n, "rejected": "c" * n} for n in (1, 2, 3, 4)]
    sizes = []
    pack = layouts.pack

    def counting(*arguments):
        packed = pack(*arguments)
        sizes.append(packed.input_ids.numel())
        return packed

    monkeypatch.setattr(layouts, "pack", counting)
    run(data=tools.write_pairs(tmp_path / "one.jsonl", rows), cache_batch_size=None)
    # What a response ends with is not run, and one that another begins with not either: beside
    # the longest of one letter, all of the other one.
    assert sizes[0] == 21 + 4 + (4 + 3 + 2 + 1)


def test_it_tells_how_much_came_from_where(run, tmp_path):
    said = [*run(data_options={"max_rows": 3}).said, *run().said]
    lines = [line for line in said if line.startswith("reference:")]
    assert lines[0].startswith("reference: 6 responses, 0 from cache, 6 computed")
    assert lines[1].startswith("reference: 14 responses, 6 from cache, 8 computed")
    assert all(str(tmp_path / "reference") in line for line in lines)


def test_a_bar_shows_the_work_where_bars_are_wanted(run, capsys):
    run(enable_progress_bar=True)
    assert "reference" in capsys.readouterr().out
    run(enable_progress_bar=True)
    assert "reference" not in capsys.readouterr().out


def test_the_folder_of_all_runs_is_the_default(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_ALIGN_CACHE", str(tmp_path / "shared"))
    run(folder=None)
    assert list((tmp_path / "shared" / "reference").glob("*/part-*.safetensors"))


# When something goes wrong


def test_a_log_prob_that_is_no_number_is_refused_with_the_row(run, broken):
    policy, data = broken
    with pytest.raises(UserError, match=r"the rejected response of row 5, 'a b .*of nan"):
        run(policy, data=data)


def test_an_interrupted_build_goes_on_where_it_stopped(run, monkeypatch, scored):
    from lit_align.callbacks import reference_build

    score = reference_build.response_logprobs

    def tired(*args, **options):
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(*args, **options)

    monkeypatch.setattr(reference_build, "response_logprobs", tired)
    # What Lightning makes of Ctrl-C.
    with pytest.raises(SystemExit):
        run()
    monkeypatch.setattr(reference_build, "response_logprobs", score)
    assert scored == [4, 4]
    assert run().scored == 6


def test_a_build_that_is_killed_has_written_before(run, monkeypatch, tmp_path, scored):
    from lit_align.callbacks import reference_build

    monkeypatch.setattr(reference_build, "WRITE_EVERY_SECONDS", 0.0)
    run()
    parts = list((tmp_path / "reference").glob("*/part-*"))
    assert len(parts) == len(scored) == 4
    # What a killed run leaves: some of its parts.
    parts[0].unlink()
    assert run().scored in (2, 4)


def test_a_damaged_part_stops_the_run_and_deleting_it_mends_it(run, tmp_path):
    run()
    (part,) = (tmp_path / "reference").glob("*/part-*")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UserError, match=part.name):
        run()
    part.unlink()
    assert run().scored == 14


def test_without_a_datamodule_of_ours_it_says_what_to_pass(llama, tools, tmp_path):
    trainer = tools.quiet_trainer(
        max_steps=1, limit_val_batches=0, callbacks=[ReferenceCache(tmp_path)]
    )
    with pytest.raises(UserError, match=r"datamodule=PreferenceDataModule"):
        trainer.fit(DPOModule(str(llama)), [], [])


def test_another_module_is_refused(tools, tmp_path):
    trainer = tools.quiet_trainer(max_steps=1, callbacks=[ReferenceCache(tmp_path)])
    with pytest.raises(UserError, match="DPOModule"):
        trainer.fit(BoringModel())


# Which model it is


def test_under_lora_the_reference_is_the_base_whatever_the_adapter_does(run, llama):
    full = run()
    policy = {"pretrained": str(llama), "lora": LORA}
    adapted = run(policy, lr=1.0)
    # The base is the same reference: nothing to compute.
    assert adapted.scored == 0
    assert_same(adapted.cache, full.cache)


def test_a_reference_computed_under_a_trained_adapter_is_the_base_all_the_same(
    run, llama, tmp_path
):
    policy = {"pretrained": str(llama), "lora": LORA}
    first = run(policy, lr=1.0, folder=tmp_path / "first")
    moved = [p for p in first.module.policy.parameters() if p.requires_grad]
    assert any(p.abs().max() > 1e-3 for p in moved[1::2])
    again = run(module=first.module, folder=tmp_path / "second")
    assert again.scored == 14
    assert_same(again.cache, first.cache)


def test_biases_trained_beside_an_adapter_do_not_move_the_reference(run, tools, tmp_path):
    """They belong to the base: switching the adapter off leaves them as training made them."""
    biased = tools.save_llama(tmp_path / "biased", attention_bias=True)
    policy = {"pretrained": str(biased), "lora": LORA | {"bias": "all"}}
    first = run(policy, lr=1.0, folder=tmp_path / "first")
    again = run(module=first.module, folder=tmp_path / "second")
    assert again.scored == 14
    assert_same(again.cache, first.cache)


def test_a_second_model_can_be_the_reference(run, llama, tools, tmp_path):
    other = tools.save_llama(tmp_path / "other", seed=5)
    result = run(module_options={"reference": str(other)})
    sums, _ = by_hand(other, result.datamodule)
    assert_close(result.cache.tensors, sums, rtol=0, atol=2e-5)
    assert run(module_options={"reference": str(other)}, lr=0.3).scored == 0
    # It is the same model that would be the policy elsewhere.
    assert run(other).scored == 0


def test_a_second_model_computes_in_the_precision_of_training(run, tools, tmp_path):
    other = tools.save_llama(tmp_path / "other", seed=5)
    beside = run(module_options={"reference": str(other)}, precision="bf16-true")
    assert_same(beside.cache, run(other, precision="bf16-true").cache)


def test_a_start_that_is_nowhere_any_more_is_refused(run, llama, tools, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(llama, folder)
    first = run(folder, lr=1.0)
    tools.save_llama(folder, seed=1)
    shutil.rmtree(tmp_path / "reference")
    with pytest.raises(UserError, match=f"'{folder}' no longer holds the weights"):
        run(module=first.module)


def test_a_policy_that_was_trained_before_is_not_taken_for_its_own_reference(run, llama, tmp_path):
    first = run(lr=1.0)
    assert run(module=first.module).scored == 0
    shutil.rmtree(tmp_path / "reference")
    again = run(module=first.module)
    assert again.scored == 14
    assert_same(again.cache, first.cache)


# Resuming


@pytest.fixture
def checkpoint(run, tmp_path):
    """A run of two steps, and its checkpoint after the first."""

    def make(policy):
        result = resumed(run, policy)
        # Lightning warns of a folder that is not empty.
        shutil.move(tmp_path / "checkpoints", tmp_path / "first")
        return result, tmp_path / "first" / "step=1.ckpt"

    return make


def resumed(run, policy, ckpt_path=None):
    """The run of two steps, from its start or from the checkpoint on."""
    saver = ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return run(policy, lr=1.0, callbacks=[saver], enable_checkpointing=True, ckpt_path=ckpt_path)


def test_a_resumed_run_reads_the_reference_of_the_first(run, checkpoint, llama):
    first, path = checkpoint(llama)
    again = resumed(run, llama, path)
    assert again.scored == 0
    assert_same(again.cache, first.cache)
    assert torch.equal(weights(again.module), weights(first.module))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_without_its_files_a_resumed_run_computes_the_same_reference(
    run, checkpoint, llama, tmp_path, lora
):
    policy = {"pretrained": str(llama), "lora": lora}
    first, path = checkpoint(policy)
    shutil.rmtree(tmp_path / "reference")
    again = resumed(run, policy, path)
    assert again.scored == 14
    assert_same(again.cache, first.cache)
    assert torch.equal(weights(again.module), weights(first.module))


def test_a_resumed_run_refuses_the_moved_policy_as_its_reference(run, checkpoint, llama, tmp_path):
    def model():
        return AutoModelForCausalLM.from_pretrained(llama)

    _, path = checkpoint(model())
    assert resumed(run, model(), path).scored == 0
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "reference")
    with pytest.raises(UserError, match="cannot be had any more"):
        resumed(run, model(), path)
    assert not (tmp_path / "reference").exists()


def test_a_checkpoint_of_another_reference_is_refused(run, checkpoint, llama, tools, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(llama, folder)
    _, path = checkpoint(folder)
    tools.save_llama(folder, seed=1)
    with pytest.raises(UserError, match="another reference"):
        resumed(run, folder, path)


def test_a_checkpoint_holds_the_key_and_nothing_of_the_numbers(checkpoint, llama, tmp_path):
    _, path = checkpoint(llama)
    saved = torch.load(path, weights_only=True)
    (folder,) = (tmp_path / "reference").iterdir()
    assert saved["callbacks"]["ReferenceCache"] == {"key": folder.name}


# Validation alone


def test_validation_alone_computes_its_own_rows(run, llama, tools, tmp_path, scored):
    from lit_align.data import PreferenceDataModule

    held_out = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9)])
    first = run(lr=1.0, data_options={"val_path": held_out}, limit_val_batches=0)
    before = sum(scored)
    data = PreferenceDataModule(
        first.datamodule.path, val_path=held_out, batch_size=2, cache_dir=tmp_path / "pairs"
    )
    trainer = tools.quiet_trainer(callbacks=[ReferenceCache(tmp_path / "reference")])
    (metrics,) = trainer.validate(first.module, data, verbose=False)
    assert sum(scored) - before == 4
    # Of the policy before training, not of the trained one, whose margin to itself is 0.
    assert abs(metrics["val/rewards/margins"]) > 1e-3
