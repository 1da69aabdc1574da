"""What a callback runs in between must change nothing."""

import lightning as L
import pytest
import torch
from torch import nn

from lit_align.modules.inference import inference


def quiet_trainer(**options):
    return L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **options)


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model[0].eval()  # as a user keeps a frozen part
    return model


def test_modes_gradients_and_random_numbers_come_back(model):
    state = torch.get_rng_state()
    with inference(quiet_trainer(), model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
    assert [module.training for module in model] == [False, True]
    assert model.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_modes_come_back_after_an_error_too(model):
    with pytest.raises(RuntimeError), inference(quiet_trainer(), model):
        raise RuntimeError
    assert [module.training for module in model] == [False, True]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("64-true", torch.float64)],
)
def test_it_computes_in_the_precision_of_training(precision, dtype):
    trainer = quiet_trainer(precision=precision)
    model = trainer.precision_plugin.convert_module(nn.Linear(2, 2))
    with inference(trainer, model):
        assert model(torch.ones(1, 2, dtype=model.weight.dtype)).dtype == dtype
