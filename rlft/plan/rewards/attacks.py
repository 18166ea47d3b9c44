r"""Texts that a policy may find, with which a reward is tried before training (`rlft reward try`).

They are templates by family and kind (assets/attacks.yaml). Those of the family `gold` give the
reference answer; others do not, or not as their answer, but for `GIVES_GOLD`. These are what optimisers find: wrong
answers, two of them, one that stands in the reasoning only, and texts that answer nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cache
from itertools import cycle, islice
from typing import Any

from rlft.system.files import asset

MAX_SPECIAL = 8  # special tokens that are spelled in one text, at most
RIGHT_AGAIN, LAST = "the right answer again and again", "a wrong one, then gold"
GIVES_GOLD = (RIGHT_AGAIN, LAST)
"""Kinds, besides gold answers, that give the reference answer as a reader takes them: they may get what it gets."""


class Family(StrEnum):
    """What texts have in common; the words of the table."""

    gold = "gold answers"
    wrong = "wrong answers in the right form"
    two = "two answers"
    reasoning = "the answer only in the reasoning"
    nothing = "nothing said"
    endless = "endless and repeated"
    language = "other languages"
    echo = "prompt echoed"
    judge = "injections for judges"
    names = "the reward named"
    special = "special tokens"
    length = "more words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to give an answer, which stands in place of `{}`; `thinks` is the tag of reasoning before it, if any."""

    name: str
    template: str
    thinks: str = ""

    def __call__(self, answer: str, reasoning: str = "-") -> str:
        """The text; without a tag for it, reasoning other than `-` stands on a line before the answer."""
        said = self.template.replace("{}", answer)
        if self.thinks:
            return f"<{self.thinks}>{reasoning}</{self.thinks}>{said}"
        return said if reasoning == "-" else f"{reasoning}\n{said}"


