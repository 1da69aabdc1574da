"""The reference of a run without a cache."""

import lightning as L
import pytest
import torch
from distributed.fit_grpo import digits, save_random
from torch.testing import assert_close

from lit_align.data import Arithmetic, RolloutDataModule
from lit_align.modules import GRPOModule
from lit_align.modules.frozen import FrozenReference
from lit_align.policies import PolicyRecipe
from lit_align.rewards import in_process

LORA = {"r": 2, "target_modules": "all-linear"}
IDS = torch.arange(1, 9).unsqueeze(0)


def quiet(**options):
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [save_random(tmp_path_factory.mktemp("llama"), seed=seed) for seed in (0, 1)]


def moved(policy):
    """Its trainable weights changed in place, as an optimizer changes them."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    return policy


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def noted(policy, other=None):
    frozen = FrozenReference()
    frozen.note(policy, other, None)
    return frozen


def test_it_stays_where_the_policy_was(folders):
    policy = PolicyRecipe(folders[0]).model()
    before = logits(policy)
    frozen = noted(policy)
    moved(policy)
    with frozen(quiet(), policy) as reference:
        assert_close(logits(reference), before, rtol=0, atol=0)
        assert not any(p.requires_grad for p in reference.parameters())
        assert not any(module.training for module in reference.modules())
    assert all(p.requires_grad for p in policy.parameters())


def test_it_is_noted_once(folders):
    """A second fit begins where the first has brought the policy."""
    policy = PolicyRecipe(folders[0]).model()
    before = logits(policy)
    frozen = noted(policy)
    frozen.note(moved(policy), None, None)
    with frozen(quiet(), policy) as reference:
        assert_close(logits(reference), before, rtol=0, atol=0)


def test_of_an_adapter_no_copy_is_kept(folders):
    policy = PolicyRecipe(folders[0], lora=LORA).model()
    before = logits(policy)
    frozen = noted(policy)
    assert frozen.model is None
    moved(policy)
    after = logits(policy)
    assert not torch.equal(after, before)
    with frozen(quiet(), policy) as reference:
        assert reference is policy
        assert_close(logits(reference), before, rtol=0, atol=0)
    assert_close(logits(policy), after, rtol=0, atol=0)


@pytest.mark.parametrize("lora", [None, LORA])
def test_another_model_may_be_the_reference(folders, lora):
    policy = PolicyRecipe(folders[0], lora=lora).model()
    frozen = noted(policy, PolicyRecipe(folders[1]))
    with frozen(quiet(), policy) as reference:
        assert_close(logits(reference), logits(PolicyRecipe(folders[1]).model()), rtol=0, atol=0)


def test_it_computes_in_the_precision_of_the_policy(folders):
    policy = PolicyRecipe(folders[0]).model()
    with noted(policy)(quiet(precision="64-true"), policy) as reference:
        assert next(reference.parameters()).dtype == torch.float64


def test_a_policy_is_never_its_own_reference(folders):
    policy = PolicyRecipe(folders[0]).model()
    with pytest.raises(AssertionError, match="not noted"), FrozenReference()(quiet(), policy):
        pass


def fit(policy, beta, path):
    """Two steps, and a checkpoint after them."""
    L.seed_everything(7, verbose=False)
    module = GRPOModule(
        policy,
        {"beta": beta},
        reward=in_process(digits),
        sampling={"max_new_tokens": 6},
        filter_groups=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    data = RolloutDataModule(
        Arithmetic(), max_rows=4, prompts_per_step=2, num_generations=2, batch_size=4
    )
    trainer = quiet(max_steps=2, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return module


def test_neither_checkpoint_nor_optimizer_nor_module_know_it(folders, tmp_path):
    with_it, without = (fit(folders[0], beta, tmp_path / f"{beta}.ckpt") for beta in (0.1, 0.0))
    assert with_it.live_reference.model is not None
    # No reference, no second set of weights.
    assert without.live_reference.model is None
    saved, bare = (torch.load(tmp_path / f"{beta}.ckpt", weights_only=True) for beta in (0.1, 0.0))
    assert saved["state_dict"].keys() == bare["state_dict"].keys()
    ours = {id(p) for p in with_it.live_reference.model.parameters()}
    assert ours.isdisjoint(id(p) for p in with_it.parameters())
    groups = with_it.optimizers().param_groups
    assert ours.isdisjoint(id(p) for group in groups for p in group["params"])


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_run_compares_with_the_policy_before_its_first_step(folders, tmp_path, lora):
    module = fit(PolicyRecipe(folders[0], lora=lora), 0.1, tmp_path / "one.ckpt")
    start = PolicyRecipe(folders[0]).model()
    assert not torch.equal(logits(module.policy), logits(start))
    with module.live_reference(module.trainer, module.policy) as reference:
        assert_close(logits(reference), logits(start), rtol=0, atol=0)
