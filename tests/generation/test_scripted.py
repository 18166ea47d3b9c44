"""An engine that says what it was given: texts by prompt and seed, limits and stops."""

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


def test_completion_i_says_the_text_of_seed_plus_i_or_of_the_star(generator, make_prompt):
    group, other = generator.sample([make_prompt("1+1=?", "2"), make_prompt("9+9=?")], 3, [5, 0], LONG)
    assert [r.completion.text for r in group.rollouts] == ["it is 2", "two", "it is 2"]
    assert [r.completion.text for r in other.rollouts] == ["no idea"] * 3
    assert generator.score([[1, 2, 3]]) == [], "it has no weights that could be stale"


def test_a_prompt_without_answers_is_refused_by_its_id(backbone, make_prompt):
    generator = ScriptedGenerator({"1+1=?": ["two"]}, backbone.tokenizer)
    with pytest.raises(UserError, match=r"^generation\.scripted\.answers: .*, got 9\+9=\?; add"):
        generator.sample([make_prompt("9+9=?")], 1, [0], LONG)


def test_a_text_over_the_limit_is_cut_in_tokens_and_in_text(said, backbone):
    tokenizer = backbone.tokenizer
    tokens = len(tokenizer("two", add_special_tokens=False)["input_ids"])
    for limit, text, reason in ((tokens + 1, "two", "stop"), (tokens, "two", "length"), (tokens - 1, "tw", "length")):
        completion = said(0, Sampling(max_tokens=limit, temperature=1.0))
        assert (completion.text, completion.finish_reason) == (text, reason)
        assert completion.logprobs == (0.0,) * limit
        assert len(completion.token_ids) == limit
        assert tokenizer.decode(completion.token_ids, skip_special_tokens=True) == text
        assert (completion.token_ids[-1] == tokenizer.eos_token_id) == (reason == "stop")


def test_rollouts_carry_the_version_that_was_loaded(generator, make_prompt):
    prompts = [make_prompt("1+1=?", "2")]
    assert generator.sample(prompts, 1, [0], LONG)[0].rollouts[0].policy_version is None
    generator.load(Adapter(version=7, weights={}, config={}))
    assert generator.sample(prompts, 1, [0], LONG)[0].rollouts[0].policy_version == 7


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_ends_it_in_tokens_and_in_text(include, said, backbone):
    """`it is 2`: a string is completed by the token with `is`, which stays; the text ends before string or token."""
    ids = backbone.tokenizer("it is", add_special_tokens=False)["input_ids"]
    for stops, text in (
        ({"stop": ("nowhere", "is")}, "it "),
        ({"stop_token_ids": (ids[-1],)}, backbone.tokenizer.decode(ids[:-1])),
    ):
        completion = said(1, replace(LONG, include_stop_str_in_output=include, **stops))
        assert (completion.text, list(completion.token_ids)) == ("it is" if include else text, ids)
        assert completion.finish_reason is FinishReason.stop
        assert len(completion.logprobs) == len(ids)
        cut = said(1, replace(LONG, max_tokens=len(ids) - 1, **stops))
        assert (list(cut.token_ids), cut.finish_reason) == (ids[:-1], FinishReason.length)
