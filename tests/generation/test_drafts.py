"""Drafts change neither what is sampled nor its log-probs, only the number of passes."""

import random
from dataclasses import replace

import half_model
import pytest
import torch
from given_drafts import GivenDrafts, anything, nothing, right
from in_one_test import each
from reward_groups import group_of
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.drafts import MOST, Drafts, key_of, savings
from rlft.generation.transformers import TransformersGenerator
from rlft.model.kernels.prefix_cache import PrefixCache
from rlft.types import NextTurn, Prompt, Sampling

model_config, backbone = half_model.model_config, half_model.backbone

QUESTIONS = ["12+5=?", "7-3=?", "40+41=?", "99-1=?", "3+3=?"]
SEEDS = [0, 10, 20, 30, 40]


@pytest.fixture
def generator(make_roles, backbone):
    roles = make_roles(noise=0.02)
    made = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 256)
    made.load(roles.publish(1))
    return made


def rows_of(groups):
    return [rollout.completion for group in groups for rollout in group.rollouts]


def assert_same(found, expected):
    for one, other in zip(rows_of(found), rows_of(expected), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [
    {"max_tokens": 2}, {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"max_tokens": 60, "stop": ("=1", "</think>")},
    *map(slow, ({}, {"max_tokens": 60}, {"max_tokens": 1}, {"temperature": 0.0})),
    slow({"max_tokens": 60, "stop_token_ids": (13, 261)}),
], ids=str)  # fmt: skip
def test_completions_are_those_without_drafts_whatever_the_drafts_are(generator, make_prompt, way):
    sampling = Sampling(**{"max_tokens": 24, "temperature": 1.0, **way})
    prompts = [make_prompt(question) for question in QUESTIONS]
    limits = [1, 5, 24, 99, 7]  # of turns of conversations
    turns = [replace(p, next_turn=NextTurn(turn=1, seed=0, max_tokens=m)) for p, m in zip(prompts, limits, strict=True)]
    vocabulary = generator.slot.backbone.model.config.vocab_size
    for asked, batch_size in ((prompts, 256), (turns, 6)):
        generator.batch_size = batch_size
        plain = generator.sample(asked, 3, SEEDS, sampling)
        exact, often_wrong = right(plain, vocabulary), right(plain, vocabulary, wrong=0.3)
        chance, many = anything(vocabulary), 1000
        for offer, most_rows in ((nothing, many), (chance, many), (exact, 3), (often_wrong, 3), (often_wrong, many)):
            said = {}
            generator.token_callback = lambda row, token, said=said: said.setdefault(row, []).append(token)
            drafts = GivenDrafts(offer, most_rows)
            assert_same(generator.sample(asked, 3, SEEDS, replace(sampling, drafts=drafts)), plain)
            assert [tuple(said[row]) for row in sorted(said)] == [row.token_ids for row in rows_of(plain)]
            generator.token_callback = None


