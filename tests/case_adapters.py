"""How our code answers public faults: one small function per case, in a table by id.

An adapter runs the package on the case's input and compares with the case's right values; what the
fault would have given must not come out.
"""

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay import Replay
from torch import Tensor
from torch.testing import assert_close

from lit_align.callbacks.reference_rows import Responses
from lit_align.callbacks.reference_store import Scored, row_key
from lit_align.data.loader import PairLoader
from lit_align.errors import UserError
from lit_align.logprobs import response_logprobs
from lit_align.losses import PREFERENCE_LOSSES, DPOConfig, TensorCache, compute_loss
from lit_align.modules import DPOModule
from lit_align.modules.pair_logps import PairLogps
from lit_align.modules.window import window_mean
from lit_align.ops import IGNORE_INDEX, completion_lengths, masked_mean, masked_sum

FOLDER = Path(os.environ.get("LIT_ALIGN_CASES", Path(__file__).parent / "cases"))
Case = dict[str, Any]


def load() -> list[Case]:
    """Every case of the folder, in the order of the file."""
    return json.loads((FOLDER / "bug_cases.json").read_text())


def same(case: Case, actual: Tensor | float, expected: Any) -> None:
    """Equal within the case's tolerance."""
    actual = torch.as_tensor(actual).double()
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_close(actual, expected, rtol=0, atol=case["tolerance"])


