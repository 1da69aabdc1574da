"""Two processes under FSDP2 against one without, on the same four rows; run by test_fsdp.py.

usage: fsdp_ranks.py FILE    FILE lets the processes find each other and must not exist.
Ends with exit status 0 only if every gradient of both ranks equals that of one process.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lit_align.logprobs import response_logprobs

RANKS = 2


def build(*, tied):
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
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).train()


def rows(*, second_rank_scores):
    """Four rows of which rank 1 gets the last two, with or without a response to score."""
    ids = torch.randint(1, 61, (4, 9), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(ids)
    attention_mask[1, 6:] = 0
    labels = ids.where(attention_mask.bool(), -100)
    labels[:, :3] = -100
    if not second_rank_scores:
        labels[2:] = -100
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def gradients(model, batch):
    found = response_logprobs(model, **batch, chunk_size=4)
    # FSDP divides the sum over ranks by their number.
    world = dist.get_world_size() if isinstance(model, torch.distributed.fsdp.FSDPModule) else 1
    (world * found.logprobs.sum()).backward()
    return {
        name: parameter.grad.full_tensor()
        if hasattr(parameter.grad, "full_tensor")
        else parameter.grad
        for name, parameter in model.named_parameters()
    }


def compare(rank, *, tied, second_rank_scores, reshard):
    batch = rows(second_rank_scores=second_rank_scores)
    right = gradients(build(tied=tied), batch)
    model = build(tied=tied)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    mine = {name: values[2 * rank : 2 * rank + 2] for name, values in batch.items()}
    found = gradients(model, mine)
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        scale = gradient.abs().max()
        assert scale > 0
        difference = (found[name] - gradient).abs().max() / scale
        assert difference < 2e-6, f"{name} differs by {difference:.1e}"


def run(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for tied in (False, True):
        for second_rank_scores in (True, False):
            for reshard in (True, False):
                compare(rank, tied=tied, second_rank_scores=second_rank_scores, reshard=reshard)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(run, args=(sys.argv[1],), nprocs=RANKS)
