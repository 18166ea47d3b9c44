"""What templates write on the run's date, which special tokens a text shows, and where the assistant's turn begins."""

from __future__ import annotations

import datetime
import locale
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from in_one_test import each
from tokenizers import AddedToken
from turn_shapes import EOS, SHAPES, shaped_tokenizer

from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.stops import GrowingText, ShownText, plain_decoder, shown_texts
from rlft.generation.transformers import TransformersGenerator
from rlft.tokens import text as text_module
from rlft.tokens.text import (
    RunTokenizer,
    decode,
    formatted,
    hidden_special_tokens,
    render,
    rendered,
    tail,
    turn_ends,
    visible_special_ids,
    without_tail,
)
from rlft.types import FinishReason, Prompt, Sampling
from tests.helpers.family_tokenizers import TEMPLATES, family_tokenizer, with_attributes

SAMPLING = Sampling(max_tokens=64, temperature=1.0)
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
THINKING_SHOWN = "<|im_start|>system\nFirst draft: [THINK]thoughts[/THINK] then answer.<|im_end|>\n" + TURNS
THINKING_CLOSED = TURNS.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)


def with_special(*tokens, family="qwen2.5", template=None):
    """The family's tokenizer in which these tokens are special."""
    tokenizer = family_tokenizer(family)
    changed = with_attributes(tokenizer, chat_template=tokenizer.chat_template if template is None else template)
    added = [AddedToken(token, special=True, normalized=False) for token in tokens]
    changed.add_special_tokens({"additional_special_tokens": added})
    return changed


@each(("tokens", "family", "template"), [
    (("<think>", "</think>", "<answer>", "</answer>"), "qwen2.5", None),
    (("<think>", "</think>", "<answer>", "</answer>"), "llama-3", None), (("[THINK]", "[/THINK]"), "mistral", None),
    (("[THINK]", "[/THINK]"), "qwen2.5", THINKING_SHOWN), (("<think>", "</think>"), "qwen2.5", THINKING_CLOSED),
    (("<|begin_of_thought|>", "<|end_of_thought|>"), "gemma", None), (("<think>", "</think>"), "qwen2.5", ""),
])  # fmt: skip
def test_a_text_shows_special_tokens_that_are_said_and_none_that_marks_turns(tokens, family, template):
    tokenizer = with_special(*tokens, family=family, template=template)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    assert {*ids.values()} <= visible_special_ids(tokenizer)
    assert tokenizer.eos_token_id in hidden_special_tokens(tokenizer)
    text = f"{tokens[0]}so{tokens[1]} 18"
    row = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert ids[tokens[0]] in row
    assert decode(tokenizer, row).replace(" ", "") == text.replace(" ", "")  # SentencePiece adds spaces of its own
    assert shown_texts(tokenizer, [row], [True], SAMPLING) == [decode(tokenizer, row)]
    growing = GrowingText(plain_decoder(tokenizer), row[:1])
    assert "".join(growing.add(token) for token in row[1:]) == decode(tokenizer, row)[len(tokens[0]) :]


def test_a_tokenizer_whose_special_tokens_all_mark_turns_decodes_as_before():
    for family in ("qwen2.5", "qwen3", "llama-3", "mistral", "gemma", "smollm2"):
        tokenizer = family_tokenizer(family)
        ids = tokenizer("<think>so</think> it is 18.", add_special_tokens=False)["input_ids"]
        hidden = {t for t in hidden_special_tokens(tokenizer) if tokenizer.decode([t]) in tokenizer.chat_template}
        assert hidden, family
        for row in (ids, [*hidden, *ids, *tokenizer.all_special_ids]):
            assert decode(tokenizer, row) == tokenizer.decode(ids, skip_special_tokens=True), family
        every, of_turns = [ids[0], *tokenizer.added_tokens_decoder, *ids], hidden_special_tokens(tokenizer).items()
        turns = {t for t, name in of_turns if name in tokenizer.chat_template or t in tokenizer.all_special_ids}
        shown = [t for t in every if t not in turns]
        assert decode(tokenizer, every) == tokenizer.decode(shown, skip_special_tokens=False), family


def test_the_special_token_that_ends_a_turn_is_not_shown_whatever_it_is():
    tokenizer = with_special("<|call|>", "<think>")
    call, think = tokenizer.convert_tokens_to_ids(["<|call|>", "<think>"])
    row = [think, *tokenizer("6", add_special_tokens=False)["input_ids"], call]
    assert shown_texts(tokenizer, [row, row[:-1]], [True, False], SAMPLING, [call]) == ["<think>6", "<think>6"]
    assert shown_texts(tokenizer, [row], [False], SAMPLING) == ["<think>6<|call|>"], "it ends no turn"
    assert decode(tokenizer, [*row, *row[1:2]]) == "<think>6<|call|>6"
    tokenizer = replace(tokenizer, ends=(call,))  # as the generation config names it
    for read in (decode, lambda tokenizer, ids: plain_decoder(tokenizer)(ids)):
        assert read(tokenizer, [*row, *row[1:2]]) == "<think>66"


