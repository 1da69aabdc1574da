import pytest
import torch
from frequencies import agree

from lit_align.errors import UserError
from lit_align.logprobs import response_logprobs
from lit_align.rollout import Request, Sampling
from lit_align.rollout.forward import Forward
from lit_align.rollout.sharing import sharing

FAMILIES = ["gpt2", "llama", "qwen2", "mistral", "gemma2", "lfm2"]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21]]
# Many, so that random models stop here and there.
STOPS = (2, 30, 31, 32, 33, 34, 35)


def generated(policy, prompts, stops, max_new_tokens):
    """Greedy answers of transformers' own generate, each up to its first stop."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answers = policy.eval().generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=0,
    )
    answers = [answer[width:].tolist() for answer in answers]
    ends = [next((n for n, i in enumerate(a, 1) if i in stops), len(a)) for a in answers]
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_are_those_of_transformers(build, engine, requests_for, family):
    policy = build(family)
    sampling = Sampling(max_new_tokens=12, temperature=0, stop_token_ids=STOPS)
    found = engine(policy).generate(requests_for(PROMPTS), sampling)
    right = generated(policy, PROMPTS, STOPS, 12)
    assert [completion.ids for [completion] in found] == right
    assert len(set(map(len, right))) > 1, "all of one length: nothing left the batch"


def test_greedy_completions_of_the_bundled_model_are_those_of_transformers(
    tiny, engine, requests_for
):
    policy, tokenizer, prompts = tiny
    stops = (tokenizer.eos_token_id,)
    sampling = Sampling(max_new_tokens=8, temperature=0, stop_token_ids=stops)
    found = engine(policy).generate(requests_for(prompts), sampling)
    right = generated(policy, prompts, stops, 8)
    assert [completion.ids for [completion] in found] == right
    assert {completion.finish_reason for [completion] in found} == {"stop"}


def rescored(policy, requests, found, temperature=1.0):
    """Log-probs of the completions by the trainer's own path, one row at a time."""
    values = []
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            ids = torch.tensor([request.prompt_ids + completion.ids])
            labels = ids.clone()
            labels[:, : len(request.prompt_ids)] = -100
            with torch.no_grad():
                scored = response_logprobs(
                    policy.eval(), ids, torch.ones_like(ids), labels, temperature=temperature
                )
            values.append(scored.logprobs[scored.mask])
    return torch.cat(values)


def reported(found):
    return torch.tensor([value for group in found for one in group for value in one.logprobs])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_trainers(build, engine, requests_for, family, temperature):
    policy, requests = build(family), requests_for(PROMPTS, [3, 1, 4, 2, 5])
    sampling = Sampling(max_new_tokens=12, temperature=temperature, stop_token_ids=STOPS)
    found = engine(policy).generate(requests, sampling)
    right = rescored(policy, requests, found, temperature)
    assert (reported(found) - right).abs().max() < 1e-5
    lengths = {len(completion.ids) for group in found for completion in group}
    assert len(lengths) > 3, "nothing left the batch in between"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_does_not_depend_on_what_else_is_decoded(build, engine, requests_for, family):
    policy, requests = build(family), requests_for(PROMPTS, [3, 1, 4, 2, 5])
    sampling = Sampling(max_new_tokens=10, stop_token_ids=STOPS)
    together = engine(policy).generate(requests, sampling)
    alone = [
        [
            engine(policy).generate([Request(prompt, [sample], [seed])], sampling)[0][0].ids
            for sample, seed in zip(samples, seeds, strict=True)
        ]
        for prompt, samples, seeds in requests
    ]
    assert [[completion.ids for completion in group] for group in together] == alone
    reversed_order = engine(policy, batch_size=3).generate(requests[::-1], sampling)[::-1]
    assert [[completion.ids for completion in group] for group in reversed_order] == alone


def test_equal_seeds_agree_and_others_do_not(build, engine):
    policy = build("llama")
    [twins] = engine(policy).generate([Request([5, 6], [0, 1, 2], [3, 3, 4])], Sampling(8))
    assert twins[0] == twins[1]
    assert twins[0].ids != twins[2].ids


def test_a_shorter_bound_gives_the_beginning_of_the_same_completion(build, engine, requests_for):
    policy, requests = build("gpt2"), requests_for(PROMPTS)
    long, short = (engine(policy).generate(requests, Sampling(count)) for count in (9, 4))
    assert [a.ids for [a] in short] == [b.ids[:4] for [b] in long]


