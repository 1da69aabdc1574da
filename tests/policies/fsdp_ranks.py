"""A policy sharded over two processes: its fingerprint, its reference and its export.

usage: fsdp_ranks.py FOLDER    FOLDER is empty; the processes meet and write there.
Ends with exit status 0 only if everything equals what one process without sharding gives.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_align.logprobs import response_logprobs
from lit_align.policies import policy_fingerprint, reference_mode, save_policy
from lit_align.policies.adapters import attach_lora

RANKS = 2


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def build(*, tied, lora):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    if lora:
        model = attach_lora(model, {"r": 2, "target_modules": "all-linear"})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    return model


def logprobs(model):
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return response_logprobs(model, ids, torch.ones_like(ids), ids).logprobs


def compare(rank, folder, *, tied, lora):
    plain, model = (build(tied=tied, lora=lora) for _ in range(2))
    base = model.get_base_model() if lora else model
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert policy_fingerprint(model) == policy_fingerprint(plain)
    assert torch.allclose(logprobs(model), logprobs(plain), rtol=1e-5, atol=1e-5)
    with reference_mode(model), reference_mode(plain):
        assert torch.allclose(logprobs(model), logprobs(plain), rtol=1e-5, atol=1e-5)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=options)
    if rank == 0:
        save_policy(model, NoTokenizer(), folder, state_dict=gathered)
        found = AutoModelForCausalLM.from_pretrained(folder)
        assert type(found) is LlamaForCausalLM
        assert torch.allclose(logprobs(found), logprobs(plain), rtol=1e-4, atol=1e-4)
    dist.barrier()
    assert policy_fingerprint(model) == policy_fingerprint(plain)


def run(rank, path):
    folder = Path(path)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=RANKS
    )
    for tied in (False, True):
        for lora in (False, True):
            compare(rank, folder / f"{tied}-{lora}", tied=tied, lora=lora)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(run, args=(sys.argv[1],), nprocs=RANKS)