def the_mask_is_shifted_like_the_targets(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    ids, mask = torch.tensor([given["input_ids"]]), torch.tensor([given["completion_mask"]])
    labels = ids.where(mask.bool(), IGNORE_INDEX)
    # Logits under which the token that comes next has just the log-prob given.
    logps = torch.tensor([given["next_token_logps"]], dtype=torch.float64)
    others = ((1 - logps.exp()) / ids.max()).log().unsqueeze(-1).repeat(1, 1, ids.max() + 1)
    logits = others.scatter(-1, ids[:, 1:, None], logps.unsqueeze(-1))
    model = Replay(torch.cat([logits, logits[:, -1:]], 1))
    scored = response_logprobs(model, ids, torch.ones_like(ids), labels)
    same(case, masked_sum(scored.logprobs, scored.mask).item(), expected["sum"])
    same(case, masked_mean(scored.logprobs, scored.mask).item(), expected["mean"])
    assert completion_lengths(labels).item() == expected["n_tokens"]


def a_row_without_tokens_is_0(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    logprobs = torch.tensor(given["per_token_logps"], requires_grad=True)
    mask = torch.tensor(given["mask"]).bool()
    same(case, masked_sum(logprobs, mask), expected["sum"])
    means = masked_mean(logprobs, mask)
    same(case, means, expected["mean"])
    # And what a loss makes of such a mean leaves the others alone.
    losses = compute_loss(DPOConfig("simpo"), {}, means, means.detach() - 1).losses
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all() == expected["all_finite"]
    same(case, logprobs.grad[1], expected["grad_row_1"])


def ipo_reads_means_of_both_models(case: Case) -> None:
    given, expected = case["input"], case["expected"]

    def numbers(name: str) -> list[Tensor]:
        values = [given[name.format(side)] for side in ("chosen", "rejected")]
        return [torch.tensor([value]).double() for value in values]

    lengths = [count.long() for count in numbers("{}_tokens")]
    sums = zip(("chosen_logps", "rejected_logps"), numbers("ref_{}_sum"), strict=True)
    module = DPOModule("unused", DPOConfig("ipo", beta=given["beta"]))
    module.reference_cache = TensorCache(dict(sums))
    logps = PairLogps(*numbers("policy_{}_sum"), *lengths)
    losses = module.pair_loss({"index": torch.tensor([0])}, logps).losses
    same(case, losses, [expected["loss"]])
    assert abs(losses.item() - expected["value_of_the_bug"]) > 1


def odds_of_confident_answers_are_finite(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    dtype = getattr(torch, given["dtype"])
    for n, pair in enumerate(given["pairs_avg_logps"]):
        policy = [
            torch.tensor([pair[side]], dtype=dtype, requires_grad=True)
            for side in ("chosen", "rejected")
        ]
        losses, chosen, rejected = compute_loss(DPOConfig("orpo_odds_ratio"), {}, *policy)
        found = {"log_odds": chosen - rejected, "or_loss": losses}
        gradients = torch.autograd.grad(losses.sum(), policy)
        assert all(part.isfinite().all() for part in (*found.values(), *gradients))
        for name, values in found.items():
            if expected[name][n] != "finite":
                same(case, values, [expected[name][n]])


def a_step_is_divided_by_its_whole_window(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    counts = torch.tensor(given["token_counts"])
    ranks, accumulate = counts.shape
    trainer = SimpleNamespace(
        accumulate_grad_batches=accumulate,
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0},
    )

    def returned(rank: int, micro_batch: int) -> float:
        tokens = int(counts[rank, micro_batch])
        total = given["token_loss_sums_rank_x_microbatch"][rank][micro_batch]
        losses = torch.full((tokens,), total / tokens)
        share = window_mean(losses, torch.ones(tokens).bool(), counts.sum(), trainer)
        return share.item() / accumulate  # Lightning's own division

    shares = [[returned(rank, micro) for micro in range(accumulate)] for rank in range(ranks)]
    same(case, torch.tensor(shares), expected["loss_to_backward_per_microbatch"])
    same(case, torch.tensor(shares).sum(1).mean(), expected["step_loss"])


def reference_rows_go_by_id(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    cache = TensorCache(
        {f"{side}_logps": torch.tensor(values).double() for side, values in given["cache"].items()}
    )
    index = torch.tensor(given["shuffled_order"][:2])
    rows = cache[index]
    same(case, rows["chosen_logps"], expected["ref_chosen"])
    same(case, rows["rejected_logps"], expected["ref_rejected"])
    policy = [torch.tensor(given[f"policy_{side}"]).double() for side in ("chosen", "rejected")]
    args = DPOConfig("dpo", beta=given["beta"])
    same(case, compute_loss(args, {"index": index}, *policy, cache).losses, expected["losses"])
    with pytest.raises(UserError, match="row 4"):
        compute_loss(args, {"index": torch.tensor([0, len(cache)])}, *policy, cache)


def gathered_results_go_by_id(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    data = [
        {"index": n, "prompt_ids": [n], "chosen_ids": [7], "rejected_ids": [8, 9]}
        for n in range(given["rows"])
    ]
    computed: dict[bytes, Scored] = {}
    for rank in range(given["world_size"]):
        for n in given[f"indices_rank{rank}"]:
            for side in ("chosen_ids", "rejected_ids"):
                computed[row_key([n], data[n][side])] = Scored(-(n + 1), len(data[n][side]))
    cache = Responses(data).cache(computed, torch.float64)
    same(case, cache.tensors["chosen_logps"], expected["cache"])
    same(case, cache.tensors["rejected_logps"], expected["cache"])


def what_a_loss_cannot_do_is_refused(case: Case) -> None:
    """The entries about losses; those about generation belong to what is not here yet."""
    entries = zip(case["input"]["cases"], case["expected"]["outcomes"], strict=True)
    refused = [(entry, outcome) for entry, outcome in entries if "loss" in entry]
    assert all(outcome.startswith("error") for _, outcome in refused)
    for entry, _ in refused:
        options = {name: value for name, value in entry.items() if name != "loss"}
        with pytest.raises(UserError):
            DPOConfig(entry["loss"], **options)
        if not options:
            with pytest.raises(UserError, match=", ".join(sorted(PREFERENCE_LOSSES))):
                DPOConfig(entry["loss"])
        for name in PREFERENCE_LOSSES if options else ():
            with pytest.raises(UserError, match=next(iter(options))):
                DPOConfig(name, **options)


def collate(rows: list[int]) -> dict[str, Tensor]:
    return {"index": torch.tensor(rows)}


def an_interrupted_epoch_goes_on_where_it_was(case: Case) -> None:
    given, expected = case["input"], case["expected"]

    def loader(rows: int, batch_size: int, accumulate: int, **options: Any) -> PairLoader:
        return PairLoader(
            range(rows), collate, batch_size=batch_size, accumulate=accumulate, **options
        )

    def ids(batches: Any) -> list[int]:
        return torch.cat([batch["index"] for batch in batches]).tolist()

    small = (given["rows"], given["micro_batch"], given["accumulate"])
    steps = given["stop_after_optimizer_steps"] * given["accumulate"]
    for workers, shuffle in ((0, False), (0, True), (1, True)):
        options = {"num_workers": workers, "shuffle": shuffle}
        whole, stopped, resumed = (loader(*small, **options) for _ in range(3))
        uninterrupted = [ids(whole) for _ in range(given["epochs"])]
        running = iter(stopped)
        for _ in range(steps):
            next(running)
        resumed.load_state_dict(stopped.state_dict())
        assert [ids(resumed), ids(resumed)] == [uninterrupted[0][steps:], uninterrupted[1]]
        assert sorted(uninterrupted[1]) == list(range(given["rows"]))
        if not shuffle:
            assert uninterrupted[0][steps:] == expected["ids_after_resume_epoch_0"]
    # Lightning ends a window where the epoch ends: eight updates are one epoch of the big case.
    big = given["big_case_where_accumulation_crosses_epochs"]
    accumulate = big["global_batch"] // big["micro_batch"]
    epoch = loader(big["rows"], big["micro_batch"], accumulate)
    windows = [batch["window_pairs"].item() for batch in epoch][::accumulate]
    assert len(windows) == big["updates_done"]
    assert sum(windows) == big["rows"]
    assert (epoch.state_dict()["epoch"], epoch.state_dict()["rows_seen"]) == (1, 0)


ADAPTERS: dict[str, Callable[[Case], None]] = {
    "BC01": the_mask_is_shifted_like_the_targets,
    "BC02": a_row_without_tokens_is_0,
    "BC03": ipo_reads_means_of_both_models,
    "BC04": odds_of_confident_answers_are_finite,
    "BC08": a_step_is_divided_by_its_whole_window,
    "BC18": reference_rows_go_by_id,
    "BC19": gathered_results_go_by_id,
    "BC21": what_a_loss_cannot_do_is_refused,
    "BC22": an_interrupted_epoch_goes_on_where_it_was,
}
if find_spec("case_adapters_data"):
    from case_adapters_data import DATA_CASES

    ADAPTERS |= DATA_CASES
if find_spec("case_adapters_generation"):
    from case_adapters_generation import GENERATION_CASES

    ADAPTERS |= GENERATION_CASES
if find_spec("case_adapters_advantages"):
    from case_adapters_advantages import ADVANTAGES_CASES

    ADAPTERS |= ADVANTAGES_CASES
if find_spec("case_adapters_policy"):
    from case_adapters_policy import POLICY_CASES

    ADAPTERS |= POLICY_CASES
if find_spec("case_adapters_rewards"):
    from case_adapters_rewards import REWARDS_CASES

    ADAPTERS |= REWARDS_CASES
if find_spec("case_adapters_unpaired"):
    from case_adapters_unpaired import UNPAIRED_CASES

    ADAPTERS |= UNPAIRED_CASES
