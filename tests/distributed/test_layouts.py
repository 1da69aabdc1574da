"""Whatever the layout, two gloo processes give what one gives that pads: weights and metrics."""

import pytest
import torch
from distributed.fit import fit
from distributed.fit_grpo import fit as fit_grpo
from distributed.fit_grpo import save_random
from distributed.test_two_ranks import relative_difference

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAYOUTS = ["packed", "shared"]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj", "lm_head"]}
# All in float64 but what the architecture itself computes in float32.
OPTIONS = {"precision": "64-true", "optimizer": "sgd", "max_steps": 3}


@pytest.fixture(scope="module", params=[None, LORA], ids=["full", "lora"])
def policy(request, tmp_path_factory):
    folder = save_random(tmp_path_factory.mktemp("llama"))
    return {"pretrained": folder, "lora": request.param}


def assert_same(alone, ranks):
    for rank in ranks:
        assert relative_difference(alone["weights"], rank["weights"]) < 1e-6
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_teach_the_same(pairs33, fit_ranks, tmp_path, policy, layout):
    # What is compared is of the last step: of the first one, all margins are 0 but for rounding.
    options = {**OPTIONS, "policy": policy, "loss": "dpo"}
    alone = fit(pairs33, cache=tmp_path / "alone", batch_size=8, layout="padded", **options)
    assert alone["metrics"]["train/loss"] != 0
    cut = {"strategy": "ddp", "batch_size": 2, "accumulate": 2, "layout": layout}
    assert_same(alone, fit_ranks(pairs33, **options, **cut))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_completions_teach_the_same(fit_grpo_ranks, policy, layout):
    # Two prompts x 3 completions and a repeated use: ratios are not 1.
    options = {**OPTIONS, "prompts_per_step": 2, "num_iterations": 2, "log_every": 3}
    alone = fit_grpo(policy, batch_size=6, layout="padded", **options)
    assert torch.stack([g.norm() for g in alone["steps"].gradients]).min() > 0
    assert_same(
        alone, fit_grpo_ranks(policy, strategy="ddp", batch_size=2, layout=layout, **options)
    )
