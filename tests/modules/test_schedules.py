import pytest
import torch

from lit_align.errors import UserError
from lit_align.modules.schedules import constant, cosine, linear


def rates(schedule, steps, **options):
    """The learning rate of each step, as a share of the highest."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, total_steps=steps, **options)
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_linear_rises_and_falls_in_lines():
    # Two of ten steps rise; the other eight fall by an eighth each, to 0 after the last.
    falling = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates(linear, 10, warmup=0.2) == pytest.approx([0, 0.5, *falling])


def test_constant_stays_where_it_arrived():
    assert rates(constant, 5, warmup=0.4) == pytest.approx([0, 0.5, 1, 1, 1])


def test_cosine_is_at_half_height_half_way():
    values = rates(cosine, 12, warmup=1 / 6)
    assert values[:3] == pytest.approx([0, 0.5, 1])
    # Ten steps after the warm-up, of which five have passed.
    assert values[7] == pytest.approx(0.5)


def test_warmup_is_rounded_up():
    # As transformers and TRL do it: ceil(0.1 * 11) = 2.
    assert rates(linear, 11, warmup=0.1)[1] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", [constant, linear, cosine])
@pytest.mark.parametrize("warmup", [-0.1, 1.0, 100])
def test_warmup_is_a_share(schedule, warmup):
    with pytest.raises(UserError, match=r"share of the steps"):
        rates(schedule, 10, warmup=warmup)


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_a_schedule_with_an_end_refuses_endless_training(schedule):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        schedule(optimizer, total_steps=float("inf"))
    assert constant(optimizer, total_steps=float("inf")).get_last_lr() == [1.0]
