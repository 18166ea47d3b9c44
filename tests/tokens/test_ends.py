"""What ends a turn: what templates of each shape end it with, and that every engine ends there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from turn_shapes import EOS, SHAPES, shaped_tokenizer

from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.stops import ShownText, plain_decoder
from rlft.generation.transformers import TransformersGenerator
from rlft.tokens.ends import turn_ends
from rlft.types import FinishReason, Prompt, Sampling
from tests.helpers.family_tokenizers import with_attributes

SAMPLING = Sampling(max_tokens=30, temperature=1.0)
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "2 + 3?"},), answer="5", token_ids=(1, 2, 3))


def ids_of(name: str, tokens: Sequence[str]) -> tuple[int, ...]:
    return tuple(shaped_tokenizer(name).convert_tokens_to_ids(list(tokens)))  # type: ignore[arg-type]


def test_a_turn_ends_with_what_the_template_puts_there_and_no_other_turn_begins_with() -> None:
    for name, shape in SHAPES.items():
        ends = turn_ends(shaped_tokenizer(name), "chat")
        assert (ends.lead, ends.closing) == (shape.lead, ids_of(name, shape.closing)), name
        assert ends.ids == ids_of(name, shape.ends), name
        assert [ends.names[token] for token in ends.ids] == list(shape.ends), name
        assert ends.row[:2] == ("end-of-turn token", shape.ends[0]), name
        raw = turn_ends(shaped_tokenizer(name), "raw")
        assert (raw.lead, raw.closing, raw.ids) == ("", ids_of(name, [EOS]), ids_of(name, [EOS])), name


def test_there_is_a_note_where_a_turns_end_is_not_the_tokenizers() -> None:
    for name, shape in SHAPES.items():
        [note] = turn_ends(shaped_tokenizer(name), "chat").notes
        assert shape.ends[0] in note, name
        assert EOS in note, name
    tokenizer = shaped_tokenizer("a base with another end")
    assert turn_ends(with_attributes(tokenizer, eos_token="<|im_end|>"), "chat").notes == ()


def test_what_the_generation_config_names_ends_a_completion_too() -> None:
    name = "a base with another end"
    tokenizer, own = shaped_tokenizer(name), ids_of(name, SHAPES[name].ends)
    for configured, added in ((None, ()), (7, (7,)), ([own[1], 9, own[0], 8], (9, 8))):
        assert turn_ends(tokenizer, "chat", configured).ids == (*own, *added)
        assert turn_ends(tokenizer, "raw", configured).ids[0] == own[1]


class Forced:
    """A decoder whose model says these tokens, then the first one again and again; also the slot it is on."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self.tokens, self.vocabulary, self.said = tokens, vocabulary, 0

    def images_of(self, prompts: object) -> None: ...

    def prefix_cache(self, prompts: object, max_tokens: int, images: None) -> Forced:
        self.said = 0
        return self

    def load_sampler(self, adapter: object, *, weights: str = "apart") -> None: ...

    def using(self, role: str | None) -> Any:
        return nullcontext()

    def prefill(self, n: int) -> Tensor:
        token = self.tokens[self.said] if self.said < len(self.tokens) else self.tokens[0]
        self.said += 1
        return torch.nn.functional.one_hot(torch.tensor([token] * n), self.vocabulary) * 1000.0

    def step(self, token_R: Tensor) -> Tensor:
        return self.prefill(len(token_R))

    def keep(self, rows: Tensor) -> None: ...

    def fill(self) -> None: ...


def test_every_engine_ends_a_completion_where_its_turn_ends() -> None:
    for name, shape in SHAPES.items():
        tokenizer = shaped_tokenizer(name)
        ends = turn_ends(tokenizer, "chat")
        turn = [*tokenizer("5" + shape.lead)["input_ids"], *ends.closing]  # type: ignore[misc]
        for end in (None, *ends.ids[1:]):  # what is learned, and every other end in its place
            forced = turn if end is None else [*turn[: -len(ends.closing)], end]
            slot = Forced(forced, len(tokenizer))
            generator = TransformersGenerator(slot, tokenizer, torch.device("cpu"), 1, ends=ends.ids)
            [group] = generator.sample([PROMPT], 1, [0], SAMPLING)
            completion = group.rollouts[0].completion
            assert list(completion.token_ids) == forced, (name, end)
            assert completion.finish_reason is FinishReason.stop, (name, end)
            assert completion.text == "5" + shape.lead, (name, end)
        [group] = ScriptedGenerator({"*": ["5"]}, tokenizer, ends).sample([PROMPT], 1, [0], SAMPLING)
        completion = group.rollouts[0].completion
        assert (list(completion.token_ids), completion.finish_reason) == (turn, "stop"), name


def test_an_end_that_is_no_special_token_is_not_shown() -> None:
    """Such as an end that only the generation config names."""
    tokenizer = shaped_tokenizer("a base with another end")
    [letter, end] = tokenizer("5!")["input_ids"]  # type: ignore[misc]
    slot = Forced([letter, end], len(tokenizer))
    generator = TransformersGenerator(slot, tokenizer, torch.device("cpu"), 1, ends=[end])
    [group] = generator.sample([PROMPT], 1, [0], SAMPLING)
    assert (group.rollouts[0].completion.text, group.rollouts[0].completion.token_ids) == ("5", (letter, end))
    shown = ShownText(plain_decoder(tokenizer), SAMPLING, [end])
    assert [shown.add(letter), shown.add(end)] == ["5", ""]
