"""Completions without a model that wrote them."""

from lit_align.rollout import Drawn, Sample


def sample(group, number=0, *, prompt=(1, 2), completion=(3,), **fields):
    """One that ended by itself."""
    fields = {"row": group, "finish_reason": "stop", **fields}
    return Sample(
        group=group,
        number=number,
        prompt_ids=list(prompt),
        completion_ids=list(completion),
        **fields,
    )


def rewarded(group, rewards):
    """A group of completions with these rewards."""
    return [sample(group, number, reward=reward) for number, reward in enumerate(rewards)]


class Prompts:
    """Prompts that are their numbers."""

    def __init__(self, count, fingerprint="these"):
        self.count = count
        self.fingerprint = fingerprint

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return row


def drawn(rows):
    return [Drawn(group, 0, row) for group, row in enumerate(rows)]
