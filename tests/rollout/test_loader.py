"""The loader that asks for completions when it has none: sized, resumable, alike on any ranks."""

import io
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_samples import Prompts, sample

from lit_align.errors import UserError
from lit_align.rollout import PromptStream, Rollout, RolloutLoader, RolloutPlan

# What the plans below have unless they say otherwise.
SIZES = {"prompts_per_step": 3, "num_generations": 2, "batch_size": 2}


class Writer:
    """Answers prompt p, the g-th drawn, with the tokens 100 + g and its sample's number.

    Every fifth group is left out, as if its rewards agreed.
    """

    def __init__(self):
        self.asked = []
        self.finished = []

    def make_rollout(self, draw, plan, number):
        drawn = draw(plan.prompts)
        self.asked.append((number, [one.prompt for one in drawn]))
        samples = [
            sample(
                one.group,
                n,
                prompt=[1 + one.prompt],
                completion=[100 + one.group] * (1 + (one.group + n) % 4) + [n],
                reward=float(n),
                sampler_logprobs=[-0.1 - one.group] * (2 + (one.group + n) % 4),
            )
            for one in drawn
            for n in range(plan.num_generations)
            if one.group % 5 != 4
        ]
        return Rollout(number, 10 * number, samples)

    def finish_rollout(self, rollout, plan, mine):
        self.finished.append(
            [
                (samples, {name: column.shape for name, column in batch.items()})
                for samples, batch in mine
            ]
        )
        for one in rollout.samples:
            one.advantage = one.reward - 0.5 * (plan.num_generations - 1)
            one.old_logprobs = [-1.0 / 3 - one.group] * len(one.completion_ids)


def loader(
    prompts=7,
    *,
    rank=0,
    replicas=1,
    limit=1.0,
    seed=0,
    fingerprint="these",
    whole=False,
    **sizes,
):
    plan = RolloutPlan(**{**SIZES, **sizes}).on(replicas, None)
    stream = PromptStream(Prompts(prompts, fingerprint), seed=seed)
    options = {"rank": rank, "limit_batches": limit, "whole_window": whole}
    return RolloutLoader(stream, Writer(), plan, **options)


def told(batch):
    """A batch as plain values."""
    return {name: column.tolist() for name, column in batch.items() if name != "window"}


def trained(batch):
    """Group and number of the completions that count, as the writer put them into its tokens."""
    rows = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
    return [(row[0] - 100, row[-1]) for row in rows if row]


def epochs(of, count=1):
    return [told(batch) for _ in range(count) for batch in of]


def saved(of):
    file = io.BytesIO()
    torch.save(of.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_an_epoch_is_as_long_as_a_pass_over_the_prompts():
    """7 prompts, 3 a step: three rollouts of three micro-batches (6 completions, 2 at a time)."""
    made = loader()
    assert len(made) == 9
    assert len(epochs(made)) == 9
    assert [len(rows) for _, rows in made.actor.asked] == [3, 3, 1]
    assert sorted(chain(*(rows for _, rows in made.actor.asked))) == list(range(7))


@pytest.mark.parametrize(("batch_size", "replicas"), [(2, 1), (2, 2), (9, 1), (9, 2), (1, 2)])
@pytest.mark.parametrize("limit", [1.0, 4])
def test_the_first_batch_of_a_step_holds_all_of_it_if_asked(batch_size, replicas, limit):
    sizes = {"batch_size": batch_size, "replicas": replicas, "limit": limit, "num_iterations": 2}
    made = loader(whole=True, **sizes)
    batches, plain = list(made), list(loader(**sizes))
    assert [told(batch) for batch in batches] == [told(batch) for batch in plain]
    for first in range(0, len(batches), made.plan.micro_batches):
        step = batches[first : first + made.plan.micro_batches]
        if len(step) * replicas == 1:
            assert "window" not in step[0]
        else:
            assert [told(batch) for batch in step[0]["window"]] == [told(b) for b in step]
        assert not any("window" in batch for batch in step[1:])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3))
def test_a_rollout_serves_every_step_and_iteration(steps, iterations, batch_size, replicas):
    sizes = {"steps_per_rollout": steps, "num_iterations": iterations, "batch_size": batch_size}
    made = loader(prompts=20, replicas=replicas, **sizes)
    served = made.plan.steps_per_rollout * made.plan.num_iterations * made.plan.micro_batches
    batches = iter(made)
    for _ in range(2):
        first = list(islice(batches, served))
        # Fresh as long as the policy has not made a step.
        fresh = [bool(batch["is_fresh"]) for batch in first]
        assert fresh == [n < made.plan.micro_batches for n in range(served)]
    assert [number for number, _ in made.actor.asked] == [0, 1]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_all_ranks_together_train_on_each_completion_once_an_iteration(replicas):
    sizes = {"steps_per_rollout": 2, "num_iterations": 2, "batch_size": 3}
    ranks = [loader(rank=rank, replicas=replicas, **sizes) for rank in range(replicas)]
    per_rank = [list(one) for one in ranks]
    assert len({len(batches) for batches in per_rank}) == 1
    counted = sorted(chain(*(trained(batch) for batch in chain(*per_rank))))
    # Seven prompts are drawn; group 4 is left out.
    assert counted == sorted([(group, n) for group in (0, 1, 2, 3, 5, 6) for n in (0, 1)] * 2)
    # At each step, the stamps are what the ranks hold together.
    size = ranks[0].plan.micro_batches
    for start in range(0, len(per_rank[0]), size):
        window = [batch for batches in per_rank for batch in batches[start : start + size]]
        rows = [row for batch in window for row in trained(batch)]
        assert {batch["window_rows"].item() for batch in window} == {len(rows)}
        assert {batch["window_prompts"].item() for batch in window} == {len({g for g, _ in rows})}
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        assert {batch["window_tokens"].item() for batch in window} == {tokens}


