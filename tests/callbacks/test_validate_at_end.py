"""When Lightning validates."""

import pytest
from lightning import Callback

from lit_align.callbacks import ValidateAtEnd


class Validations(Callback):
    """After how many steps there was a validation."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


# Seven pairs make four micro-batches of two.
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"steps": 3}, [3]),
        ({"steps": 6}, [4, 6]),
        ({"steps": 4}, [4]),
        ({"steps": 8}, [4, 8]),
        ({"steps": 5, "val_check_interval": 2}, [2, 4, 5]),
        ({"steps": 3, "accumulate_grad_batches": 2}, [2, 3]),
        ({"steps": -1, "max_epochs": 2}, [4, 8]),
    ],
    ids=str,
)
def test_there_is_one_validation_at_the_end_wherever_that_is(run, tools, tmp_path, options, steps):
    val = tools.write_pairs(tmp_path / "val.jsonl", [tools.pair(8)])
    seen = Validations()
    run(loss="simpo", data_options={"val_path": val}, callbacks=[ValidateAtEnd(), seen], **options)
    assert seen.steps == steps