def test_first_tokens_come_as_often_as_the_policy_says(build, engine):
    policy, draws = build("gpt2"), 4000
    request = Request([5, 6, 7], list(range(draws)), list(range(draws)))
    [found] = engine(policy, batch_size=1000).generate([request], Sampling(1, temperature=3.0))
    counts = torch.tensor([one.ids[0] for one in found]).bincount(minlength=61).double()
    with torch.no_grad():
        logits = policy.eval()(torch.tensor([[5, 6, 7]])).logits[0, -1].double()
    probs = (logits / 3).softmax(-1)
    assert probs.min() * draws > 5, "too rare to be counted"
    assert agree(counts, probs)
    assert not agree(counts, (logits / 2.5).softmax(-1))


def passes(policy):
    """The shapes of the ids of every pass from here on, in a list that grows."""
    # A model is tried out once.
    sharing(policy, Forward(policy))
    shapes = []
    policy.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: shapes.append(tuple(inputs[0].shape))
    )
    return shapes


def test_only_the_last_position_is_projected(build, engine, requests_for):
    policy, shapes = build("llama"), []
    sharing(policy, Forward(policy))
    policy.lm_head.register_forward_hook(lambda *found: shapes.append(found[-1].shape))
    engine(policy).generate(requests_for(PROMPTS, 2), Sampling(3))
    assert shapes == [(1, 5, 61), (10, 1, 61), (10, 1, 61)]


@pytest.mark.parametrize(("family", "prompts_run"), [("llama", (1, 6)), ("gemma2", (2, 3))])
def test_each_distinct_prompt_is_run_once(build, engine, family, prompts_run):
    policy = build(family)
    shapes = passes(policy)
    prompts = [[5, 6, 7], [8, 9, 10], [5, 6, 7]]
    requests = [Request(prompt, [0, 1, 2, 3], [1, 2, 3, 4]) for prompt in prompts]
    found = engine(policy).generate(requests, Sampling(5))
    # Two prompts of three tokens, in one sequence if they can be, then twelve rows of one token,
    # four times: the fifth token of a completion is drawn and not run.
    assert shapes == [prompts_run] + [(12, 1)] * 4
    assert found[0] == found[2]


def test_a_prompt_is_run_once_even_if_its_completions_do_not_fit_in_one_batch(build, engine):
    policy = build("llama")
    shapes = passes(policy)
    request = Request([5, 6, 7], list(range(5)), list(range(5)))
    [found] = engine(policy, batch_size=2).generate([request], Sampling(3))
    assert shapes == [(1, 3)] + [(2, 1)] * 4 + [(1, 1)] * 2
    [right] = engine(policy).generate([request], Sampling(3))
    assert [one.ids for one in found] == [one.ids for one in right]


def test_no_batch_holds_more_completions_than_allowed(build, engine, requests_for):
    policy = build("llama")
    shapes = passes(policy)
    engine(policy, batch_size=4).generate(requests_for(PROMPTS, [3, 1, 4, 2, 1]), Sampling(3))
    # Longest prompt first: 4 completions; then 2; then 3 and 1; then 1. Each batch is its prompts
    # and two passes for three tokens.
    batches = [[(1, 6), (4, 1)], [(1, 4), (2, 1)], [(1, 6), (4, 1)], [(1, 1), (1, 1)]]
    assert shapes == [shape for prompts, step in batches for shape in (prompts, step, step)]


def test_finished_rows_leave_the_batch(build, engine):
    policy = build("gpt2")
    shapes = passes(policy)
    request = Request([5, 6, 7], list(range(64)), list(range(64)))
    [found] = engine(policy).generate([request], Sampling(20, stop_token_ids=STOPS))
    lengths = [len(one.ids) for one in found]
    assert len(set(lengths)) > 5
    rows = [rows for rows, _ in shapes[1:]]
    for step, decoded in enumerate(rows, 1):
        going = sum(length > step for length in lengths)
        # Fewer than one row in eight is carried along.
        assert going <= decoded < going * 8 / 7
    assert rows[-1] < 16
    assert len(rows) == max(lengths) - 1


def test_a_completion_says_why_it_ended(build, engine, requests_for):
    sampling = Sampling(12, stop_token_ids=STOPS)
    found = engine(build("gpt2")).generate(requests_for(PROMPTS, 4), sampling)
    reasons = set()
    for completion in (one for group in found for one in group):
        *before, last = completion.ids
        assert not set(before) & set(STOPS)
        stopped = last in STOPS
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.ids) == 12
        assert len(completion.logprobs) == len(completion.ids)
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_where_the_context_does(build, engine, family):
    """The rows around it go on, and what they say stays right."""
    policy = build(family)
    requests = [
        Request([5 + n % 50 for n in range(length)], list(range(count)), list(range(count)))
        for length, count in ((29, 1), (31, 1), (4, 12))
    ]
    found = engine(policy).generate(requests, Sampling(10))
    lengths = [[len(one.ids) for one in group] for group in found]
    assert lengths == [[3], [1], [10] * 12]
    assert {one.finish_reason for group in found for one in group} == {"length"}
    assert (reported(found) - rescored(policy, requests, found)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [32, 40])
