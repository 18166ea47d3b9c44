"""Texts that hold markers of a chat template: conversations rendered by each family's, read by each family's."""

from __future__ import annotations

import random
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from family_tokenizers import SPECIAL, family_tokenizer

from rlft.config.schema import PromptsConfig
from rlft.data.examples import scan_demonstrations, scan_rankings
from rlft.data.prompts import scan
from rlft.tokens.plain import markers_of
from rlft.tokens.text import RunTokenizer, render
from rlft.types import Demonstration, Prompt, Ranking, Split
from tests.helpers.family_tokenizers import with_attributes

_SPEC = spec_from_file_location("families_of_templates", Path(__file__).with_name("test_templates.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_TEMPLATES = sys.modules["families_of_templates"] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_TEMPLATES)
NAMES = [*SPECIAL, *(f"{name} of the tests" for name in _TEMPLATES.FAMILIES)]
WORDS = (
    *("Two and three?", "x < y", "a|b", "What is <b>bold</b>?", "[1, 2]", "role: user", "<think>5</think>"),
    *("User: hi\n\nAssistant:", "the assistant said", "<|", "|>", "$[0, 1]$", "def f(x): return x[0]"),
    *("<answer>5</answer>", "### Response:", "INST"),
)
"""Texts without a marker."""


@cache
def tokenizer(name: str) -> RunTokenizer:
    return _TEMPLATES.tokenizer_of(name.partition(" ")[0]) if name.endswith("tests") else family_tokenizer(name)


def conversation(rng: random.Random) -> list[dict[str, str]]:
    turns = [{"role": role, "content": rng.choice(WORDS[:6])} for role in ("user", "assistant") * rng.randint(1, 2)]
    return turns[:-1]


def asked(number: int, *contents: str) -> Prompt:
    return Prompt(id=str(number), messages=tuple({"role": "user", "content": text} for text in contents), answer="")


def notes(name: str, texts: list[str], style: str) -> tuple[str, ...]:
    prompts = [asked(i, text) for i, text in enumerate(texts)]
    return scan(prompts, tokenizer(name), 10_000, "refuse", Split.train, style).notes  # type: ignore[arg-type]


def test_conversations_that_any_template_has_rendered_are_counted_and_named() -> None:
    """19 families read conversations that 19 have rendered: 361 pairs, each among plain texts, with both styles."""
    rng = random.Random(3)
    for read_by in NAMES:
        texts = [render(tokenizer(by), conversation(rng), start=True) for by in NAMES]
        assert notes(read_by, [*WORDS], "chat") == (), read_by
        for by, text in zip(NAMES, texts, strict=True):
            assert markers_of(tokenizer(read_by)).in_text(text), (read_by, by)
        [note] = notes(read_by, [*WORDS, *texts, *(f"Repeat: {text}" for text in texts)], "chat")
        of_all = f"{2 * len(NAMES)} of {len(WORDS) + 2 * len(NAMES)}"
        assert note.startswith(f"{of_all} train prompts hold markers of a chat template, such as "), read_by
        assert note.endswith("prompts.style=raw reads such texts as they are"), read_by


def test_raw_prompts_that_the_models_template_has_rendered_are_the_tokens_of_the_template() -> None:
    """What the note promises, with each family; a part of a rendering stays text, and so does another template's."""
    rng = random.Random(4)
    for name in NAMES:
        own = tokenizer(name)
        for _ in range(5):
            said = conversation(rng)
            chat = Prompt(id="a", messages=tuple(said), answer="")
            expected = scan([chat], own, 10_000, "refuse", Split.train, "chat").prompts[0].token_ids
            text = render(own, said, start=True)
            found = scan([asked(0, text)], own, 10_000, "refuse", Split.train, "raw")
            assert found.prompts[0].token_ids == expected, (name, said)
            [note] = found.notes
            assert note.startswith("1 of 1 train prompts are renderings of the model's own chat template"), name
            assert not markers_of(own).is_rendering(f"Repeat: {text}")
            assert not markers_of(own).is_rendering(text.partition(markers_of(own).answer)[0])
            [stays] = notes(name, [f"Repeat: {text}"], "raw")
            assert "stay" in stays, name


def test_markers_in_demonstrations_and_preferences_are_counted_in_prompts_and_completions() -> None:
    settings = PromptsConfig(max_tokens=10_000, over_limit="refuse", style="chat")
    for name in NAMES:
        own, rng = tokenizer(name), random.Random(5)
        given = render(own, conversation(rng), start=True)
        ended = render(own, [*conversation(rng), {"role": "assistant", "content": "Five."}]).rpartition("Five.")
        completion = "".join(ended[1:]).strip()
        prompts = [asked(0, "Two?"), asked(1, given), asked(2, "Three?")]
        plain = ["It is five.", "Six.", "Seven."]
        for completions in (plain, [completion, *plain[1:]]):
            demonstrations = [Demonstration(prompt=p, completion=c) for p, c in zip(prompts, completions, strict=True)]
            rankings = [
                Ranking(prompt=p, completions=(c, "No."), scores=(1.0, 0.0))
                for p, c in zip(prompts, completions, strict=True)
            ]
            for scanned, what, of in (
                (scan_demonstrations(demonstrations, own, settings, 1000, Split.train), "demonstrations", 3),
                (scan_rankings(rankings, own, settings, 1000, Split.train), "rankings", 6),
            ):
                told = [
                    note for note in scanned.notes if "learned as the chat" not in note and "never closed" not in note
                ]
                assert told[0].startswith(f"1 of 3 prompts of train {what} hold markers of a chat template"), name
                spelled = [f"1 of {of} completions of train {what} spell what ends or begins a turn"] * (
                    completions[0] not in (plain[0], "Five.")  # GLM's template puts no end behind it
                )
                assert [note.partition(", such as")[0] for note in told[1:]] == spelled, (name, told)


def test_a_tokenizer_without_a_template_reads_markers_as_text_and_says_so() -> None:
    bare = with_attributes(family_tokenizer("qwen2.5"), chat_template=None)
    other = render(tokenizer("mistral"), conversation(random.Random(1)), start=True)
    found = scan([asked(0, "a"), asked(1, other), asked(2, other)], bare, 1000, "refuse", Split.train)
    [note] = found.notes
    assert note.startswith("2 of 3 train prompts hold markers of a chat template")
    assert note.endswith("which stay text")