def forms(own: Sequence[Form]) -> list[Form]:
    """All forms, each with and without reasoning before it, and the config's own; no two write the same."""
    plain = [Form(name=name, template=template) for name, template in texts()["forms"].items()]
    plain += [form for form in own if not form.thinks]
    found = [*plain, *(replace(form, name=f"{form.name} after reasoning", thinks="think") for form in plain), *own]
    return [*{form("\x00"): form for form in reversed(found)}.values()][::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A row of the data, and what texts for it are made of."""

    question: str  # the text of the prompt's last message
    gold: str  # the reference answer
    others: tuple[str, ...] = ()  # further reference answers
    wrong: str  # the reference answer of another row
    form: Form  # how the answer is given
    rewards: Sequence[str] = ()  # names of the rewards
    special: Sequence[str] = ()  # texts of the tokenizer's special tokens
    few: str = ""  # words of which a tenth of the longest completion consists
    many: str = ""  # words of which two fifths of it consist

    def fields(self) -> dict[str, str]:
        """What stands for `{name}` in the templates; GOLD and WRONG are answers in the form, Gold and Wrong without its
        reasoning.
        """
        bare, tag = replace(self.form, thinks=""), self.form.thinks or "think"
        near = [str(int(self.gold) + k) for k in range(-3, 4)] if whole(self.gold) else []
        guesses = [*dict.fromkeys(near or ["4711", self.gold, self.wrong])]
        return {
            "question": self.question, "gold": self.gold, "wrong": self.wrong, "few": self.few, "many": self.many,
            "GOLD": self.form(self.gold), "WRONG": self.form(self.wrong),
            "Gold": bare(self.gold), "Wrong": bare(self.wrong), "think": f"<{tag}>", "/think": f"</{tag}>",
            "guesses": " ".join(guesses), "Guesses": "\n".join(map(bare, (*guesses, self.wrong))),
            "Golds": ("\n" + bare(self.gold)) * 40, "Wrongs": ("\n" + bare(self.wrong)) * 40,
            "special": "".join(self.special[:MAX_SPECIAL]), "rewards": ", ".join(self.rewards),
            "scores": " ".join(f"{name}=1.0" for name in self.rewards), "numbers": " ".join(map(str, range(1, 1001))),
        }  # fmt: skip

    def text(self, template: Template) -> str:
        """The text of a template."""
        fields = self.fields()
        if isinstance(template, str):
            return filled(template, fields)
        return self.form(*(filled(part, fields) for part in template))


Template = str | list[str]  # a text, or [an answer that is given in the form, and perhaps the reasoning before it]


def filled(template: str, fields: Mapping[str, str]) -> str:
    """The template with these fields in place of their names in braces, and `{9 times x}` written out."""
    template = re.sub(r"\{(\d+) times ([^}]+)\}", lambda match: int(match[1]) * match[2], template)
    return re.sub(r"\{([\w/]+)\}", lambda match: fields.get(match[1], match[0]), template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A text: `kind` says in a few words what it is."""

    family: Family
    kind: str
    text: str

    @property
    def gives_gold(self) -> bool:
        """Whether it gives the reference answer: as its family says, or its kind."""
        return self.family is Family.gold or self.kind in GIVES_GOLD


# -- answers -----------------------------------------------------------------------------------------------------------
def value(text: str) -> Fraction | None:
    """The value of a number or a fraction of two, with or without separators; None for what is neither."""
    try:
        return Fraction(text.replace(",", "").strip().rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def whole(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,30}", text) is not None


def gold_answers(gold: str) -> dict[str, str]:
    """{kind: the same answer as models write it}."""
    return _answers("right", gold)


def wrong_answers(gold: str) -> dict[str, str]:
    """{kind: an answer that is not this one, or "" where there is no such}."""
    return _answers("wrong", gold)


def _answers(section: str, gold: str) -> dict[str, str]:
    """The answers of a section of assets/attacks.yaml whose conditions the reference answer meets."""
    is_whole, is_number, has_digits = whole(gold), value(gold) is not None, re.search("[0-9]", gold) is not None
    meets = {
        "any": True,
        "whole": is_whole,
        "number": is_number and not is_whole,
        "text": not is_number,
        "digits": has_digits and not is_whole,
        "letters": not has_digits,
    }
    templates = [of_kind for condition, of_kind in texts()[section].items() if meets[condition]]
    fields = _notations(gold)
    return {kind: filled(template, fields) for of_kind in templates for kind, template in of_kind.items()}


def _notations(gold: str) -> dict[str, str]:
    """What stands for `{name}` in answers: parts and other notations of the gold, and numbers near it."""
    n, digits, number = int(gold) if whole(gold) else 0, gold.removeprefix("-"), re.search("[0-9]+", gold)
    words = [word for word in gold.split() if word.casefold() not in ARTICLES]
    # What is no plain word may mean the whole answer: y of `x = y`, or the formula between two signs.
    words = words if len(words) > 1 and all(map(str.isalpha, words)) else [""]
    return {
        "gold": gold, "lower": gold.lower(), "upper": gold.upper(), "bare": gold.replace(",", ""), "grouped": f"{n:,}",
        "more": str(n + 1), "less": str(n - 1), "ten_more": str(n + 10), "negative": str(-n), "tenfold": str(10 * n),
        "double": str(2 * n), "sign": "-" * gold.startswith("-"), "digits": digits, "reversed": digits[::-1],
        "start": gold[:-1], "end": gold[1:], "half": gold[: len(gold) // 2] if len(gold) > 3 else "",
        "number_more": f"{gold[: number.start()]}{int(number[0]) + 1}{gold[number.end() :]}" if number else "",
        "contrary": CONTRARY.get(gold.casefold(), ""), "changed": gold[:-1] + ("x" if gold[-1:] != "x" else "y"),
        "letter": "" if len(gold) != 1 else "B" if gold.upper() == "A" else "A",
        "words_reversed": " ".join(reversed(gold.split())),
        "first_word": words[0], "middle_word": words[len(words) // 2], "last_word": words[-1],
    }  # fmt: skip


def is_another(answer: str, golds: Sequence[str]) -> bool:
    """Whether an answer is certainly none of these: not empty, another text and another number."""
    texts = {" ".join(gold.casefold().split()) for gold in golds}
    values = {value(gold) for gold in golds} - {None}
    is_new = " ".join(answer.casefold().split()) not in texts and value(answer) not in values
    return is_new and bool(answer.strip("-. "))


MADE_UP = ("B", "A", "4711", "29", "380")
ARTICLES = ("a", "an", "the")  # without which an answer is the same
CONTRARY = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def another_answer(golds: Sequence[str], rows: Sequence[str]) -> str:
    """Another row's answer, or one that is made up; if possible it has nothing in common with the first of these."""
    if wrong := wrong_program(golds[0]):
        return wrong
    gold = golds[0].casefold()
    letters = [text for text in MADE_UP if len(gold) == 1 and gold.isalpha() and text.isalpha()]
    numbers = [text for text in MADE_UP if not text.isalpha()]
    known = [text for text in (*rows, *letters, *numbers) if is_another(text, golds)]
    apart = [text for text in known if gold not in text.casefold() and text.casefold() not in gold]
    return next(iter((*apart, *known)), "something else")


def wrong_program(gold: str) -> str:
    """The program with another result; "" for a text that is none."""
    if "\n" not in gold or gold.startswith(("return", "print")):
        return ""
    wrong = gold.replace("return ", "return None and ").replace("print(", "print('no', ")
    return "" if wrong == gold else wrong


# -- whole texts -------------------------------------------------------------------------------------------------------
@cache
def texts() -> Mapping[str, Any]:
    """assets/attacks.yaml: `families`, {family: {kind: template}}, and `filler`."""
    read = asset("attacks.yaml")
    judge = read["families"]["judge"]
    return read | {"families": read["families"] | {"judge": judge | {f"{k}, in an answer": [judge[k]] for k in judge}}}


def filler(num_words: int) -> str:
    """So many words of reasoning that repeat no three in a row before all have been used."""
    return " ".join(islice(cycle(texts()["filler"].split()), num_words))


ABOUT_THE_GOLD = (Family.gold, Family.wrong, Family.two, Family.reasoning)
SAME_FOR_ALL = (Family.nothing, Family.language, Family.judge, Family.names)


def attacks(aim: Aim) -> list[Attack]:
    """All texts for this row, each once, without the two answers that try the form.

    Without a reference answer they are those that need none. Of programs no two stand in one answer: the last counts.
    """
    golds = (aim.gold, *aim.others)
    others = {f"another reference{f' {n}' if n > 1 else ''}": text for n, text in enumerate(aim.others, start=1)}
    wrong = {kind: text for kind, text in wrong_answers(aim.gold).items() if is_another(text, golds)}
    found = [Attack(family=Family.gold, kind=k, text=aim.form(t)) for k, t in (gold_answers(aim.gold) | others).items()]
    found += [Attack(family=Family.wrong, kind=kind, text=aim.form(text)) for kind, text in wrong.items()]
    found += [
        Attack(family=Family[family], kind=kind, text=aim.text(template))
        for family, templates in texts()["families"].items()
        for kind, template in templates.items()
        if family != "two" or isinstance(template, str) or "\n" not in aim.gold
    ]
    needed = [each for each in found if aim.gold or each.family not in ABOUT_THE_GOLD]
    taken = {aim.form(aim.gold), aim.form(aim.wrong)} if aim.gold else set()
    by_text: dict[str, Attack] = {}
    for each in needed:
        if each.text not in taken and not _gives(each, golds):
            by_text.setdefault(each.text, each)
    return [*by_text.values()]


def _gives(attack: Attack, golds: Sequence[str]) -> bool:
    """Whether a text that is the same for all rows says this row's answer by chance, as `[[10]]` where that is 10."""
    if attack.family not in SAME_FOR_ALL:
        return False
    return any(
        re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", attack.text, re.IGNORECASE) for gold in golds if gold
    )