def test_a_prompt_that_fills_the_context_is_refused(build, engine, length):
    requests = [Request([5, 6], [0], [0]), Request([5] * length, [0], [0])]
    with pytest.raises(UserError, match=f"prompt of {length} tokens.* is 32 tokens"):
        engine(build("gpt2")).generate(requests, Sampling())


def test_a_prompt_without_tokens_is_refused(build, engine):
    with pytest.raises(UserError, match="no token"):
        engine(build("gpt2")).generate([Request([], [0], [0])], Sampling())


def test_nothing_asked_is_nothing_answered(build, engine):
    held = engine(build("gpt2"))
    assert held.generate([], Sampling()) == []
    [none, [one]] = held.generate([Request([5], [], []), Request([5], [3], [1])], Sampling(2))
    assert none == []
    assert len(one.ids) == 2


def test_generating_leaves_no_trace(build, engine, requests_for):
    policy = build("gpt2")
    policy.transformer.h[0].eval()
    modes = [module.training for module in policy.modules()]
    state = torch.get_rng_state()
    engine(policy).generate(requests_for(PROMPTS, 2), Sampling(4))
    assert [module.training for module in policy.modules()] == modes
    assert len(set(modes)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_dropout_is_off(build, engine, requests_for):
    policy = build("gpt2")
    assert policy.config.resid_pdrop > 0
    held, requests = engine(policy), requests_for(PROMPTS)
    assert held.generate(requests, Sampling(6)) == held.generate(requests, Sampling(6))


def test_the_policy_of_the_moment_answers(build, engine, requests_for):
    """Weights are bound, not copied."""
    policy, requests = build("llama"), requests_for(PROMPTS, 2)
    held = engine(policy)
    before = held.generate(requests, Sampling(6))
    with torch.no_grad():
        policy.lm_head.weight.mul_(-1)
    after = held.generate(requests, Sampling(6))
    assert after != before
    assert (reported(after) - rescored(policy, requests, after)).abs().max() < 1e-5


def test_gradient_checkpointing_changes_nothing(build, engine, requests_for):
    from lit_align.policies.loading import checkpoint_activations

    policy, requests = build("llama"), requests_for(PROMPTS, 3)
    right = engine(policy).generate(requests, Sampling(6))
    checkpoint_activations(policy)
    shapes = passes(policy)
    assert engine(policy, batch_size=2).generate(requests, Sampling(6)) is not None
    found = engine(policy).generate(requests, Sampling(6))
    assert [[one.ids for one in group] for group in found] == [
        [one.ids for one in group] for group in right
    ]
    assert max(width for rows, width in shapes if rows > 1) == 1, "nothing was remembered"


def test_an_adapter_has_its_say(build, engine, requests_for):
    from peft import LoraConfig, get_peft_model

    policy, requests = build("llama"), requests_for(PROMPTS, 2)
    plain = engine(policy).generate(requests, Sampling(6))
    adapter = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    wrapped = get_peft_model(policy, adapter)
    found = engine(wrapped).generate(requests, Sampling(6))
    assert found != plain
    assert (reported(found) - rescored(wrapped, requests, found)).abs().max() < 1e-5


def test_bfloat16_weights_give_finite_float32_log_probs_near_the_trainers(
    build, engine, requests_for
):
    policy, requests = build("llama", torch.bfloat16), requests_for(PROMPTS, 4)
    found = engine(policy).generate(requests, Sampling(8))
    difference = (reported(found) - rescored(policy, requests, found)).abs()
    assert difference.mean() < 0.05
    values = reported(found)
    assert not torch.equal(values, values.bfloat16().float()), "rounded to bfloat16"


def test_diverged_weights_are_named(build, engine, requests_for):
    policy = build("llama")
    with torch.no_grad():
        policy.lm_head.weight.fill_(float("nan"))
    for temperature in (0, 1.0):
        with pytest.raises(UserError, match="not finite"):
            engine(policy).generate(requests_for(PROMPTS), Sampling(3, temperature=temperature))


def test_a_model_without_a_cache_is_refused(engine, requests_for):
    from transformers import PreTrainedConfig

    class Bare(torch.nn.Module):
        config = PreTrainedConfig()

        def forward(self, input_ids):
            return input_ids

    with pytest.raises(UserError, match="Bare takes no cache"):
        engine(Bare()).generate(requests_for(PROMPTS), Sampling())


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, None])
def test_a_batch_size_below_1_is_refused(engine, batch_size):
    with pytest.raises(UserError, match="batch_size"):
        engine(None, batch_size=batch_size)