# The generation prompt of a template, and the end of it that belongs to the turn.
START = "{% if add_generation_prompt %}<|im_start|>assistant\n@{% endif %}"
STARTS = [
    *((TURNS + START.replace("@", begun), begun)
      for begun in ("<think>\n", "<think>", "[THINK]", "<|START_THINKING|>", "<think>\nOkay, ", "")),
    (TURNS + START.replace("@", "<think>\n\n</think>\n\n"), ""),
    # The last turn of an assistant has a block that earlier ones lack (Qwen3.5).
    (TURNS.replace("{{ m.c", "{% if loop.last and m.role == 'assistant' %}<think>\n</think>{% endif %}{{ m.c")
     + START.replace("@", "<think>\n"), "<think>\n"),
    # The header of a turn is itself a tag.
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
     "{% if add_generation_prompt %}<assistant>{% endif %}", ""),
]  # fmt: skip


@each(("template", "expected"), STARTS)
def test_the_tail_of_a_prompt_is_what_its_template_has_begun_and_left_open(template, expected):
    tokenizer = with_attributes(family_tokenizer("qwen2.5"), chat_template=template)
    for chat in (
        [{"role": "user", "content": "2?"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "<b>"}],
    ):
        assert tail(tokenizer, render(tokenizer, chat, start=True), by_template=True) == expected


def test_templates_of_the_families_begin_nothing_and_plain_prompts_may():
    for file in sorted(TEMPLATES.glob("*.jinja")):
        tokenizer = family_tokenizer(file.stem)
        prompt = render(tokenizer, [{"role": "user", "content": "2?"}], start=True)
        assert tail(tokenizer, prompt, by_template=True) == "", file.stem
    tokenizer = family_tokenizer("qwen2.5")
    for prompt, begun in (
        ("Q\nA: <think>\n", "<think>\n"), ("Q [THINK]", "[THINK]"), ("Q: 2 < 3?", ""), ("Q </b>", ""), ("Q [INST]", ""),
        ("Q\n[OUTPUT]\n", ""), ("Q <assistant>\n", ""),
    ):  # fmt: skip
        assert tail(tokenizer, prompt, by_template=False) == begun
    assert tail(family_tokenizer("mistral"), "Q [INST]", by_template=False) == "", "it marks a turn there"


def test_what_a_prompt_has_begun_is_not_said_twice():
    for text in ("<think>\n2 + 3</think>5", "<think>2 + 3</think>5", "  <think>\n\n2 + 3</think>5", "2 + 3</think>5"):
        assert without_tail(text, "<think>\n") == "2 + 3</think>5"
    assert without_tail("<think>5", "") == "<think>5"


# -- templates as they are rendered ------------------------------------------------------------------------------------
TODAY = "{% set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}Today: {{ day }}\n"
START_OF_TURN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHAT = [{"role": "user", "content": "2 + 3?"}]


def test_a_template_writes_the_tokenizers_date_on_whatever_day_it_is_rendered(monkeypatch):
    monkeypatch.setattr(text_module, "_now", lambda: datetime.datetime(2026, 12, 31))
    made = RunTokenizer(with_special(template=TODAY + TURNS + START_OF_TURN).own)
    monkeypatch.setattr(text_module, "_now", lambda: datetime.datetime(2027, 1, 1))
    assert made.date == "2026-12-31", "without a date it is that day's, which is then kept"
    for date, words in ((made.date, "31 Dec 2026"), ("2026-02-03", "03 Feb 2026")):
        expected = f"Today: {words}\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
        assert render(replace(made, date=date), CHAT, start=True) == expected


def test_a_date_has_english_names_in_every_locale():
    forms = ["%d %b %Y", "%A, %B %-d", "%Y-%m-%d %H:%M", "100 %% %a %h %p %x"]
    expected = ["01 Mar 2026", "Sunday, March 1", "2026-03-01 00:00", "100 % Sun Mar AM 03/01/26"]
    before = locale.setlocale(locale.LC_TIME)
    try:
        for name in ("C", "de_DE.UTF-8", "fr_FR.UTF-8"):
            with suppress(locale.Error):  # not on this machine
                locale.setlocale(locale.LC_TIME, name)
            assert [formatted(datetime.date(2026, 3, 1), form) for form in forms] == expected
    finally:
        locale.setlocale(locale.LC_TIME, before)


