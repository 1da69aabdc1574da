"""The data module inside real Trainers: windows, resume, validation."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from small_tokenizers import char_level

from lit_align.errors import UserError


class Recorder(L.LightningModule):
    """One weight, moved by every row that counts; keeps what it was given."""

    def __init__(self, *, counts_steps=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tokenizer = char_level()
        self.counts_steps = counts_steps
        self.batches = []
        self.val_rows = []
        self.pending = 0
        self.windows = []

    def training_step(self, batch):
        real = batch["index"][batch["pair_mask"]]
        self.batches.append((self.current_epoch, real.tolist()))
        self.pending += len(real)
        self.stamped = batch["window_pairs"].item()
        return (self.weight * (real + 1)).sum() / batch["window_pairs"]

    def validation_step(self, batch):
        self.val_rows += batch["index"][batch["pair_mask"]].tolist()

    def on_train_batch_end(self, *_):
        if self.trainer.global_step > len(self.windows):
            self.windows.append((self.pending, self.stamped))
            self.pending = 0

    def configure_optimizers(self):
        if self.counts_steps:
            # Makes the training loader long before a checkpoint's loops are restored.
            assert self.trainer.estimated_stepping_batches
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Checkpoints(L.Callback):
    """Saves after every micro-batch and at the end of every epoch."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, batches, end=""):
        return self.folder / f"{batches}{end}.ckpt"

    def on_train_batch_end(self, trainer, module, *_):
        trainer.save_checkpoint(self.path(len(module.batches)))

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path(len(module.batches), "-end"))


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
            **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
        )

    return made


@pytest.fixture
def fit(trainer):
    def fitted(data, ckpt_path=None, *, counts_steps=False, **options):
        module = Recorder(counts_steps=counts_steps)
        trainer(**options).fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    return fitted


