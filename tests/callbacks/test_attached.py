"""Which callbacks serve which modules."""

import json

import pytest
import torch
from lightning import LightningModule
from transformers import AutoModelForCausalLM

from lit_align.callbacks import BeforeAfter, ExactMatch, Plan, ReferenceCache, SavePolicy
from lit_align.errors import UserError


def test_a_run_that_writes_completions_keeps_its_best_and_its_final_policy(act, tmp_path):
    keeper = BeforeAfter(["val/pass@1"])
    saver = SavePolicy(tmp_path, best="val/pass@1")
    result = act(
        keeper, saver, limit_val_batches=1.0, num_sanity_val_steps=-1, val_check_interval=6
    )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in result.module.policy.state_dict().items():
        assert torch.equal(saved[name], tensor)
    assert json.loads((tmp_path / "model-best/config.json").read_text())
    assert keeper.before.keys() == keeper.after.keys() == {"val/pass@1"}
    assert saver.best_score >= keeper.after["val/pass@1"]


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (ReferenceCache(), "a GRPOModule keeps the reference's log-probs in its rollouts"),
        (ExactMatch(), "a GRPOModule logs val/pass@1 in its place"),
    ],
    ids=["ReferenceCache", "ExactMatch"],
)
def test_what_serves_pairs_only_says_what_completions_have_instead(act, callback, instead):
    result = act(callback)
    assert isinstance(result.ended_by, UserError)
    name = type(callback).__name__
    assert str(result.ended_by) == (
        f"{name} serves a DPOModule or UnpairedModule, not a GRPOModule: leave the callback out; "
        f"{instead}"
    )
    assert not hasattr(result.module, "policy"), "before a model is loaded"


class Plain(LightningModule):
    """A module without a policy."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", [Plan, SavePolicy])
def test_a_module_without_a_policy_is_refused(tools, tmp_path, kind):
    callback = kind(tmp_path) if kind is SavePolicy else kind()
    trainer = tools.quiet_trainer(max_steps=1, callbacks=[callback], default_root_dir=tmp_path)
    with pytest.raises(UserError, match=rf"{kind.__name__} serves modules that train a policy"):
        trainer.fit(Plain(), torch.utils.data.DataLoader(torch.ones(2, 1)))
