"""Two processes under FSDP2 against one without, on the same requests; run by test_fsdp.py.

usage: fsdp_ranks.py FILE    FILE lets the processes find each other and must not exist.
Ends with exit status 0 only if each rank's completions equal those of one process.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lit_align.rollout import HuggingFaceEngine, Request, Sampling

RANKS = 2
SAMPLING = Sampling(max_new_tokens=7, stop_token_ids=(2, 30, 31, 32, 33, 34, 35))
LONG = Request([9, 10, 11, 12, 13, 14], [0, 1, 2], [1, 2, 3])
SHORT = Request([8], [0, 1], [4, 5])
TWINS = Request([5, 6, 7], [0, 1, 2, 3, 4], [6, 7, 8, 9, 10])
# What each of the two ranks is asked.
SHARES = [
    ([LONG, SHORT, TWINS], []),
    ([], [SHORT]),
    ([SHORT], [TWINS, LONG]),
    ([], []),
]


def build():
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
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).train()


def completions(model, requests):
    engine = HuggingFaceEngine(batch_size=3)
    engine.sync_weights(0, model)
    return engine.generate(requests, SAMPLING)


def run(rank, path):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=RANKS,
        # Ranks out of step wait for each other for ever.
        timeout=timedelta(seconds=90),
    )
    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for shares in SHARES:
        found, right = completions(model, shares[rank]), completions(build(), shares[rank])
        for group, expected in zip(found, right, strict=True):
            assert [one.ids for one in group] == [one.ids for one in expected]
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Forked, so that the libraries are imported once.
    torch.multiprocessing.start_processes(
        run, args=(sys.argv[1],), nprocs=RANKS, start_method="fork"
    )