def test_iterations_deal_the_groups_out_anew():
    made = loader(prompts=12, prompts_per_step=4, num_iterations=2, steps_per_rollout=2)
    steps = [
        frozenset(group for batch in islice(batches, 4) for group, _ in trained(batch))
        for batches in [iter(made)]
        for _ in range(4)
    ]
    assert steps[0] | steps[1] == steps[2] | steps[3]
    assert {*steps[:2]} != {*steps[2:]}


def test_nothing_happens_before_the_first_batch_is_asked_for():
    made = loader()
    batches = [iter(made), iter(made)]
    assert len(made) == 9
    assert made.actor.asked == []
    assert made.stream.drawn == 0
    next(batches[1])
    assert len(made.actor.asked) == 1


def test_epochs_follow_each_other_and_a_second_iterator_goes_on():
    whole, again = loader(), loader()
    expected = epochs(whole, 2)
    head = [told(batch) for batch in islice(again, 4)]
    assert head + epochs(again) + epochs(again) == expected


def test_an_epoch_leaves_the_rest_of_a_rollout_to_the_next():
    """2 steps x 2 iterations of 3 micro-batches make 12; epochs of 7 end inside of a window."""
    sizes = {"prompts": 30, "steps_per_rollout": 2, "num_iterations": 2}
    uncut, cut = loader(**sizes), loader(**sizes, limit=7)
    windows = [
        [trained(batch) for batch in islice(batches, 3)]
        for batches in [iter(uncut)]
        for _ in range(8)
    ]
    seen = [[trained(batch) for batch in cut] for _ in range(2)]
    # Windows 0, 1 and the first micro-batch of 2; then 3, 4 and the first of 5.
    assert seen == [[*windows[n], *windows[n + 1], windows[n + 2][0]] for n in (0, 3)]
    assert len(cut.actor.asked) == 2


@pytest.mark.parametrize(("limit", "batches"), [(7, 7), (0.5, 4), (100, 9), (1.0, 9), (1, 1)])
def test_a_window_that_a_limit_cuts_short_counts_what_is_left_of_it(limit, batches):
    made = loader(limit=lambda: limit)
    seen = list(made)
    assert len(seen) == batches
    for start in range(0, batches, 3):
        window = seen[start : start + 3]
        rows = sum(len(trained(batch)) for batch in window)
        assert [batch["window_rows"].item() for batch in window] == [rows] * len(window)


def test_the_policy_is_not_fresh_after_a_step_that_a_limit_cut_short():
    made = loader(prompts=30, num_iterations=2, limit=1)
    assert [bool(batch["is_fresh"]) for _ in range(4) for batch in made] == [True, False] * 2


@pytest.mark.parametrize("limit", [1.0, 5])
@pytest.mark.parametrize("sizes", [{}, {"steps_per_rollout": 2, "num_iterations": 2}])
def test_a_loader_goes_on_after_any_batch_as_if_it_had_not_stopped(sizes, limit):
    whole = loader(prompts=8, limit=limit, **sizes)
    states, seen = [saved(whole)], []
    for _ in range(2):
        for batch in whole:
            seen.append(told(batch))
            states.append(saved(whole))
    for done, state in enumerate(states[:-1]):
        again = loader(prompts=8, limit=limit, **sizes)
        again.load_state_dict(state)
        rest = list(chain(*(epochs(again) for _ in range(2))))
        assert rest[: len(seen) - done] == seen[done:], done


def windows_of(batches, size):
    """What counts in each step, however it is cut."""
    return [
        sorted(chain(*map(trained, batches[n : n + size]))) for n in range(0, len(batches), size)
    ]


@pytest.mark.parametrize(("batch_size", "replicas"), [(3, 1), (6, 1), (1, 2)])
def test_a_run_goes_on_with_fewer_micro_batches_or_on_more_ranks_after_an_epoch(
    batch_size, replicas
):
    """Three micro-batches to a step become 2, 1 or 3."""
    sizes = {"prompts": 36, "steps_per_rollout": 2, "num_iterations": 2}
    whole = loader(**sizes)
    list(whole)
    state = saved(whole)
    expected = windows_of(list(whole), 3)
    ranks = [
        loader(**sizes, batch_size=batch_size, rank=n, replicas=replicas) for n in range(replicas)
    ]
    for one in ranks:
        one.load_state_dict(state)
    count = ranks[0].plan.micro_batches
    per_rank = [list(one) for one in ranks]
    together = [batch for turn in zip(*per_rank, strict=True) for batch in turn]
    found = windows_of(together, count * replicas)
    shared = min(len(found), len(expected))
    assert shared >= 2
    assert found[:shared] == expected[:shared]


