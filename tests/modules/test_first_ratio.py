"""A fault that makes the first ratios differ from 1 is named; without one nothing is said."""

import math
from dataclasses import replace

import lightning as L
import pytest
import torch
from distributed.fit_grpo import digits, save_random
from transformers import GPT2LMHeadModel

from lit_align.data import Arithmetic, RolloutDataModule
from lit_align.errors import UserError
from lit_align.modules import GRPOModule
from lit_align.modules.first_ratio import FULL, HALF, check_first_ratio, check_sampler
from lit_align.policies import PolicyRecipe
from lit_align.rewards import in_process
from lit_align.rollout import HuggingFaceEngine


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Learnt absolute positions, and a dropout of 0.1 unless it is taken out."""
    return save_random(tmp_path_factory.mktemp("gpt2"), "gpt2")


def fit(policy, *, num_iterations=2, engine=None, precision="32-true", temperature=1.0):
    """Two steps on sums of unequal length, made of one rollout or of two."""
    L.seed_everything(7, verbose=False)
    module = GRPOModule(
        policy,
        reward=in_process(digits),
        engine=engine,
        sampling={"max_new_tokens": 8, "temperature": temperature},
        filter_groups=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    data = RolloutDataModule(
        Arithmetic(),
        max_rows=24,
        prompts_per_step=12,
        num_generations=2,
        batch_size=8,
        num_iterations=num_iterations,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        precision=precision,
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return module


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize(("precision", "temperature"), [("32-true", 1.0), ("bf16-mixed", 0.7)])
def test_without_a_fault_nothing_is_said(gpt2, num_iterations, precision, temperature):
    """Also of the second step of a rollout, in which the policy has moved far."""
    options = {"num_iterations": num_iterations, "temperature": temperature}
    fit(gpt2, precision=precision, **options)


def test_dropout_is_named_where_old_log_probs_are_computed(gpt2):
    with pytest.raises(
        UserError,
        match=r"has not moved since this rollout.*nats per token.*dropout is on "
        r"\(transformer.drop and \d+ more\): set model.disable_dropout=true",
    ):
        fit(PolicyRecipe(gpt2, disable_dropout=False))


def test_dropout_is_named_where_the_sampler_alone_can_tell(gpt2):
    with pytest.raises(UserError, match=r"HuggingFaceEngine runs the policy itself.*dropout is on"):
        fit(PolicyRecipe(gpt2, disable_dropout=False), num_iterations=1)


class Hotter(HuggingFaceEngine):
    """Does not do what it is told."""

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=2 * sampling.temperature))


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_an_engine_with_another_temperature_is_named(gpt2, num_iterations):
    with pytest.raises(
        UserError, match=r"Hotter runs the policy itself, and its log-probs differ by \d.*trainer's"
    ):
        fit(gpt2, num_iterations=num_iterations, engine=Hotter())


class Elsewhere(Hotter):
    """Not the policy itself: what it says is for a correction to mend."""

    in_process = False


def test_an_engine_of_its_own_may_differ(gpt2):
    fit(gpt2, engine=Elsewhere())


class CountsFromTheLeft(GPT2LMHeadModel):
    """A model that takes padding on the left for text: it asks for no positions."""

    def forward(self, input_ids, attention_mask=None, cache=None, **options):
        return super().forward(input_ids, attention_mask=attention_mask, cache=cache, **options)


def test_a_model_that_cannot_be_padded_on_the_left_is_named(gpt2):
    model = CountsFromTheLeft.from_pretrained(gpt2)
    # With small weights, a shift by some positions would hardly be seen.
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(50)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with pytest.raises(
        UserError, match=r"the model treats padding on the left, positions or its cache in a way"
    ):
        fit(model, num_iterations=1)


@pytest.fixture(scope="module")
def trained(gpt2):
    """A module in its Trainer, for what no run can bring about."""
    return fit(gpt2)


MASK = torch.tensor([[True, True, False]])


def test_only_tokens_that_count_are_compared(trained):
    new = torch.tensor([[-1.0, -2.0, -3.0]])
    check_first_ratio(trained, new, torch.tensor([[-1.0, -2.0, math.nan]]), MASK)
    check_first_ratio(trained, new, new + 1, torch.zeros_like(MASK))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0 - 3 * FULL])
def test_the_mean_of_their_differences_counts(trained, wrong):
    new = torch.tensor([[-1.0, -2.0, -3.0]])
    old = torch.tensor([[wrong, -2.0, -3.0]])
    with pytest.raises(UserError, match="has not moved"):
        check_first_ratio(trained, new, old, MASK)
    # Half of it over two tokens.
    old[0, 0] = -1.0 - FULL
    check_first_ratio(trained, new, old, MASK)


def test_what_is_not_dropout_is_looked_for_in_the_model(trained):
    with pytest.raises(UserError, match=r"experts with limited capacity.*precision 32-true is too"):
        check_first_ratio(trained, torch.zeros(1, 3), torch.ones(1, 3), MASK)


def test_an_engine_that_reports_no_log_probs_cannot_be_checked(trained):
    check_sampler(trained, torch.zeros(1, 3), None, MASK)


def test_half_precision_may_differ_by_more(gpt2):
    half = fit(PolicyRecipe(gpt2, dtype="bfloat16"), precision="bf16-true")
    new = torch.zeros(1, 3)
    check_first_ratio(half, new, new + 0.9 * HALF, MASK)
    with pytest.raises(UserError, match="precision bf16-true"):
        check_first_ratio(half, new, new + 1.1 * HALF, MASK)