@pytest.fixture
def saved(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("limit", [1.0, 7, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_windows_are_those_of_lightning(accumulate, limit, write, make, fit):
    options = {"accumulate_grad_batches": accumulate, "limit_train_batches": limit}
    module = fit(make(write(range(17)), batch_size=2), **options)
    batches = {1.0: 9, 7: 7, 0.5: 4}[limit]
    assert len(module.batches) == 3 * batches
    assert len(module.windows) == 3 * -(-batches // accumulate)
    assert all(held == stamped for held, stamped in module.windows)


def test_windows_follow_a_schedule_of_accumulation(write, make, fit):
    schedule = GradientAccumulationScheduler({0: 2, 1: 5})
    module = fit(make(write(range(12)), batch_size=1), callbacks=[schedule])
    assert module.windows == [(2, 2)] * 6 + [(5, 5), (5, 5), (2, 2)] * 2


@pytest.mark.parametrize("counts_steps", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_from_anywhere_equals_the_uninterrupted_one(
    counts_steps, workers, write, make, fit, saved
):
    path = write(range(10))
    options = {"accumulate_grad_batches": 4, "counts_steps": counts_steps, "max_epochs": 2}

    def data():
        return make(path, batch_size=1, num_workers=workers, val_split=0.1)

    whole = fit(data(), callbacks=[saved], **options)
    assert sorted(row for epoch, [row] in whole.batches if epoch == 1) == list(range(9))
    # Nine rows are windows of 4, 4 and 1, twice; inside one, gradients are not in the checkpoint.
    for batches, end in ((4, ""), (6, ""), (8, ""), (9, ""), (9, "-end"), (13, ""), (15, "")):
        resumed = fit(data(), ckpt_path=saved.path(batches, end), **options)
        assert resumed.batches == whole.batches[batches:], (batches, end)
        assert (batches in (6, 15)) != torch.equal(resumed.weight, whole.weight), (batches, end)


class Steps(L.Callback):
    """The rows of each optimizer step."""

    def __init__(self):
        self.rows = []
        self._taken = 0

    def on_before_optimizer_step(self, trainer, module, optimizer):
        batches = module.batches[self._taken :]
        self.rows.append([row for _, rows in batches for row in rows])
        self._taken = len(module.batches)


@pytest.mark.parametrize("end", ["", "-end"])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_after_an_epoch_a_run_goes_on_cut_otherwise(
    batch_size, accumulate, end, write, make, fit, saved
):
    path, steps, expected = write(range(8)), Steps(), Steps()
    fit(make(path, batch_size=1), callbacks=[saved, expected], accumulate_grad_batches=4)
    options = {"accumulate_grad_batches": accumulate, "callbacks": [steps]}
    data = make(path, batch_size=batch_size)
    resumed = fit(data, ckpt_path=saved.path(8, end), **options)
    assert {epoch for epoch, _ in resumed.batches} == {1, 2}
    assert steps.rows == expected.rows[2:]


def test_a_loader_made_before_its_checkpoint_is_read_goes_on_too(write, make, fit):
    """As under strategies that shard: they read the checkpoint after making the optimizer."""

    class ReadsLate(L.Callback):
        def on_fit_start(self, trainer, module):
            state = {"epoch": 0, "rows_seen": 3, "rows": 5, "seed": 0, "shuffle": 1}
            trainer.datamodule.load_state_dict({"loader": state})

    data = make(write(range(5)), batch_size=1)
    whole = fit(data, max_epochs=1)
    resumed = fit(data, max_epochs=1, counts_steps=True, callbacks=[ReadsLate()])
    assert resumed.batches == whole.batches[3:]


def test_a_new_fit_begins_at_the_beginning(write, make, fit):
    data = make(write(range(5)), batch_size=1)
    first = fit(data, max_steps=3, max_epochs=-1)
    assert fit(data, max_epochs=1).batches[:3] == first.batches


def test_validating_a_checkpoint_does_not_move_a_later_fit(write, make, fit, trainer, saved):
    data = make(write(range(6)), batch_size=1, val_split=0.2)
    fit(data, callbacks=[saved], max_epochs=1)
    one = trainer(max_epochs=1)
    one.validate(Recorder(), datamodule=data, ckpt_path=saved.path(2))
    module = Recorder()
    one.fit(module, datamodule=data)
    assert len(module.batches) == 5


def test_loaders_made_anew_each_epoch_go_on_in_the_order(write, make, fit):
    path = write(range(8))
    usual = fit(make(path))
    assert len({tuple(rows) for _, rows in usual.batches}) == 3
    assert fit(make(path), reload_dataloaders_every_n_epochs=1).batches == usual.batches


def test_validation_sees_every_row_once_each_time(write, make, fit):
    data = make(write(range(5)), val_path=write(range(7), "val.jsonl"), val_batch_size=3)
    module = fit(data, num_sanity_val_steps=1, max_epochs=2)
    assert module.val_rows == [5, 6, 7] + list(range(5, 12)) * 2


def test_overfitting_repeats_the_same_batches(write, make, fit):
    module = fit(make(write(range(9)), batch_size=2), overfit_batches=2)
    assert [rows for _, rows in module.batches] == [[0, 1], [2, 3]] * 3


def test_the_tokenizer_of_the_module_is_taken(write, make, fit):
    module = fit(make(write(range(4)), tokenizer=None, batch_size=4), max_epochs=1)
    assert sorted(module.batches[0][1]) == [0, 1, 2, 3]


def test_checkpoints_hold_plain_values(write, make, fit, saved):
    fit(make(write(range(4)), batch_size=1), callbacks=[saved], max_epochs=1)
    state = torch.load(saved.path(3), weights_only=True)["PreferenceDataModule"]["loader"]
    position = {"epoch": 0, "rows_seen": 3, "rows": 4, "seed": 0, "shuffle": 1}
    assert state == position | {"rows_at_once": 1, "accumulate": 1}


def test_other_data_on_resume_is_refused(write, make, fit, saved):
    fit(make(write(range(4)), batch_size=1), callbacks=[saved], max_epochs=1)
    with pytest.raises(UserError, match=r"cannot resume.*rows=4 in the data, not 5"):
        fit(make(write(range(5)), batch_size=1), ckpt_path=saved.path(3))
