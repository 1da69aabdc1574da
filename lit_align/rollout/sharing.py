"""Whether the completions of a prompt can share its keys and values in a model."""

import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lit_align.logprobs import base_model, eval_mode
from lit_align.logprobs.abilities import abilities
from lit_align.rollout.cached import start_cached
from lit_align.rollout.decoding import Begun, Start
from lit_align.rollout.forward import Forward
from lit_align.rollout.shared import Prompts

# The trial: two prompts, the rows of a batch by their prompt, and who stays after the first step.
PROMPTS = ((5, 6, 7, 8, 9), (7, 5, 3))
OWNERS = (0, 0, 0, 1, 1)
STAY = (1, 4)
LONGEST = max(map(len, PROMPTS)) + 2

log = logging.getLogger(__name__)


class Sharing:
    """What the attention of a model allows.

    Attributes:
        obstacle: why each completion has to keep its prompt's keys and values itself; None: it
            need not.
        window: tokens that the attention of some layer reaches back; None: all reach everything.
    """

    def __init__(self, policy: nn.Module, forward: Forward) -> None:
        self.window: int | None = None
        self.obstacle = abilities(policy).no_packing
        if self.obstacle is None and "logits_to_keep" not in forward.accepts:
            self.obstacle = "it makes the logits of all positions"
        if self.obstacle is None:
            vocabulary: int = base_model(policy).config.get_text_config().vocab_size
            self.obstacle = self._fault(forward, vocabulary)
        if self.obstacle is not None:
            name = type(base_model(policy)).__name__
            log.info("%s holds the prompt of each completion apart: %s", name, self.obstacle)

    def start(self, longest: int) -> Start:
        """How to start rows that become at most `longest` tokens long."""
        reaches = self.window is None or longest <= self.window
        return Prompts if self.obstacle is None and reaches else start_cached

    def _fault(self, forward: Forward, vocabulary: int) -> str | None:
        """What a trial says against sharing."""
        ids = [[token % vocabulary for token in prompt] for prompt in PROMPTS]
        prompts = Prompts(forward, ids)
        self.window = min(prompts.windows, default=None)
        if prompts.unknown:
            return f"its attention goes by {', '.join(sorted(prompts.unknown))}"
        if self.window is not None and self.window < LONGEST:
            return f"its attention reaches back {self.window} tokens"
        begun = (prompts, start_cached(forward, ids))
        found, right = (_trial(each, forward, vocabulary) for each in begun)
        difference = float((found - right).norm() / right.norm())
        # Half the digits: many layers round in many ways. Written so that NaN fails.
        eps = torch.finfo(forward.dtype).eps
        return None if difference <= eps**0.5 else f"its logits differ by {difference:.2g}"


def _trial(prompts: Begun, forward: Forward, vocabulary: int) -> Tensor:
    """The logits on the way from prompts, one row each."""
    batch = prompts.rows(torch.tensor(OWNERS))
    logits = [batch.logits]
    for rows in (range(len(OWNERS)), STAY):
        # Rows of one prompt go ways of their own.
        tokens, none = torch.tensor(rows) % vocabulary, torch.zeros(len(rows), dtype=torch.bool)
        batch = batch.rows(torch.tensor(rows)).step(forward, tokens, none)
        logits.append(batch.logits)
    return torch.cat(logits).float()


_KNOWN: "WeakKeyDictionary[nn.Module, Sharing]" = WeakKeyDictionary()


@torch.no_grad()
def sharing(policy: nn.Module, forward: Forward) -> Sharing:
    """What a model allows, found out once: on all ranks at the same call, for it runs the model."""
    if policy not in _KNOWN:
        with eval_mode(policy), torch.autocast(forward.device.type, enabled=False):
            _KNOWN[policy] = Sharing(policy, forward)
    return _KNOWN[policy]
