import pytest
import torch
from transformers import AutoModelForCausalLM, HyperCLOVAXConfig

from lit_align.errors import UserError
from lit_align.logprobs import verify_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_known_architectures_pass(family, build, dtype):
    verify_head(build(family, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_treatment_of_logits_that_is_unknown_here_is_refused_by_name(build, dtype):
    # HyperCLOVAX multiplies by the very key that Granite divides by.
    settings = build("llama").config.to_dict() | {"logits_scaling": 4.0}
    del settings["model_type"], settings["architectures"]
    model = AutoModelForCausalLM.from_config(HyperCLOVAXConfig(**settings), dtype=dtype)
    with pytest.raises(UserError, match=r"HyperCLOVAXForCausalLM is not supported.*nats"):
        verify_head(model)


def test_a_scale_that_the_configuration_does_not_tell_is_noticed(build):
    model = build("cohere")
    # The model took its 0.3 from there when it was built.
    model.config.logit_scale = 1.0
    with pytest.raises(UserError, match="CohereForCausalLM is not supported"):
        verify_head(model)


def test_the_modes_of_all_modules_are_given_back(build):
    model = build("llama")
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2
    verify_head(model)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_numbers_that_are_not_finite_are_refused(build):
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="nan nats"):
        verify_head(model)
