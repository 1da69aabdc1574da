"""Prompts for a module that answers them itself, alone and inside real Trainers."""

import json
from itertools import chain
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from small_samples import sample
from small_tokenizers import char_level

from lit_align.data import RolloutDataModule
from lit_align.data.tasks import Arithmetic
from lit_align.errors import UserError
from lit_align.rollout import Rollout

# Two prompts with two completions each make a step: four completions, one at a time.
SIZES = {"prompts_per_step": 2, "num_generations": 2, "batch_size": 1}


class Recorder(L.LightningModule):
    """One weight, moved by every completion that counts; keeps what it was given."""

    def __init__(self, *, counts_steps=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tokenizer = char_level()
        self.counts_steps = counts_steps
        self.rollouts = []
        self.seen = []
        self.val_rows = []

    def training_step(self, batch):
        rows = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
        self.seen.append([(row[0] - 1, row[1]) for row in rows if row])
        counts = (batch["labels"] != -100).any(-1)
        share = (1 + batch["advantages"])[counts].sum() / batch["window_rows"]
        return self.weight * share * self.trainer.accumulate_grad_batches

    def validation_step(self, batch):
        self.val_rows += [prompt.row for prompt in batch["prompts"]]

    def configure_optimizers(self):
        if self.counts_steps:
            # Makes the training loader long before a checkpoint's loops are restored.
            assert self.trainer.estimated_stepping_batches
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Actor(Recorder):
    """Answers each prompt with the number of its group."""

    def make_rollout(self, draw, plan, number):
        drawn = draw(plan.prompts)
        self.rollouts.append([one.prompt.row for one in drawn])
        samples = [
            sample(one.group, n, prompt=one.prompt.ids, completion=[1 + one.group, n])
            for one in drawn
            for n in range(plan.num_generations)
        ]
        return Rollout(number, self.trainer.global_step, samples)

    def finish_rollout(self, rollout, plan, mine):
        for one in rollout.samples:
            one.advantage = float(one.number)


class Checkpoints(L.Callback):
    """Saves after every micro-batch and at the end of every epoch."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, batches, end=""):
        return self.folder / f"{batches}{end}.ckpt"

    def on_train_batch_end(self, trainer, module, *_):
        trainer.save_checkpoint(self.path(len(module.seen)))

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path(len(module.seen), "-end"))


@pytest.fixture
def write(tmp_path):
    def to_file(count, name="prompts.jsonl"):
        rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(count)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / name

    return to_file


def make(path, **options):
    return RolloutDataModule(path, **{"tokenizer": char_level(), **SIZES, **options})


@pytest.fixture
def trainer(tmp_path):
    def made(**options):
        return L.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **{"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options},
        )

    return made


@pytest.fixture
def fit(trainer):
    def fitted(data, ckpt_path=None, *, counts_steps=False, **options):
        module = Actor(counts_steps=counts_steps)
        trainer(**options).fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    return fitted


@pytest.fixture
def saved(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts_per_step": 0}, "data.prompts_per_step must be a whole number"),
        ({"num_generations": 1.5}, "data.num_generations must be a whole number"),
        ({"batch_size": None}, "data.batch_size must be a whole number"),
        ({"steps_per_rollout": 0}, "data.steps_per_rollout must be a whole number"),
        ({"num_iterations": True}, "data.num_iterations must be a whole number"),
        ({"val_batch_size": None}, "data.val_batch_size must be a whole number.*not None"),
        ({"val_batch_size": 0}, "data.val_batch_size must be a whole number"),
        ({"max_rows": 0}, "data.max_rows must be a whole number"),
        ({"val_max_rows": 2.0}, "data.val_max_rows must be a whole number"),
        ({"val_split": 0.0}, "data.val_split must be the name of a split or a share.*not 0.0"),
        ({"val_split": 1.0}, "data.val_split must be the name of a split or a share.*not 1.0"),
        ({"val_split": 5}, "data.val_split must be the name of a split or a share.*not 5"),
        ({"val_split": True}, "data.val_split must be the name of a split or a share.*not True"),
        (
            {"val_split": "test", "val_path": "x.jsonl"},
            "data.val_path and the split 'test' exclude each other: set one",
        ),
        ({"on_bad_row": "ignore"}, "on_bad_row"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(options, message):
    with pytest.raises(UserError, match=message):
        make("there is no such file", **options)


def rows(part):
    return [prompt.row for prompt in part.prompts]


def test_without_validation_there_are_no_rows_for_it(write):
    data = make(write(5))
    data.setup()
    assert rows(data.train_rows) == list(range(5))
    assert data.val_rows is None
    assert data.val_dataloader() == []
    assert data.train_rows[2].columns == {"answer": "2"}


def test_a_share_is_taken_from_training(write):
    path = write(10)
    parts = []
    for seed in (0, 0, 1):
        data = make(path, val_split=0.3, seed=seed)
        data.setup()
        assert len(data.val_rows) == 3
        assert sorted(rows(data.train_rows) + rows(data.val_rows)) == list(range(10))
        parts.append(rows(data.val_rows))
    assert parts[0] == parts[1] != parts[2]


def test_limits_hold_for_each_part_of_a_share(write):
    data = make(write(10), val_split=0.5, max_rows=3, val_max_rows=2)
    data.setup()
    assert (len(data.train_rows), len(data.val_rows)) == (3, 2)
    assert not {*rows(data.train_rows)} & {*rows(data.val_rows)}


@pytest.mark.parametrize("val_split", [None, 0.2])
def test_a_file_of_its_own_takes_the_place_of_a_share(write, val_split):
    data = make(write(5), val_path=write(4, "val.jsonl"), val_split=val_split, val_max_rows=3)
    data.setup()
    assert (len(data.train_rows), len(data.val_rows)) == (5, 3)


def test_a_task_is_a_path_like_any_other():
    data = make(Arithmetic(), max_rows=4, as_chat=False)
    data.setup()
    assert len(data.train_rows) == 4
    assert data.train_rows[0].columns.keys() == {"answer"}


def test_the_tokenizer_of_the_module_is_taken(write, fit):
    module = fit(make(write(4), tokenizer=None), max_epochs=1)
    assert sorted(chain(*module.rollouts)) == [0, 1, 2, 3]


def test_without_a_tokenizer_it_says_where_one_comes_from(write):
    with pytest.raises(UserError, match=r"there is no tokenizer: RolloutDataModule\(..., token"):
        make(write(4), tokenizer=None).setup()


def test_without_a_trainer_there_is_nobody_to_answer(write):
    data = make(write(4))
    data.setup()
    with pytest.raises(UserError, match=r"trainer.fit\(module, datamodule=...\)"):
        data.train_dataloader()


def test_a_module_that_does_not_write_is_refused(write, trainer):
    with pytest.raises(UserError, match=r"serves a module that writes completions.*a Recorder"):
        trainer().fit(Recorder(), datamodule=make(write(4)))


@pytest.mark.parametrize(
    ("batch_size", "asked", "set_to"), [(1, 1, 4), (3, 1, 2), (4, 1, 1), (9, 1, 1), (3, 5, 5)]
)
def test_the_trainer_is_told_how_many_micro_batches_make_a_step(
    write, trainer, batch_size, asked, set_to
):
    """Four completions make a step; what was asked for and is more is left as it is."""
    one = trainer(accumulate_grad_batches=asked, max_epochs=1)
    data = make(write(6), batch_size=batch_size)
    module = Actor()
    one.fit(module, datamodule=data)
    assert data.plan.micro_batches == set_to
    assert one.global_step == 3
    assert one.accumulate_grad_batches == asked  # other data may want another
    assert len(module.seen) == 3 * set_to


def test_too_few_micro_batches_are_refused(write, trainer):
    with pytest.raises(UserError, match=r"needs 4 micro-batches.*accumulate_grad_batches is 2"):
        trainer(accumulate_grad_batches=2).fit(Actor(), datamodule=make(write(6)))


@pytest.mark.parametrize(
    ("most_tokens", "set_to"), [(1000, 1), (4 * 25, 1), (4 * 25 - 1, 2), (2 * 25, 2), (25, 4)]
)
def test_tokens_say_how_many_micro_batches_make_a_step(write, trainer, most_tokens, set_to):
    """Four completions, each of at most 25 tokens with its prompt, padded."""
    one = trainer(max_epochs=1)
    data = make(write(6), batch_size=1, max_tokens_per_batch=most_tokens)
    module = Actor()
    module.sampling = SimpleNamespace(max_new_tokens=25 - longest_prompt(data))
    one.fit(module, datamodule=data)
    assert data.plan.micro_batches == set_to
    assert one.global_step == 3
    assert one.accumulate_grad_batches == 1
    assert len(module.seen) == 3 * set_to


def longest_prompt(data):
    data.setup()
    return max(len(prompt.ids) for prompt in data.train_rows.prompts)


def test_a_completion_that_may_be_too_long_is_warned_of(write, trainer):
    data = make(write(6), max_tokens_per_batch=20)
    module = Actor()
    module.sampling = SimpleNamespace(max_new_tokens=30)
    with pytest.warns(match=r"may have \d+ \+ 30 tokens, more than the 20 of data.max_tokens"):
        trainer(max_epochs=1).fit(module, datamodule=data)
    assert data.plan.micro_batches == 4


def test_a_schedule_of_accumulation_is_refused(write, trainer):
    schedule = GradientAccumulationScheduler({0: 2})
    with pytest.raises(UserError, match=r"GradientAccumulationScheduler changes.*leave it out"):
        trainer(callbacks=[schedule]).fit(Actor(), datamodule=make(write(6)))


def test_completions_are_written_as_they_are_needed(write, fit):
    """Not a rollout more than the steps that were made."""
    module = fit(make(write(20)), max_steps=3, max_epochs=-1)
    assert [len(drawn) for drawn in module.rollouts] == [2, 2, 2]
    assert sorted(chain(*module.seen)) == [(g, n) for g in range(6) for n in range(2)]


@pytest.mark.parametrize("counts_steps", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"steps_per_rollout": 2, "num_iterations": 2}])
@pytest.mark.parametrize("limit", [1.0, 10])
def test_a_run_resumed_from_anywhere_equals_the_uninterrupted_one(
    write, fit, saved, counts_steps, sizes, limit
):
    path = write(7)
    options = {"counts_steps": counts_steps, "limit_train_batches": limit}
    whole = fit(make(path, **sizes), callbacks=[saved], **options)
    ends = [f"{n}" for n in range(1, len(whole.seen) + 1)]
    epoch = len(whole.seen) // 2
    for at in [*ends[:-1:3], ends[epoch - 1], f"{epoch}-end"]:
        resumed = fit(make(path, **sizes), ckpt_path=saved.path(at), **options)
        batches = int(at.split("-")[0])
        assert resumed.seen == whole.seen[batches:], at
        # Inside of a window, gradients are not in the checkpoint.
        if batches % epoch % 4 == 0:
            assert torch.equal(resumed.weight, whole.weight), at


def test_a_batch_size_that_does_not_fit_the_checkpoint_is_refused(write, fit, saved):
    path = write(12)
    fit(make(path), callbacks=[saved], max_epochs=1)
    with pytest.raises(UserError, match="cannot resume with 2 micro-batches"):
        fit(make(path, batch_size=2), ckpt_path=saved.path(6))


def test_a_loader_made_before_its_checkpoint_is_read_goes_on_too(write, fit, saved):
    """As under strategies that shard: they read the checkpoint after making the optimizer."""
    data = make(write(8))
    whole = fit(data, callbacks=[saved], max_epochs=1)
    state = torch.load(saved.path(8), weights_only=True)["RolloutDataModule"]

    class ReadsLate(L.Callback):
        def on_fit_start(self, trainer, module):
            trainer.datamodule.load_state_dict(state)

    resumed = fit(data, max_epochs=1, counts_steps=True, callbacks=[ReadsLate()])
    assert resumed.seen == whole.seen[8:]


def test_a_new_fit_begins_at_the_beginning(write, fit):
    data = make(write(8))
    first = fit(data, max_steps=1, max_epochs=-1)
    assert fit(data, max_epochs=1).seen[:4] == first.seen


def test_loaders_asked_for_anew_each_epoch_go_on(write, fit):
    path = write(7)
    sizes = {"steps_per_rollout": 2, "num_iterations": 2}
    usual = fit(make(path, **sizes), limit_train_batches=12)
    again = fit(make(path, **sizes), limit_train_batches=12, reload_dataloaders_every_n_epochs=1)
    assert again.seen == usual.seen
    assert again.rollouts == usual.rollouts


def test_validating_a_checkpoint_does_not_move_a_later_fit(write, fit, trainer, saved):
    data = make(write(8), val_split=0.25)
    fit(data, callbacks=[saved], max_epochs=1)
    one = trainer(max_epochs=1, limit_val_batches=1.0)
    one.validate(Actor(), datamodule=data, ckpt_path=saved.path(4), verbose=False)
    module = Actor()
    one.fit(module, datamodule=data)
    assert len(module.seen) == 12


def test_validation_sees_every_prompt_once_each_time(write, fit):
    data = make(write(4), val_path=write(5, "val.jsonl"), val_batch_size=2)
    module = fit(data, limit_val_batches=1.0)
    assert module.val_rows == list(range(5)) * 2


def test_no_validation_is_no_cause_for_a_warning(write, fit):
    fit(make(write(4)), limit_val_batches=1.0, max_epochs=1)


def test_checkpoints_hold_plain_values(write, fit, saved):
    fit(make(write(4)), callbacks=[saved], max_epochs=1)
    state = torch.load(saved.path(1), weights_only=True)["RolloutDataModule"]["loader"]
    assert state["stream"]["drawn"] == 2
    assert state["epoch_done"] == 1
    assert state["rollout"]["samples"]["group"].tolist() == [0, 0, 1, 1]


def test_other_prompts_on_resume_are_refused(write, fit, saved):
    fit(make(write(4)), callbacks=[saved], max_epochs=1)
    with pytest.raises(UserError, match=r"cannot resume.*rows=4 in the prompts, not 5"):
        fit(make(write(5)), ckpt_path=saved.path(3))