def test_right_drafts_save_passes_and_wrong_ones_cost_none(generator, make_prompt, backbone):
    passes = []
    hook = backbone.model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    prompts, sampling = [make_prompt(question) for question in QUESTIONS[:2]], Sampling(max_tokens=24, temperature=1.0)

    def sampled(drafts=None):
        passes.clear()
        return generator.sample(prompts, 1, [0, 10], replace(sampling, drafts=drafts)), len(passes)

    plain, number = sampled()
    lengths = [len(row.token_ids) for row in rows_of(plain)]
    assert number == max(lengths)
    # The prefill gives a token, each pass MOST drafts and one more; the last token is never a draft.
    perfect = GivenDrafts(right(plain, backbone.model.config.vocab_size))
    assert sampled(perfect)[1] == 1 + -(-(max(lengths) - 1) // (MOST + 1))
    numbers = savings(perfect.taken())
    assert numbers["drafts/accepted_share"] == 1
    assert numbers["drafts/tokens_per_pass"] == sum(lengths) / sum(1 + -(-(n - 1) // (MOST + 1)) for n in lengths)
    wrong = GivenDrafts(lambda key, said, most: [0] * most)
    assert sampled(wrong)[1] == number
    assert savings(wrong.taken()) == {"drafts/accepted_share": 0, "drafts/tokens_per_pass": 1}
    assert savings(perfect.taken()) == {}, "they are those since the last call"
    hook.remove()


def test_with_more_rows_than_the_rule_allows_there_are_no_drafts_until_others_have_ended(generator, make_prompt):
    asked, sampling = [], Sampling(max_tokens=60, temperature=1.0)
    drafts = GivenDrafts(lambda key, said, most: asked.append(key) or [], rows=7)
    groups = generator.sample([make_prompt(q) for q in QUESTIONS], 4, SEEDS, replace(sampling, drafts=drafts))
    lengths = sorted(len(row.token_ids) for row in rows_of(groups))
    # Rows are asked about before each of their tokens but the first, from where no more than seven are left.
    assert len(asked) == sum(length - lengths[-8] for length in lengths[-7:])


def test_what_is_read_late_as_on_a_gpu_is_the_same(generator, make_prompt, monkeypatch):
    prompts, sampling = [make_prompt(q) for q in QUESTIONS], Sampling(max_tokens=60, temperature=1.0, stop=("=1",))
    plain, vocabulary = generator.sample(prompts, 4, SEEDS, sampling), generator.slot.backbone.model.config.vocab_size
    monkeypatch.setattr("rlft.generation.decoding.SYNCHRONOUS", ())
    assert_same(generator.sample(prompts, 4, SEEDS, sampling), plain)
    for rows in (1, 7, 19, 20):
        drafts = GivenDrafts(right(plain, vocabulary, wrong=0.3), rows)
        assert_same(generator.sample(prompts, 4, SEEDS, replace(sampling, drafts=drafts)), plain)
    assert drafts.counts["accepted"], "with as many as there are, each token is read at once"


@each("questions, n, allowed, max_tokens", [(2, 3, 99, 12), (2, 3, 6, 12), (3, 4, 7, 20), (1, 2, 99, 3), (2, 2, 1, 9)])
def test_the_widest_pass_with_drafts_is_rehearsed(
    generator, make_prompt, monkeypatch, questions, n, allowed, max_tokens
):
    widths, check = [], PrefixCache.check
    monkeypatch.setattr(PrefixCache, "check", lambda self, *ids: widths.append(len(ids[0])) or check(self, *ids))
    prompts = [make_prompt(question) for question in QUESTIONS[:questions]]
    drafts = GivenDrafts(lambda key, said, most: [0] * most, allowed)
    generator.sample(prompts, n, SEEDS[:questions], Sampling(max_tokens=max_tokens, temperature=1.0, drafts=drafts))
    sampled, widths[:] = max(widths, default=0), []
    generator.rehearse([prompt.token_ids for prompt in prompts], n, max_tokens, allowed)
    [rehearsed] = widths
    fewer = range(1, min(questions * n, allowed) + 1)
    assert sampled <= rehearsed == max(r * min(max_tokens - 1, 1 + MOST, 2 * allowed // r) for r in fewer)
    assert sampled == rehearsed or allowed < 99, "with 99 all rows are alive in the widest pass"
    generator.rehearse([prompt.token_ids for prompt in prompts], n, max_tokens)
    assert len(widths) == 1


# -- what is remembered ------------------------------------------------------------------------------------------------
def group(name, *rows):
    prompt = Prompt(id=name, messages=(), answer="", token_ids=tuple(map(ord, name)))
    return group_of(prompt, rows)


def offered(drafts, name, said, rows=1, room=9):
    return drafts.offers([key_of(list(map(ord, name)))] * rows, [said] * rows, [room] * rows)[0]


def test_the_same_prompt_is_asked_first_and_longer_contexts_before_shorter_ones():
    drafts = Drafts(16)
    drafts.add([group("a", [1, 2, 3, 4, 5, 6, 7, 8]), group("b", [1, 2, 3, 9, 9, 5, 6, 20, 21])])
    assert offered(drafts, "a", [1, 2, 3]) == [4, 5, 6, 7]  # the last token is never a draft
    assert offered(drafts, "b", [1, 2, 3]) == [9, 9, 5, 6]
    assert offered(drafts, "c", []) == [1, 2, 3], "then they differ"
    assert offered(drafts, "c", [9, 9, 5, 6]) == [20]
    assert offered(drafts, "c", [50, 50, 5, 6]) == []  # two tokens that two rows go on from differently
    assert offered(drafts, "a", [1, 2, 3], room=2) == [4, 5]
    assert offered(drafts, "a", [1, 2, 3], room=0) == offered(drafts, "a", [1, 2, 3], room=-1) == []


def test_the_more_rows_the_surer_a_draft_has_to_be():
    drafts = Drafts(16)
    numbers = []
    for _ in range(1, 7):
        drafts.add([group("a", [1, 2, 3, 4])])
        numbers.append(sum(bool(offered(drafts, "a", [1], rows)) for rows in range(1, 17)))
    assert numbers == sorted(set(numbers)), numbers
    assert numbers[-1] == 16


@each("words, device, together, rows", [
    ("", "cpu", 1, None), ("generation.drafts=history", "cpu", 999, 16), ("generation.drafts=history", "cuda", 999, 96),
    ("generation.drafts=auto", "cpu", 8, 16), ("generation.drafts=auto", "cpu", 9, None),
    ("generation.drafts=auto", "cuda", 1, None), ("generation.drafts=auto generation.draft_rows=3", "cpu", 1, 3),
    ("generation.drafts=auto generation.draft_rows=3", "cpu", 2, None), ("generation.drafts=history", "mps", 1, 0),
])  # fmt: skip
def test_a_config_says_from_how_many_rows_on_there_are_drafts(run_config, words, device, together, rows):
    generation = run_config(*words.split()).generation
    drafts = Drafts.of(generation, "transformers", device, together)
    assert (None if drafts is None else drafts.rows) == rows
    assert Drafts.of(generation, "vllm", device, together) is None
    assert Drafts.of(generation, "transformers", device, together, in_process=False) is None


def test_what_is_remembered_is_bounded_and_a_restored_copy_offers_the_same(monkeypatch):
    monkeypatch.setattr("rlft.generation.drafts.KEPT", 1000)
    dice, drafts = random.Random(0), Drafts(16)

    def some(length):
        return [group(str(dice.randrange(9)), *([dice.randrange(6) for _ in range(length)] for _ in range(4)))]

    for _ in range(40):
        drafts.add(some(dice.randrange(1, 60)))
        assert len(drafts.state()["token_ids"]) < 1000 + 60
    assert len(drafts.state()["token_ids"]) > 300
    copy = Drafts(16)
    copy.restore(drafts.state())
    for _ in range(3):
        for _ in range(100):
            asked = (str(dice.randrange(9)), [dice.randrange(6) for _ in range(dice.randrange(9))], dice.randint(1, 16))
            assert offered(copy, *asked) == offered(drafts, *asked)
        groups = some(100)
        copy.add(groups)
        drafts.add(groups)
    assert_same_state(copy, drafts)


def assert_same_state(copy, drafts):
    assert copy._leading == drafts._leading
    assert all(torch.equal(values, copy.state()[name]) for name, values in drafts.state().items())


@pytest.mark.parametrize("lengths", [[1] * 19 + [190] * 12, [1500], [3, 1500, 1500], [999, 1, 1], [190] * 6 + [1] * 99])
def test_a_restored_copy_remembers_the_same_whatever_the_lengths(lengths, monkeypatch):
    monkeypatch.setattr("rlft.generation.drafts.KEPT", 1000)
    drafts = Drafts(16)
    for length in lengths:
        drafts.add([group("a", [0] * length)])
        copy = Drafts(16)
        copy.restore(drafts.state())
        assert_same_state(copy, drafts)


@pytest.mark.parametrize("drafts", ["off", "history"])
@pytest.mark.parametrize(
    ("command", "words"),
    [("sample", []), ("sft", ["demonstrations.path=embedded:arithmetic-demonstrations", "data=arithmetic"])],
)
def test_commands_that_use_no_drafts_say_so(command, words, drafts):
    words = [*words, "generation=transformers", f"generation.drafts={drafts}", "max_completion_tokens=64"]
    words = [word for word in words if command == "sft" or not word.startswith("max_")]
    notes = resolve(compose([*words, "prompts.max_tokens=64"], None, command)).plan().notes
    assert any("only rlft train and its evaluations use drafts" in note for note in notes) is (drafts == "history")
