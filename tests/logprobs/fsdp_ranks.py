"""Two processes under FSDP2 against one without, on the same four rows; run by test_fsdp.py.

usage: fsdp_ranks.py FILE    FILE lets the processes find each other and must not exist.
Ends with exit status 0 only if every gradient of both ranks equals that of one process.
"""

import sys
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lit_align.logprobs import response_logprobs

RANKS = 2
PROMPT = 18


def build(*, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    # In float64, what is left of rounding is that of the norms, which are float32 by themselves.
    return LlamaForCausalLM(config).double().train()


def rows(*, second_rank_scores):
    """Four rows of which rank 1 gets the last two, with or without a response to score."""
    ids = torch.randint(1, 61, (4, PROMPT + 6), generator=torch.Generator().manual_seed(1))
    ids[1, :PROMPT] = ids[0, :PROMPT]
    attention_mask = torch.ones_like(ids)
    attention_mask[1, PROMPT + 3 :] = 0
    labels = ids.where(attention_mask.bool(), -100)
    labels[:, :PROMPT] = -100
    if not second_rank_scores:
        labels[2:] = -100
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def gradients(model, batch, layout):
    found = response_logprobs(model, **batch, chunk_size=4, layout=layout)
    # FSDP divides the sum over ranks by their number.
    world = dist.get_world_size() if isinstance(model, torch.distributed.fsdp.FSDPModule) else 1
    (world * found.logprobs.sum()).backward()
    return {
        name: parameter.grad.full_tensor()
        if hasattr(parameter.grad, "full_tensor")
        else parameter.grad
        for name, parameter in model.named_parameters()
    }


def compare(rank, *, layout, tied, second_rank_scores, reshard):
    batch = rows(second_rank_scores=second_rank_scores)
    right = gradients(build(tied=tied), batch, "padded")
    model = build(tied=tied)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    mine = {name: values[2 * rank : 2 * rank + 2] for name, values in batch.items()}
    found = gradients(model, mine, layout)
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        scale = gradient.abs().max()
        assert scale > 0
        difference = (found[name] - gradient).abs().max() / scale
        assert difference < 5e-7, f"{name} differs by {difference:.1e}"


def run(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    # The second rank has nothing to share: under "auto" the ranks' layouts differ.
    for layout, tied, second_rank_scores, reshard in product(
        ("padded", "packed", "shared", "auto"), (False, True), (True, False), (True, False)
    ):
        compare(
            rank, layout=layout, tied=tied, second_rank_scores=second_rank_scores, reshard=reshard
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(run, args=(sys.argv[1],), nprocs=RANKS)
