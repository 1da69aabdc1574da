import pytest
import torch
from torch.testing import assert_close

from lit_align.logprobs import eval_mode
from lit_align.rollout import Sampling
from lit_align.rollout import shared as shared_module
from lit_align.rollout.cached import start_cached
from lit_align.rollout.decoding import Place, Prompt, decode
from lit_align.rollout.forward import Forward
from lit_align.rollout.shared import Prompts, Seats, States, attention

SHARING = ["gpt2", "llama", "qwen2"]
PROMPTS = [
    Prompt([9, 10, 11, 12, 13, 14], [Place(0, n, n) for n in range(5)], 20),
    Prompt([5, 6, 7], [Place(1, n, 10 + n) for n in range(2)], 20),
    Prompt([8], [Place(2, n, 20 + n) for n in range(4)], 7),
]
STOPPING = Sampling(20, stop_token_ids=(2, 30, 31, 32, 33, 34, 35))


def decoded(policy, start, sampling, at_once=64):
    with torch.no_grad(), eval_mode(policy):
        found = list(decode(Forward(policy), PROMPTS, start, sampling, at_once))
    return [completion.ids for _, completion in found], torch.tensor(
        [value for _, completion in found for value in completion.logprobs]
    )


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize("family", SHARING)
def test_sharing_changes_no_completion(sharing_policy, family, temperature):
    policy = sharing_policy(family)
    sampling = Sampling(20, temperature=temperature, stop_token_ids=STOPPING.stop_token_ids)
    ids, logprobs = decoded(policy, Prompts, sampling)
    right, values = decoded(policy, start_cached, sampling)
    assert ids == right
    assert len(set(map(len, ids))) > 1, "rows did not leave one by one"
    assert_close(logprobs, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("growth", [1, 3])
def test_rows_outgrow_the_room_they_were_given(sharing_policy, monkeypatch, growth):
    policy = sharing_policy("llama")
    right = decoded(policy, Prompts, STOPPING)[0]
    monkeypatch.setattr(shared_module, "GROWTH", growth)
    assert decoded(policy, Prompts, STOPPING)[0] == right
    assert max(map(len, right)) > growth


def test_completions_that_take_turns_start_from_the_same_prompt(sharing_policy):
    policy = sharing_policy("llama")
    together, apart = (decoded(policy, Prompts, STOPPING, at_once)[0] for at_once in (64, 3))
    assert apart == together


def test_a_prompt_is_held_once_and_goes_with_its_last_completion(sharing_policy):
    policy = sharing_policy("llama")
    with torch.no_grad(), eval_mode(policy):
        prompts = Prompts(Forward(policy), [prompt.ids for prompt in PROMPTS])
        rows = prompts.rows(torch.tensor([0, 0, 0, 1, 2, 2]))
        assert [states.keys.shape for states in rows._prompts.values()] == [(2, 3, 6, 8)] * 2
        rows = rows.rows(torch.tensor([3, 5]))
        # Of the two that are left the longer one has three tokens.
        assert [states.keys.shape for states in rows._prompts.values()] == [(2, 2, 3, 8)] * 2


def test_mixed_precision_stays_as_near_to_float32_as_the_other_way(sharing_policy):
    """Greedy tokens of which the first to differ is the last that is compared."""
    policy = sharing_policy("llama")
    greedy = Sampling(20, temperature=0)
    exact_ids, exact = decoded(policy, Prompts, greedy)
    distances = {}
    for start in (Prompts, start_cached):
        with torch.autocast("cpu", torch.bfloat16):
            ids, found = decoded(policy, start, greedy)
        alike = torch.tensor(
            [
                all(pair[0] == pair[1] for pair in zip(one[:n], other[:n], strict=True))
                for one, other in zip(ids, exact_ids, strict=True)
                for n in range(len(one))
            ]
        )
        assert found.dtype == torch.float32
        assert alike.float().mean() > 0.5
        distances[start] = (found - exact)[alike].abs().mean()
    assert 0 < distances[Prompts] < 1.5 * distances[start_cached]


def test_attention_is_one_softmax_over_prompt_and_own_tokens():
    """Against the definition, row by row, with prompts and seats of which some are void."""
    torch.manual_seed(0)
    kv_heads, group, width, own_tokens = 2, 3, 4, 5
    lengths, owners = [6, 2], torch.tensor([0, 0, 0, 1])
    seats = Seats(owners, torch.device("cpu"))
    draw = {"dtype": torch.float64}
    prompts = States(*(torch.randn(kv_heads, 2, 6, width, **draw) for _ in range(2)))
    own = States(*(torch.randn(kv_heads, 4, own_tokens, width, **draw) for _ in range(2)))
    query = torch.randn(4, kv_heads, group, width, **draw)
    bias = torch.zeros(2, 1, 6, **draw)
    bias[1, :, 2:] = -torch.inf
    seated = States(*(seats.seat(states.transpose(0, 1)).transpose(0, 1) for states in own))
    found = attention(seats.seat(query).transpose(0, 1), prompts, seated, bias)
    found = seats.unseat(found.transpose(0, 1))
    for row, owner in enumerate(owners.tolist()):
        for head in range(kv_heads):
            keys, values = (
                torch.cat([a[head, owner, : lengths[owner]], b[head, row]])
                for a, b in zip(prompts, own, strict=True)
            )
            right = (query[row, head] @ keys.T).softmax(-1) @ values
            # The softmax is of float32.
            assert_close(found[row, head], right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("owners", [[0], [0, 0, 1, 1], [0, 2, 2, 2, 3], [1, 1, 1, 4]])
def test_every_row_has_a_seat_with_its_prompt(owners):
    rows = torch.tensor(owners)
    seats = Seats(rows, torch.device("cpu"))
    names = torch.arange(len(owners)) + 100
    assert seats.unseat(seats.seat(names)).tolist() == names.tolist()
    table = seats.seat(rows).view(len(seats.prompts), -1)
    assert (table == seats.prompts.unsqueeze(-1)).all()
    assert seats.prompts.tolist() == sorted(set(owners))
