"""The scripts that make the embedded models: what a model is taught, and each from its tokenizer to the README."""

import itertools
import json
import random
import re
from collections import Counter

import calling_lessons
import chain_lessons
import make_tiny_mixture
import make_tiny_model
import make_tiny_shapes
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rlft.data.arithmetic import OPERATIONS, split_of
from rlft.data.chains import Chains
from rlft.data.shapes import Shapes
from rlft.environment.calculator import Calculator
from rlft.environment.oracle_game import HELPERS, NOBODY, RULES, OracleGame
from rlft.reward.equations import equations
from rlft.tokens.images import read_processor
from rlft.types import Split
from tests.environment.test_conversations import LIMITS


@pytest.mark.slow
def test_a_model_is_taught_measured_and_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_tiny_model, "PROBLEMS", 2)
    out = tmp_path / "made"
    words = ["--size", "student", "--steps", "101", "--mixture-steps", "1", "--batch", "2"]
    make_tiny_model.main([*words, "--out", str(out)])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.hidden_size == make_tiny_model.SIZES["student"].hidden
    assert len(tokenizer) == len(make_tiny_model.make_tokenizer())
    readme = (out / "README.md").read_text()
    assert "make_tiny_model.py --size student --seed 0 --steps 101 --mixture-steps 1 --batch 2 " in readme
    assert "2 x 8 samples" in readme


@pytest.mark.slow
def test_a_model_of_pictures_is_saved_with_its_processor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_tiny_model, "PROBLEMS", 2)
    monkeypatch.setattr(make_tiny_shapes, "PICTURES", 8)
    monkeypatch.setattr(make_tiny_shapes, "BATCH", 2)
    out = tmp_path / "made"
    make_tiny_shapes.main(["--steps", "2", "--late-steps", "1", "--out", str(out)])
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    embedded = make_tiny_model.ASSETS / "tiny-shapes"
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == (embedded / name).read_text(), name
    processor = read_processor(tokenizer, {"pretrained_model_name_or_path": out}, model.config)
    [picture, *_] = Shapes(most=9, size=1, held_out_size=1, seed=0).load(Split.train)
    assert processor.tensors(picture.images[0])["image_grid_thw"].tolist() == [[1, 6, 6]]
    readme = (out / "README.md").read_text()
    assert "make_tiny_shapes.py --seed 0 --steps 2 --late-steps 1 --lr 0.004" in readme
    assert "256 x 8 samples: right " in readme


def test_without_noise_a_mixture_is_the_dense_model(monkeypatch):
    monkeypatch.setattr(make_tiny_mixture, "NOISE", 0.0)
    dense = AutoModelForCausalLM.from_pretrained(make_tiny_mixture.BASE).eval()
    ids = torch.arange(5, 25)[None]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = make_tiny_mixture.mixture().eval()(ids).logits.log_softmax(-1)
        expected = dense(ids).logits.log_softmax(-1)
    # Two experts that are the same MLP, with weights that add up to 1; the last bits differ (largest seen: 1.2e-5).
    assert (found - expected).abs().max() < 1e-4


# -- lessons of chains -------------------------------------------------------------------------------------------------
def test_chains_are_of_the_training_split_alone_and_their_working_is_right(tmp_path):
    chain_lessons.write_lessons(tmp_path / "lessons.jsonl", 500, True, random.Random(0))
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "lessons.jsonl").read_text().splitlines()]
    keys = {"steps": chain_lessons.STEPS, "largest": chain_lessons.LARGEST, "size": 1, "held_out_size": 400, "seed": 0}
    held_out = {prompt.messages[0]["content"] for prompt in Chains(**keys).load(Split.held_out)}
    assert len(asked) == 500
    assert not held_out & {*asked}
    rng = random.Random(3)
    for chain in [chain_lessons.problem(rng) for _ in range(500)]:
        assert split_of(chain.identity) is Split.train
        text = chain_lessons.response(chain, chain_lessons.CLEAN, rng)
        assert [holds for _, holds in equations(text)] == [True] * chain_lessons.STEPS
        assert text.endswith(f"={chain.results[-1]}</think><answer>{chain.results[-1]}</answer>")


# -- lessons of the caller: what environments really say, no held-out problem, and not whom to ask ---------------------
QUESTION = re.compile(r"What is (\d+) (\S) (\d+)\?")


def drawn(shares, count):
    """(chat, completion, the problem) of each lesson, of the training split alone."""
    found = []
    for line in itertools.islice(calling_lessons.lines(shares, random.Random(3)), count):
        match = QUESTION.match(line["prompt"][0]["content"])
        assert match is not None
        problem = int(match[1]), match[2], int(match[3])
        assert split_of(*problem) is Split.train
        found.append((line["prompt"], line["completion"], problem))
    return found


def test_what_the_lessons_hear_is_what_the_calculator_says():
    play = Calculator(**LIMITS).make()
    answered, refused = 0, 0
    for chat, *_ in drawn(calling_lessons.MIXED, 2000):
        if len(chat) < 3 or RULES in chat[0]["content"]:
            continue
        [made] = calling_lessons.READER.calls(chat[-2]["content"])
        try:
            said = f"Error: {made.problem}" if made.problem else play.call(made.name, made.arguments)
        except ValueError as error:
            said = f"Error: ValueError: {error}"
        assert chat[-1]["content"] == said
        refused += bool(made.problem)
        answered += not made.problem
    assert answered > 50 < refused


def test_who_is_asked_has_nothing_to_do_with_the_question_and_says_what_the_game_says():
    asked = Counter[tuple[str, str]]()
    for chat, _, (a, operation, b) in drawn(calling_lessons.CLEAN, 12_000):
        if RULES not in chat[0]["content"] or len(chat) < 3:
            continue
        play = OracleGame()
        play.reset(chat[:1], str(OPERATIONS[operation](a, b)))
        assert play.step(chat[1]["content"])[0] == chat[2]["content"]
        if chat[2]["content"] != NOBODY:
            said = re.search(r"<think>(.)</think><ask>(.)</ask>", chat[1]["content"])
            assert said is not None
            assert said[1] == operation, "it names the operation"
            asked[operation, said[2]] += 1
    # About 12,000 lines x 0.3 / 2 x 0.9 = 1,600 asks in 9 cells: 180 each, with a deviation of 13.
    assert set(asked) == set(itertools.product(OPERATIONS, HELPERS))
    assert max(asked.values()) < 1.9 * min(asked.values())
