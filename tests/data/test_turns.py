"""The turns that are learned have the tokens that their template writes, or there is a note."""

from __future__ import annotations

from pathlib import Path

import pytest
from turn_shapes import SHAPES, shaped_tokenizer

from rlft.config.model import KernelChoice, ModelConfig
from rlft.config.schema import PromptsConfig
from rlft.data.examples import scan_demonstrations, scan_rankings, turns_of
from rlft.model.backbone import ends_of
from rlft.tokens.chat_template import rendered
from rlft.tokens.ends import turn_ends
from rlft.types import Demonstration, Prompt, Ranking, Split, UserError

PROMPTS = PromptsConfig(max_tokens=900, over_limit="refuse", style="chat")
ASKED = Prompt(id="p", messages=({"role": "user", "content": "2 + 3?"},), answer="5")
NEXT = {"role": "user", "content": "And 4?"}


def test_what_is_learned_is_what_the_template_writes() -> None:
    for name, shape in SHAPES.items():
        tokenizer = shaped_tokenizer(name)
        found = scan_demonstrations(
            [Demonstration(prompt=ASKED, completion="5", completion_ids=())], tokenizer, PROMPTS, 900, Split.train
        )
        learned = "".join([shape.turn, shape.lead, *shape.closing])
        [prompt] = rendered(tokenizer, [ASKED.messages], start=True)
        ids = found.texts[0].ids.tolist()
        assert tokenizer.decode(ids) == prompt + learned, name
        assert ids == tokenizer(prompt + learned)["input_ids"], name
        ranked = Ranking(prompt=ASKED, completions=("5", "6"), scores=(1.0, 0.0))
        [ranking] = scan_rankings([ranked], tokenizer, PROMPTS, 900, Split.train).rankings
        assert [*ranking.prompt, *ranking.completions[0]] == ids, name
        if shape.note:
            assert found.note is not None, name
            assert shape.note in found.note, name
            continue
        assert found.note is None, name
        # Where there is no note about it, the template's own conversation begins with these tokens, when it goes on
        # or when it ends; an end that the template has not is in the notes of `turn_ends`.
        answered = [*ASKED.messages, {"role": "assistant", "content": "5"}]
        wholes = rendered(tokenizer, [answered, [*answered, NEXT]])
        has_end = "no special token" not in (notes := "".join(turn_ends(tokenizer, "chat").notes))
        own = ids if has_end and "inside" not in notes else ids[:-1]
        assert any(tokenizer(whole)["input_ids"][: len(own)] == own for whole in wholes), name  # type: ignore[index]


def test_a_thought_that_the_template_drops_is_learned_all_the_same_and_once() -> None:
    tokenizer = shaped_tokenizer("a prompt that opens thinking")
    end = turn_ends(tokenizer, "chat").closing
    for said in ("<think>\n2 + 3</think>5", "2 + 3</think>5"):
        [turn], note = turns_of([(ASKED, said)], tokenizer, "chat", "demonstrations")
        assert tokenizer.decode(list(turn[: -len(end)])) == "2 + 3</think>5"
        assert note is not None
        assert note.startswith(
            "1 of 1 demonstrations are not learned as the chat template writes them: it drops a part"
        )
    [turn], note = turns_of([(ASKED, "2 + 3</think>5")], tokenizer, "raw", "demonstrations")
    assert (tokenizer.decode(list(turn)), note) == ("2 + 3</think>5<|endoftext|>", None)


def test_turns_that_a_template_refuses_are_learned_as_texts() -> None:
    tokenizer = shaped_tokenizer("a base with another end")
    template = tokenizer.chat_template
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    tokenizer.chat_template = refusing + str(template)
    try:
        [turn], note = turns_of([(ASKED, "no")], tokenizer, "chat", "demonstrations")
    finally:
        tokenizer.chat_template = template
    assert tokenizer.decode(list(turn)) == "no<|im_end|>"
    assert note is not None
    assert "it refuses them (not this)" in note


def test_a_models_ends_are_those_of_its_files(tmp_path: Path, tiny_path: Path) -> None:
    """generation_config.json names further ends; without it config.json does."""
    tokenizer = shaped_tokenizer("a base with another end")
    own = turn_ends(tokenizer, "chat").ids
    (tmp_path / "config.json").write_text(
        (tiny_path / "config.json").read_text().replace('"eos_token_id": 2', '"eos_token_id": 5')
    )
    model = ModelConfig(
        path=str(tmp_path), revision=None, dtype="auto", device="cpu", quantization=None, trust_remote_code=False,
        attn_implementation="auto", gradient_checkpointing="auto", kernels=KernelChoice.auto,
    )  # fmt: skip
    assert ends_of(model, "chat", tokenizer).ids == (*own, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 6]}')
    assert ends_of(model, "chat", tokenizer).ids == (*own, 7, 6)
    assert ends_of(model, "raw", tokenizer).ids == (own[1], 7, 6)


def test_a_tokenizer_without_any_end_has_nothing_to_learn() -> None:
    tokenizer = shaped_tokenizer("no end but the next turn")
    eos = tokenizer.eos_token
    tokenizer.eos_token = None
    try:
        assert turn_ends(tokenizer, "chat").ids == ()
        with pytest.raises(UserError, match=r"^model\.path: its tokenizer has no end token"):
            turns_of([(ASKED, "5")], tokenizer, "chat", "demonstrations")
    finally:
        tokenizer.eos_token = eos