def test_a_template_that_goes_through_the_tools_without_asking_gets_none_of_them():
    tokenizer = with_special(template="{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + TURNS)
    assert rendered(tokenizer, [CHAT, CHAT]) == ["<|im_start|>user\n2 + 3?<|im_end|>\n"] * 2
    asking = with_special(template="{% if tools is not none %}tools {% endif %}" + TURNS)
    assert not render(asking, CHAT).startswith("tools")
    refusing = with_special(template="{% if tools is none %}{{ raise_exception('no chat') }}{% endif %}" + TURNS)
    with pytest.raises(Exception, match="no chat"):  # it is not tried again
        render(refusing, CHAT)


# -- ends of turns -----------------------------------------------------------------------------------------------------
SHORT_SAMPLING = Sampling(max_tokens=30, temperature=1.0)
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "2 + 3?"},), answer="5", token_ids=(1, 2, 3))


def ids_of(name, tokens):
    return tuple(shaped_tokenizer(name).convert_tokens_to_ids(list(tokens)))


def test_a_turn_ends_with_what_the_template_puts_there_and_no_other_turn_begins_with():
    for name, shape in SHAPES.items():
        ends = turn_ends(shaped_tokenizer(name), "chat")
        assert (ends.lead, ends.closing) == (shape.lead, ids_of(name, shape.closing)), name
        assert ends.ids == ids_of(name, shape.ends), name
        assert [ends.names[token] for token in ends.ids] == list(shape.ends), name
        assert ends.row[:2] == ("end-of-turn token", shape.ends[0]), name
        [note] = ends.notes
        assert shape.ends[0] in note, name
        assert EOS in note, name
        raw = turn_ends(shaped_tokenizer(name), "raw")
        assert (raw.lead, raw.closing, raw.ids) == ("", ids_of(name, [EOS]), ids_of(name, [EOS])), name
    tokenizer = shaped_tokenizer("a base with another end")
    assert turn_ends(with_attributes(tokenizer, eos_token="<|im_end|>"), "chat").notes == ()


def test_what_the_generation_config_names_ends_a_completion_too():
    name = "a base with another end"
    tokenizer, own = shaped_tokenizer(name), ids_of(name, SHAPES[name].ends)
    for configured, added in ((None, ()), (7, (7,)), ([own[1], 9, own[0], 8], (9, 8))):
        assert turn_ends(tokenizer, "chat", configured).ids == (*own, *added)
        assert turn_ends(tokenizer, "raw", configured).ids[0] == own[1]


class Forced:
    """A decoder whose model says these tokens, then the first one again and again; also the slot it is on."""

    def __init__(self, tokens, vocabulary):
        self.tokens, self.vocabulary, self.said = tokens, vocabulary, 0

    def images_of(self, prompts): ...

    def prefix_cache(self, prompts, max_tokens, images):
        self.said = 0
        return self

    def load_sampler(self, adapter, *, weights="apart"): ...

    def using(self, role):
        return nullcontext()

    def prefill(self, n):
        token = self.tokens[self.said] if self.said < len(self.tokens) else self.tokens[0]
        self.said += 1
        return torch.nn.functional.one_hot(torch.tensor([token] * n), self.vocabulary) * 1000.0

    def step(self, token_R):
        return self.prefill(len(token_R))

    def keep(self, rows): ...

    def fill(self): ...


def test_every_engine_ends_a_completion_where_its_turn_ends():
    for name, shape in SHAPES.items():
        tokenizer = shaped_tokenizer(name)
        ends = turn_ends(tokenizer, "chat")
        turn = [*tokenizer("5" + shape.lead)["input_ids"], *ends.closing]
        for end in (None, *ends.ids[1:]):  # what is learned, and every other end in its place
            forced = turn if end is None else [*turn[: -len(ends.closing)], end]
            slot = Forced(forced, len(tokenizer))
            generator = TransformersGenerator(slot, tokenizer, torch.device("cpu"), 1, ends=ends.ids)
            [group] = generator.sample([PROMPT], 1, [0], SHORT_SAMPLING)
            completion = group.rollouts[0].completion
            assert list(completion.token_ids) == forced, (name, end)
            assert completion.finish_reason is FinishReason.stop, (name, end)
            assert completion.text == "5" + shape.lead, (name, end)
        [group] = ScriptedGenerator({"*": ["5"]}, tokenizer, ends).sample([PROMPT], 1, [0], SHORT_SAMPLING)
        completion = group.rollouts[0].completion
        assert (list(completion.token_ids), completion.finish_reason) == (turn, "stop"), name


def test_an_end_that_is_no_special_token_is_not_shown():
    """Such as an end that only the generation config names."""
    tokenizer = shaped_tokenizer("a base with another end")
    [letter, end] = tokenizer("5!")["input_ids"]
    slot = Forced([letter, end], len(tokenizer))
    generator = TransformersGenerator(slot, tokenizer, torch.device("cpu"), 1, ends=[end])
    [group] = generator.sample([PROMPT], 1, [0], SHORT_SAMPLING)
    assert (group.rollouts[0].completion.text, group.rollouts[0].completion.token_ids) == ("5", (letter, end))
    shown = ShownText(plain_decoder(tokenizer), SHORT_SAMPLING, [end])
    assert [shown.add(letter), shown.add(end)] == ["5", ""]