@pytest.mark.parametrize(
    ("done", "batch_size", "ours"), [(1, 3, 2), (3, 3, 2), (4, 1, 6), (12, 1, 6)]
)
def test_other_micro_batches_are_refused(done, batch_size, ours):
    """Lightning goes on counting those of the epoch; after one of twelve it would want as many."""
    whole = loader(prompts=24)
    list(islice(whole, done))
    again = loader(prompts=24, batch_size=batch_size)
    with pytest.raises(
        UserError, match=f"cannot resume with {ours} micro-batches to a step, where there were 3"
    ):
        again.load_state_dict(whole.state_dict())
    assert again.stream.drawn == 0


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"prompts_per_step": 4}, "data.prompts_per_step=3, not 4"),
        ({"num_generations": 3}, "data.num_generations=2, not 3"),
        ({"steps_per_rollout": 2}, "data.steps_per_rollout=1, not 2"),
        ({"num_iterations": 2}, "data.num_iterations=1, not 2"),
        ({"prompts": 8}, "rows=7 in the prompts, not 8"),
        ({"seed": 1}, "seed=0 in the prompts, not 1"),
        ({"fingerprint": "others"}, "data=these in the prompts, not others"),
    ],
)
def test_what_may_not_change_within_a_run_is_refused(sizes, named):
    state = saved(loader())
    with pytest.raises(UserError, match=f"cannot resume.*{named}"):
        loader(**sizes).load_state_dict(state)


def test_the_micro_batches_that_are_finished_are_those_of_training():
    """In the order and shape in which training has them: the first iteration is exactly these."""
    made = loader(steps_per_rollout=2, num_iterations=2, replicas=2, rank=1)
    batches = list(islice(made, made.plan.batches // 2))
    [finished] = made.actor.finished
    assert len(finished) == len(batches) == 4
    for (samples, shapes), batch in zip(finished, batches, strict=True):
        assert [(one.group, one.number) for one in samples] == trained(batch)
        assert {name: batch[name].shape for name in shapes} == shapes


def test_what_is_given_in_finishing_is_in_the_batches():
    batch = next(iter(loader()))
    assert {abs(value) for value in batch["advantages"].tolist()} == {0.5}
    [(group, _), _] = trained(batch)
    assert batch["old_logprobs"].min().item() == pytest.approx(-1 / 3 - group, rel=1e-6)


def test_a_rank_without_completions_keeps_step_with_a_filler():
    """Two completions of one prompt for three ranks."""
    ranks = [loader(1, rank=n, replicas=3, prompts_per_step=1) for n in range(3)]
    batches = [next(iter(one)) for one in ranks]
    assert [len(trained(batch)) for batch in batches] == [1, 1, 0]
    assert len({frozenset(batch) for batch in batches}) == 1
    assert [batch["row_prompt_tokens"].tolist() for batch in batches] == [[5.0], [5.0], [0.0]]


class Interrupted(Writer):
    """Stops once, before or after the completions are written."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.state = None

    def make_rollout(self, draw, plan, number):
        rollout = super().make_rollout(draw, plan, number)
        self.stop("make_rollout")
        return rollout

    def finish_rollout(self, rollout, plan, mine):
        self.stop("finish_rollout")
        super().finish_rollout(rollout, plan, mine)

    def stop(self, where):
        if where == self.where:
            self.where = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["make_rollout", "finish_rollout"])
def test_a_rollout_that_was_not_completed_is_made_again(where):
    """A checkpoint may be written when a run is stopped in the midst of it."""
    expected = epochs(loader())
    made = loader()
    made.actor = Interrupted(where)
    with pytest.raises(KeyboardInterrupt):
        next(iter(made))
    again = loader()
    again.load_state_dict(saved(made))
    assert epochs(again) == expected
    assert epochs(made) == expected


def test_a_step_may_ask_for_more_prompts_than_there_are():
    """Two prompts for steps of five: each step has what there is, in as many micro-batches."""
    made = loader(2, prompts_per_step=5)
    assert len(made) == made.plan.micro_batches == 5
    for number in range(2):
        groups = [2 * number, 2 * number + 1]
        assert sorted(chain(*map(trained, made))) == [(g, n) for g in groups for n in (0, 1)]


def test_a_rollout_with_fewer_groups_than_steps_leaves_a_step_empty():
    """Its window counts nothing, so that its loss is 0."""
    batches = list(loader(1, steps_per_rollout=2))
    assert [len(trained(batch)) for batch in batches] == [1, 1, 0, 0, 0, 0]
    assert [batch["window_tokens"].item() for batch in batches[3:]] == [0.0] * 3
