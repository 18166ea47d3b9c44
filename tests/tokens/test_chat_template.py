"""Chat templates as they are rendered: on the run's date, and whether or not they ask if there are tools."""

from __future__ import annotations

import copy
import datetime
import locale

import pytest

from rlft.tokens import chat_template
from rlft.tokens.chat_template import date_of, dated, formatted, render, rendered
from tests.helpers.family_tokenizers import family_tokenizer

TODAY = "{% set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}Today: {{ day }}\n"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHAT = [{"role": "user", "content": "2 + 3?"}]


def tokenizer_with(template):
    tokenizer = copy.deepcopy(family_tokenizer("qwen2.5"))
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_writes_the_tokenizers_date_on_whatever_day_it_is_rendered(monkeypatch):
    tokenizer = dated(tokenizer_with(TODAY + LOOP + START), "2026-02-03")
    texts = []
    for day in ("2026-02-03", "2026-12-31"):
        monkeypatch.setattr(chat_template, "today", lambda day=day: day)
        texts.append(render(tokenizer, CHAT, start=True))
    assert texts == ["Today: 03 Feb 2026\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_without_a_date_it_is_todays_which_is_then_kept(monkeypatch):
    monkeypatch.setattr(chat_template, "today", lambda: "2026-12-31")
    tokenizer = dated(tokenizer_with(TODAY + LOOP), "auto")
    monkeypatch.setattr(chat_template, "today", lambda: "2027-01-01")
    assert date_of(tokenizer) == "2026-12-31"
    assert render(tokenizer, CHAT).startswith("Today: 31 Dec 2026\n")


def test_a_date_has_english_names_in_every_locale():
    forms = ["%d %b %Y", "%A, %B %-d", "%Y-%m-%d %H:%M", "100 %% %a %h %p %x"]
    date = datetime.date(2026, 3, 1)
    expected = ["01 Mar 2026", "Sunday, March 1", "2026-03-01 00:00", "100 % Sun Mar AM 03/01/26"]
    before = locale.setlocale(locale.LC_TIME)
    known = []
    try:
        for name in ("C", "de_DE.UTF-8", "fr_FR.UTF-8"):
            try:
                locale.setlocale(locale.LC_TIME, name)
            except locale.Error:  # not on this machine
                continue
            known.append(name)
            assert [formatted(date, form) for form in forms] == expected
    finally:
        locale.setlocale(locale.LC_TIME, before)
    assert known


def test_a_template_that_goes_through_the_tools_without_asking_gets_none_of_them():
    tokenizer = tokenizer_with("{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + LOOP)
    assert rendered(tokenizer, [CHAT, CHAT]) == ["<|im_start|>user\n2 + 3?<|im_end|>\n"] * 2
    asking = tokenizer_with("{% if tools is not none %}tools {% endif %}" + LOOP)
    assert not render(asking, CHAT).startswith("tools")


def test_what_a_template_refuses_is_not_tried_again():
    tokenizer = tokenizer_with("{% if tools is none %}{{ raise_exception('no chat') }}{% endif %}" + LOOP)
    with pytest.raises(Exception, match="no chat"):
        render(tokenizer, CHAT)
