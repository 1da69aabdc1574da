"""What all ranks do together: the same numbers as alone, and no rank that waits for another."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_align.callbacks import ExactMatch

pytestmark = pytest.mark.distributed
# Of Lightning's launcher: a child must not take itself for a rank of another run.
RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = Path(__file__).with_name("on_two_ranks.py")


@pytest.fixture
def on_two_ranks(tmp_path, llama, pairs, val):
    """Run the script on two ranks; what each of them ended with."""

    def launch(strategy, folder, policy=llama, cache_batch_size=4, **options):
        options = {
            "strategy": strategy,
            "policy": str(policy),
            "data": str(pairs),
            "val": str(val),
            "folder": str(folder),
            "cache_batch_size": cache_batch_size,
            **options,
        }
        out = tmp_path / "out"
        process = subprocess.Popen(
            [sys.executable, SCRIPT, out, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in RANK_VARIABLES},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            # A rank that hangs outlives its parent.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, said[-3000:]
        return [torch.load(f"{out}.{rank}") for rank in range(2)], said

    return launch


@pytest.fixture
def val(tmp_path, tools):
    return tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(n) for n in (8, 9, 10)])


def test_a_second_model_is_sharded_like_the_policy(on_two_ranks, run, val, tools, tmp_path):
    other = tools.save_llama(tmp_path / "other", seed=5)
    ranks, _ = on_two_ranks("fsdp", tmp_path / "two", reference=str(other))
    alone = run(other, cache_batch_size=4, data_options={"val_path": val})
    for rank in ranks:
        for name, tensor in alone.cache.tensors.items():
            assert torch.equal(rank["reference"][name], tensor)


def test_a_resumed_sharded_run_without_its_files_computes_the_same_reference(
    on_two_ranks, tmp_path
):
    # FSDP restores the checkpoint after the reference was computed, and into the same policy.
    first, _ = on_two_ranks("fsdp", tmp_path / "two", checkpoints=str(tmp_path / "first"))
    shutil.rmtree(tmp_path / "two" / "reference")
    path = str(tmp_path / "first" / "step=1.ckpt")
    again, _ = on_two_ranks(
        "fsdp", tmp_path / "two", checkpoints=str(tmp_path / "second"), ckpt_path=path
    )
    for before, after in zip(first, again, strict=True):
        assert after["scored"] == before["scored"] == [4, 4, 4]
        for kind in ("reference", "weights"):
            for name, tensor in before[kind].items():
                assert torch.equal(after[kind][name], tensor), name


@pytest.mark.parametrize(
    ("strategy", "lora"),
    [("ddp", None), ("fsdp", None), ("fsdp", {"r": 2, "target_modules": ["q_proj", "v_proj"]})],
    ids=["ddp", "fsdp", "fsdp with lora"],
)
def test_two_ranks_do_what_one_does(strategy, lora, on_two_ranks, run, llama, val, tmp_path):
    # 7 training and 3 validation pairs make 20 responses: at 8 a batch that is 3 batches.
    ranks, said = on_two_ranks(strategy, tmp_path / "two", cache_batch_size=8, lora=lora)
    # Rank 1, left without a third one, repeats the first to keep in step.
    assert [rank["scored"] for rank in ranks] == [[8, 4], [8, 8]]
    assert "reference: 20 responses, 0 from cache, 20 computed" in said

    policy = {"pretrained": str(llama), "lora": lora}
    options = {"data_options": {"val_path": val}, "lr": 1.0, "batch_size": 4, "steps": 2}
    alone = run(
        policy,
        folder=tmp_path / "one",
        cache_batch_size=8,
        num_sanity_val_steps=-1,
        callbacks=[ExactMatch(batch_size=2)],
        **options,
    )
    assert alone.scored == 20
    metrics = {
        name: float(value)
        for name, value in alone.trainer.callback_metrics.items()
        if name.startswith("val/")
    }
    assert "val/exact_match" in metrics
    for rank in ranks:
        for name, tensor in alone.cache.tensors.items():
            assert torch.equal(rank["reference"][name], tensor), "bit for bit"
        assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=1e-3)
        assert rank["best_score"] == pytest.approx(metrics["val/loss"], rel=1e-3)
    # One rank finds in the same folder what the two have written.
    assert run(policy, folder=tmp_path / "two" / "reference", **options).scored == 0

    for name in ("model", "model-best"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "run" / name)
        trained = alone.module.policy
        trained = trained.merge_and_unload() if lora else trained
        for key, tensor in saved.state_dict().items():
            torch.testing.assert_close(tensor, trained.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_a_bad_log_prob_on_one_rank_stops_both_with_one_message(on_two_ranks, broken, tmp_path):
    policy, data = broken
    (first, second), _ = on_two_ranks("ddp", tmp_path / "two", policy=policy, data=str(data))
    assert first == second
    assert "row 5" in first["error"]
