from __future__ import annotations

from dataclasses import replace

import pytest

from rlft.generation.scripted import ScriptedGenerator
from rlft.types import Adapter, FinishReason, Sampling, UserError

LONG = Sampling(max_tokens=100, temperature=1.0)


@pytest.fixture
def generator(backbone):
    return ScriptedGenerator({"1+1=?": ["two", "it is {answer}"], "*": ["no idea"]}, backbone.tokenizer)


@pytest.fixture
def said(generator, make_prompt):
    """The only completion of a prompt with two texts, by its seed."""
    prompts = [make_prompt("1+1=?", "2")]
    return lambda seed, sampling: generator.sample(prompts, 1, [seed], sampling)[0].rollouts[0].completion


def test_completion_i_says_the_text_of_seed_plus_i(generator, make_prompt):
    (group,) = generator.sample([make_prompt("1+1=?", "2")], 3, [5], LONG)
    assert [r.completion.text for r in group.rollouts] == ["it is 2", "two", "it is 2"]


def test_prompts_without_answers_of_their_own_get_those_of_the_star(generator, make_prompt):
    groups = generator.sample([make_prompt("9+9=?"), make_prompt("1+1=?", "2")], 1, [0, 0], LONG)
    assert [g.rollouts[0].completion.text for g in groups] == ["no idea", "two"]


def test_a_prompt_without_answers_is_refused_by_its_id(backbone, make_prompt):
    generator = ScriptedGenerator({"1+1=?": ["two"]}, backbone.tokenizer)
    with pytest.raises(UserError, match=r"^generation\.scripted\.answers: .*, got 9\+9=\?; add"):
        generator.sample([make_prompt("9+9=?")], 1, [0], LONG)


def test_token_ids_are_those_of_the_text_and_the_end_token(said, backbone):
    completion = said(0, LONG)
    tokenizer = backbone.tokenizer
    assert completion.token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion.token_ids, skip_special_tokens=True) == "two"
    assert completion.finish_reason is FinishReason.stop
    assert completion.logprobs == (0.0,) * len(completion.token_ids)


def test_a_text_over_the_limit_is_cut_in_tokens_and_in_text(said, backbone):
    tokens = len(backbone.tokenizer("two", add_special_tokens=False)["input_ids"])
    for limit, text, reason in ((tokens + 1, "two", "stop"), (tokens, "two", "length"), (tokens - 1, "tw", "length")):
        sampling = Sampling(max_tokens=limit, temperature=1.0)
        completion = said(0, sampling)
        assert (completion.text, completion.finish_reason) == (text, reason)
        assert len(completion.token_ids) == len(completion.logprobs) == limit


def test_rollouts_carry_the_version_that_was_loaded(generator, make_prompt):
    prompts = [make_prompt("1+1=?", "2")]
    assert generator.sample(prompts, 1, [0], LONG)[0].rollouts[0].policy_version is None
    generator.load(Adapter(version=7, weights={}, config={}))
    assert generator.sample(prompts, 1, [0], LONG)[0].rollouts[0].policy_version == 7


def test_it_has_no_weights_that_could_be_stale(generator):
    assert generator.score([[1, 2, 3]]) == []
    generator.close()
    generator.close()


def test_a_stop_string_ends_it_in_tokens_and_in_text(said, backbone):
    """`it is 2`: the stop is completed by the token with `is`, which stays; the text ends before it."""
    ids = backbone.tokenizer("it is", add_special_tokens=False)["input_ids"]
    for include, text in ((False, "it "), (True, "it is")):
        sampling = replace(LONG, stop=("nowhere", "is"), include_stop_str_in_output=include)
        completion = said(1, sampling)
        assert (completion.text, list(completion.token_ids)) == (text, ids)
        assert completion.finish_reason is FinishReason.stop
        assert len(completion.logprobs) == len(ids)


def test_a_stop_token_ends_it_and_is_not_in_the_text(said, backbone):
    ids = backbone.tokenizer("it is", add_special_tokens=False)["input_ids"]
    for include, text in ((False, backbone.tokenizer.decode(ids[:-1])), (True, "it is")):
        sampling = replace(LONG, stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
        completion = said(1, sampling)
        assert list(completion.token_ids) == ids[: ids.index(ids[-1]) + 1] == ids
        assert (completion.text, completion.finish_reason) == (text, FinishReason.stop)


def test_the_limit_counts_where_the_stop_comes_after_it(said, backbone):
    ids = backbone.tokenizer("it is", add_special_tokens=False)["input_ids"]
    sampling = replace(LONG, stop=("is",), max_tokens=len(ids) - 1)
    completion = said(1, sampling)
    assert list(completion.token_ids) == ids[:-1]
    assert completion.finish_reason is FinishReason.length
