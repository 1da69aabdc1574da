from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_align.errors import UserError
from lit_align.rollout import Engine, HuggingFaceEngine, Sampling, sample_seed, stop_token_ids

WHOLE = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", None),
        ("stop_token_ids", 2),
        ("stop_token_ids", "2"),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(option, value):
    with pytest.raises(UserError, match=option):
        Sampling(**{option: value})


def test_a_list_of_stops_from_a_configuration_is_as_good_as_a_tuple():
    assert Sampling(stop_token_ids=[3, 2]) == Sampling(stop_token_ids=(3, 2))
    assert hash(Sampling(stop_token_ids=[3, 2])) == hash(Sampling(stop_token_ids=(3, 2)))


def test_only_sampling_that_can_draw_every_token_is_full():
    assert Sampling(temperature=0.5).is_full
    cutting = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0}]
    assert not any(Sampling(**options).is_full for options in cutting)
    assert [Sampling(**options).is_greedy for options in cutting] == [False, False, False, True]


@given(st.tuples(WHOLE, WHOLE, WHOLE, WHOLE, WHOLE), st.integers(0, 4))
def test_a_seed_is_63_bits_and_changes_with_each_of_its_numbers(numbers, changed):
    other = list(numbers)
    other[changed] += 1
    assert 0 <= sample_seed(*numbers) < 2**63
    assert sample_seed(*numbers) != sample_seed(*other)


def test_a_seed_is_the_same_in_every_process():
    # The first 8 bytes of BLAKE2b of "1,2,3,4,5", big endian, without the lowest bit:
    # printf 1,2,3,4,5 | b2sum -l 64
    assert sample_seed(1, 2, 3, 4, 5) == 0xC4C916EDB2228EC4 >> 1


def test_numbers_that_read_alike_side_by_side_give_different_seeds():
    assert sample_seed(1, 11, 0, 0, 0) != sample_seed(11, 1, 0, 0, 0)
    assert sample_seed(0, 1, 12, 0, 0) != sample_seed(0, 11, 2, 0, 0)


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "expected"),
    [
        ([106, 1], 1, (1, 106)),
        (7, 2, (2, 7)),
        (7, None, (7,)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_stops_are_those_of_the_generation_config_and_of_the_tokenizer(
    build, of_model, of_tokenizer, expected
):
    policy = build("llama")
    policy.generation_config.eos_token_id = of_model
    assert stop_token_ids(policy, SimpleNamespace(eos_token_id=of_tokenizer)) == expected


def test_stops_are_found_inside_an_adapter(build):
    from peft import LoraConfig, get_peft_model

    policy = build("llama")
    policy.generation_config.eos_token_id = [9, 4]
    wrapped = get_peft_model(policy, LoraConfig(target_modules=["q_proj"]))
    assert stop_token_ids(wrapped) == (4, 9)


def test_an_engine_can_be_stored_and_let_go(build):
    engine: Engine = HuggingFaceEngine(batch_size=2)
    assert engine.version is None
    engine.sync_weights(7, build("llama"))
    assert engine.version == 7
    engine.load_state_dict(engine.state_dict())
    engine.close()
    with pytest.raises(RuntimeError, match="sync_weights"):
        engine.generate([], Sampling())
