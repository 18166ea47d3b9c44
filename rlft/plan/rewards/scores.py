"""Texts with their scores: what was tried of rewards, and functions of the scores alone.

A reward reads the answer if the reference answer gets more than another row's in the same form. Then a text is accepted
if it gets at least half of what lies between these two. Other rewards judge the form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rlft.plan.rewards.attacks import Attack, Family, Form

EPS = 1e-6
SMALL = 0.01  # the part of what being right is worth that points for the form are at least
MORE_AND_MORE = 2
MANY_SCORES = 8
"""So many different scores at least, and texts of a length that another text has, make a reward of length alone."""
AGAIN, SIBLINGS = "the second time", "in a group"
WRONG = tuple(family for family in Family if family not in (Family.gold, Family.length))
"""The families of texts that do not give the right answer; more words are judged apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText(Attack):
    """A text as a completion of a row's prompt; rewards' scores before their weights, None where the run would end."""

    form: str
    prompt: str
    gold: str  # the row's reference answer
    tokens: int
    scores: Mapping[str, float | None] = field(default_factory=dict)  # {reward: score, or what on_error gives}
    errors: Mapping[str, str] = field(default_factory=dict)  # {reward: how it failed}
    seconds: Mapping[str, float] = field(default_factory=dict)  # {reward: time for this completion}

    def tries_form(self, family: Family) -> bool:
        """Whether it is the answer of this family by which a form is chosen."""
        return self.family is family and self.kind == self.form

    def total(self, weights: Mapping[str, float]) -> float | None:
        """The weighted sum; None where a reward gave no score."""
        scores = [self.scores.get(name) for name in weights]
        if None in scores:
            return None
        return sum(weight * (score or 0.0) for weight, score in zip(weights.values(), scores, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """All that was tried."""

    texts: Sequence[ScoredText]
    weights: Mapping[str, float]  # {reward: weight} of the run, the main reward first
    form: str  # the name of the form in which the total of a reference answer is highest; "" where it is not known
    forms: Mapping[str, str]  # {reward: the same for this reward alone}
    left_out: Mapping[str, str] = field(default_factory=dict)  # {reward: why it scored none of the texts}
    stopped: Mapping[str, str] = field(default_factory=dict)  # {reward: why it did not score all of them}
    differing: Mapping[str, str] = field(default_factory=dict)  # {reward: AGAIN or SIBLINGS} where scores differed
    noise: Mapping[str, float] = field(default_factory=dict)  # {reward: by how much scores differed the second time}
    groups: Mapping[str, str] = field(default_factory=dict)  # {reward: how it failed on siblings that it scores alone}
    late: frozenset[str] = frozenset()  # those beyond the run's time limit on a reference answer or a whole group
    at_once: Mapping[str, int] = field(default_factory=dict)  # {reward: completions scored together}, if several
    cheapest: ScoredText | None = None  # the text with the fewest tokens whose total is that of a reference answer


def rows_in_all_forms(texts: Iterable[ScoredText], names: Iterable[str]) -> set[str]:
    """The prompts whose answers were scored in all forms by all of these rewards."""
    in_forms = [text for text in texts if text.tries_form(Family.gold) or text.tries_form(Family.wrong)]
    return {t.prompt for t in in_forms} - {t.prompt for t in in_forms if not {*names} <= t.scores.keys()}


def best_form(texts: Sequence[ScoredText], known: Sequence[Form], weights: Mapping[str, float]) -> Form | None:
    """The form in which the weighted sum for reference answers is highest, the shortest one of equals.

    If none pays more for them than for wrong ones, but one less, it is that one. None: no row was scored in all forms.
    """
    rows = rows_in_all_forms(texts, weights)
    if not rows and any(text.family is Family.gold for text in texts):
        return None

    def paid(form: Form, family: Family) -> float:
        totals = [t.total(weights) for t in texts if t.prompt in rows and t.form == form.name and t.family is family]
        return round(sum(-math.inf if total is None else total for total in totals), 9)

    gains = {form.name: paid(form, Family.gold) - paid(form, Family.wrong) for form in known}  # nan: neither is known
    if not any(gain > EPS for gain in gains.values()) and any(gain < -EPS for gain in gains.values()):
        return min(known, key=lambda form: (gains[form.name], len(form("-"))))
    return max(known, key=lambda form: (paid(form, Family.gold), -len(form("-"))))


def cheapest_of(texts: Sequence[ScoredText], weights: Mapping[str, float], form: str) -> ScoredText | None:
    """The text with the fewest tokens whose total is at least that of the reference answer in the best form."""
    full = {t.prompt: t.total(weights) for t in texts if t.form == form and t.tries_form(Family.gold)}
    enough = [
        text
        for text in texts
        if (due := full.get(text.prompt)) is not None and (total := text.total(weights)) is not None
        if total >= due - EPS
    ]
    return min(enough, key=lambda text: (text.tokens, len(text.text), not text.gives_gold), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One reward's points for texts, or the total's: scores times the sign of the weight, so that more is better."""

    every: Sequence[tuple[ScoredText, float]]  # (text, points) of all texts, in any form
    points: Mapping[tuple[Family, str], Sequence[tuple[ScoredText, float]]]  # in the form that pays gold answers most
    right: Mapping[str, float]  # {prompt: points of the reference answer} in that form
    wrong: Mapping[str, float]  # {prompt: points of another row's answer} in that form
    lowest: Mapping[str, float]  # {prompt: the least points of a wrong answer in any form}, where all forms were scored
    eps: float  # points that differ by no more are the same

    @classmethod
    def by(cls, tried: Tried, name: str | None) -> Scored:
        """The points by this reward; None: by the sum of all."""
        weights = tried.weights if name is None else {name: math.copysign(1.0, tried.weights[name])}
        form = tried.form if name is None else tried.forms[name]
        every = [(text, total) for text in tried.texts if (total := text.total(weights)) is not None]
        points: dict[tuple[Family, str], list[tuple[ScoredText, float]]] = {}
        for text, value in every:
            if text.form == form:
                points.setdefault((text.family, text.kind), []).append((text, value))
        lowest: dict[str, float] = {}
        known = rows_in_all_forms(tried.texts, weights)
        for text, value in every:
            if text.prompt in known and text.tries_form(Family.wrong):
                lowest[text.prompt] = min(value, lowest.get(text.prompt, math.inf))
        right, wrong = (
            {text.prompt: value for text, value in points.get((family, form), [])}
            for family in (Family.gold, Family.wrong)
        )
        eps = EPS + 2 * sum(abs(weight) * tried.noise.get(of, 0.0) for of, weight in weights.items())
        return cls(every=every, points=points, right=right, wrong=wrong, lowest=lowest, eps=eps)

    @property
    def gain(self) -> float:
        """What being right is worth: points of the reference answer minus those of another row's, in the same form."""
        return fmean([self.right[p] - self.wrong[p] for p in self.right.keys() & self.wrong.keys()] or [0.0])

    @property
    def form_gain(self) -> float:
        """What the form is worth: points of a wrong answer in the best form minus those in the worst."""
        return fmean([self.wrong[p] - self.lowest[p] for p in self.wrong.keys() & self.lowest.keys()] or [0.0])

    @property
    def reads(self) -> bool:
        return self.gain > self.eps

    def worth(self) -> str:
        return f"being right is worth {self.gain:.3g}, the form {self.form_gain:.3g}"

    def accepts(self, text: ScoredText, value: float) -> bool:
        """Whether it gets at least half of what being right is worth."""
        right, wrong = self.right.get(text.prompt, 0.0), self.wrong.get(text.prompt, 0.0)
        return right > wrong + self.eps and value >= (right + wrong) / 2

    def beats(self, text: ScoredText, value: float) -> bool:
        """Whether it gets more than both ordinary answers, the right and the wrong one."""
        ordinary = [points[text.prompt] for points in (self.right, self.wrong) if text.prompt in points]
        return len(ordinary) == 2 and value > max(ordinary) + self.eps

    def is_bad(self, text: ScoredText, value: float) -> bool:
        """Whether it gets what it should not: more than an ordinary answer; without giving the right answer, what that
        gets; or, where it says nothing, all points for the form.
        """
        if self.beats(text, value):
            return True
        if text.gives_gold:
            return False
        wrong = self.wrong.get(text.prompt, 0.0)
        of_form = wrong - self.lowest.get(text.prompt, wrong)
        has_form = of_form > max(self.eps, SMALL * self.gain) and value >= wrong - self.eps
        return self.accepts(text, value) or (text.family is Family.nothing and has_form)

    def kinds(self, family: Family) -> list[str]:
        return [kind for of, kind in self.points if of is family]

    def bad_kinds(self, family: Family) -> list[str]:
        """The kinds of this family that get what they should not get, for any row; more words are judged apart."""
        kinds = [] if family is Family.length else self.kinds(family)
        return [kind for kind in kinds if any(self.is_bad(*found) for found in self.points[family, kind])]

    def refused(self) -> Iterator[tuple[Family, int, int]]:
        """(family, kinds of wrong texts that are not accepted for any row, all kinds that were scored)."""
        for family in WRONG:
            kinds = self.kinds(family)
            accepted = [kind for kind in kinds if any(self.accepts(*found) for found in self.points[family, kind])]
            if len(kinds) > len({*accepted, *self.bad_kinds(family)}):
                yield family, len(kinds) - len({*accepted, *self.bad_kinds(family)}), len(kinds)

    def gold_forms(self) -> tuple[list[str], list[str]]:
        """(kinds of gold answers that are accepted for most rows, all kinds)."""
        kinds = self.kinds(Family.gold)
        shares = {kind: fmean(self.accepts(*found) for found in self.points[Family.gold, kind]) for kind in kinds}
        return [kind for kind in kinds if shares[kind] > 0.5], kinds

    def as_good_as_right(self) -> list[str]:
        """The kinds of wrong texts that get all that the right answer gets, or more."""

        def has_all(text: ScoredText, value: float) -> bool:
            return text.prompt in self.right and value >= self.right[text.prompt] - self.eps

        bad = [(family, kind) for family in Family if family is not Family.gold for kind in self.bad_kinds(family)]
        return [f"{f}: {kind}" for f, kind in bad if any(has_all(*found) for found in self.points[f, kind])]

    def mean(self, family: Family, kind: str) -> float:
        found = [value for _, value in self.points.get((family, kind), [])]
        return fmean(found) if found else math.nan

    def shown(self, family: Family, kind: str) -> str:
        """The kind, with its points where they are more than the right answer's."""
        mean = self.mean(family, kind)
        return f"{kind} ({mean:.3g})" if self.right and mean > fmean(self.right.values()) + self.eps else kind

    def growth(self, answer: str) -> int:
        """Whether the same answer gets more with more words before it: MORE_AND_MORE, 1 up to a length, 0 no."""
        ordinary = self.right if answer == "right" else self.wrong
        none = fmean(ordinary.values() or [math.nan])
        some, many = (self.mean(Family.length, f"{answer}, {words} words") for words in ("some", "many"))
        return (none + self.eps < some <= many + self.eps) + (none + self.eps < some < many - self.eps)

    def is_of_length(self) -> bool:
        """Whether points differ, and texts of equal length (in tokens, or in characters) have equal ones."""
        points = [round(value, 6) for _, value in self.every]
        for lengths in ([text.tokens for text, _ in self.every], [len(text.text) for text, _ in self.every]):
            by_length = dict(zip(lengths, points, strict=True))
            is_function = all(by_length[n] == value for n, value in zip(lengths, points, strict=True))
            if is_function and len({*points}) >= MANY_SCORES and len(points) - len(by_length) >= MANY_SCORES:
                return True
        return False
