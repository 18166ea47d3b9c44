"""What the scores of tried texts say about rewards and their weights: functions of the scores alone.

A reward reads the answer if the reference answer gets more than another row's in the same form. Then a text is accepted
if it gets at least half of what lies between these two. Other rewards judge the form: they are at fault where a text
that says nothing has all the points for the form, or where one gets more than any ordinary answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from rlft.reward.attacks import Family, number_in
from rlft.reward.attacks import value as value_of
from rlft.types import counted

EPS = 1e-6
SLOW_STEP_S = 10.0
"""Seconds of scoring in a step from which a reward is called slow."""
MAX_KINDS = 6
SMALL = 0.01
"""The part of what being right is worth that points for the form are at least."""
MORE_AND_MORE = 2
MANY_SCORES = 8
"""So many different scores at least, one for each length, make a reward of length alone."""


class Verdict(StrEnum):
    """`limit`: not wrong by itself, but to be known; `skipped` was not tried."""

    ok = "ok"
    limit = "limit"
    wrong = "wrong"
    skipped = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: what was found, in words, and what to do."""

    name: str
    status: Verdict
    value: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A text in a form, as a completion of a row's prompt, and what each reward said of it, before its weight.

    Attributes:
        scores: {reward: its score, or what `on_error` gives}; None where the run would end; absent: not tried.
        errors: {reward: how it failed}.
        seconds: {reward: time for this completion}.
    """

    family: Family
    kind: str
    form: str
    prompt: str
    gold: str
    text: str
    tokens: int
    scores: Mapping[str, float | None]
    errors: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether it gives the reference answer: as its family says, or where its text has been made shorter."""
        return self.family is Family.gold or self.kind.startswith("the right answer")

    def total(self, weights: Mapping[str, float]) -> float | None:
        """The weighted sum; None where a reward gave no score."""
        scores = [self.scores.get(name) for name in weights]
        if None in scores:
            return None
        return sum(weight * (score or 0.0) for weight, score in zip(weights.values(), scores, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """All that was tried.

    Attributes:
        weights: {reward: weight}, the main reward first.
        form: the name of the form in which the total of a reference answer is highest.
        forms: {reward: the same for this reward alone}.
        differing: {reward: whether other scores came "the second time" or "among siblings"}.
        at_once: {reward: completions that it scores at the same time}, where these are more than one.
        cheapest: the text with the fewest tokens whose total is that of a reference answer; None: not known.
    """

    shots: Sequence[Shot]
    weights: Mapping[str, float]
    form: str
    forms: Mapping[str, str]
    differing: Mapping[str, str] = field(default_factory=dict)
    at_once: Mapping[str, int] = field(default_factory=dict)
    cheapest: Shot | None = None

    def rows(self, completions_per_step: int, workers: int) -> list[Row]:
        """The verdicts on each reward, and then on their sum; `workers` score a step's completions."""
        rows: list[Row] = []
        for number, name in enumerate(self.weights):
            rows += _of_reward(Scored.by(self, name), is_main=number == 0)
            rows += _of_time(self, name, completions_per_step / max(1, workers) / self.at_once.get(name, 1))
        return [*rows, *_of_total(Scored.by(self, None), self.cheapest)]

    def summary(self) -> list[str]:
        """The two lines of `rlft plan`."""
        scored = Scored.by(self, None)
        accepted, forms = scored.gold_forms()
        bad = [f"{family}: {kind}" for family in Family for kind in scored.bad_kinds(family)]
        wrong = listed(bad, 3) if bad else "none"
        first = f"gold answers accepted in {len(accepted)} of {len(forms)} forms; wrong texts accepted: {wrong}"
        return [first, f"cheapest text: {shown_cheapest(self.cheapest)}; {scored.worth()}"]


Points = dict[tuple[Family, str], list[tuple[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One reward's points for texts, or the total's: scores times the sign of the weight, so that more is better.

    Attributes:
        points: {(family, kind): [(prompt, points)]} in the form in which it pays most for the reference answer.
        lowest: {prompt: the least points of a wrong answer in any form}.
        right, wrong: {prompt: points of the reference answer and of another row's}.
        all_points: of all texts, in any form.
        of_length: whether the points depend on the length of a text alone.
        errors: {family and kind: (how it failed, whether that ends the run)}.
        differs: when the same texts got other scores; "" if they did not.
    """

    name: str
    points: Points
    lowest: Mapping[str, float]
    right: Mapping[str, float]
    wrong: Mapping[str, float]
    all_points: Sequence[float]
    of_length: bool
    errors: Mapping[str, tuple[str, bool]]
    differs: str

    @classmethod
    def by(cls, tried: Tried, name: str | None) -> Scored:
        """The points by this reward; None: by the sum of all."""
        form = tried.form if name is None else tried.forms[name]
        sign = 1.0 if name is None or tried.weights[name] >= 0 else -1.0

        def points_of(shot: Shot) -> float | None:
            score = shot.total(tried.weights) if name is None else shot.scores.get(name)
            return None if score is None else sign * score

        points: Points = {}
        lowest: dict[str, float] = {}
        every: list[float] = []
        by_length: tuple[dict[int, set[float]], ...] = ({}, {})
        errors: dict[str, tuple[str, bool]] = {}
        for shot in tried.shots:
            if name is not None and name in shot.errors:
                errors.setdefault(f"{shot.family}: {shot.kind}", (shot.errors[name], shot.scores[name] is None))
            if (value := points_of(shot)) is None:
                continue
            every.append(value)
            for lengths, length in zip(by_length, (shot.tokens, len(shot.text)), strict=True):
                lengths.setdefault(length, set()).add(round(value, 6))
            if shot.family is Family.wrong and shot.kind == shot.form:
                lowest[shot.prompt] = min(value, lowest.get(shot.prompt, math.inf))
            if shot.form == form:
                points.setdefault((shot.family, shot.kind), []).append((shot.prompt, value))
        return cls(
            name="all rewards" if name is None else name,
            points=points,
            lowest=lowest,
            right=dict(points.get((Family.gold, form), ())),
            wrong=dict(points.get((Family.wrong, form), ())),
            all_points=every,
            of_length=any(is_of_length(lengths) for lengths in by_length),
            errors=errors,
            differs="" if name is None else tried.differing.get(name, ""),
        )

    @property
    def gain(self) -> float:
        """What being right is worth: points of the reference answer minus those of another row's, in one form."""
        both = self.right.keys() & self.wrong.keys()
        return fmean(self.right[p] - self.wrong[p] for p in both) if both else 0.0

    @property
    def form_gain(self) -> float:
        """What the form is worth: points of a wrong answer in the best form minus those in the worst."""
        both = self.wrong.keys() & self.lowest.keys()
        return fmean(self.wrong[p] - self.lowest[p] for p in both) if both else 0.0

    @property
    def reads(self) -> bool:
        return self.gain > EPS

    def share(self, key: tuple[Family, str], holds: Callable[[str, float], bool]) -> float:
        """The share of prompts for which this holds of the prompt and the points of such a text."""
        found = self.points.get(key, [])
        return sum(holds(prompt, value) for prompt, value in found) / len(found) if found else 0.0

    def accepted(self, prompt: str, value: float) -> bool:
        """Whether it gets at least half of what being right is worth."""
        if prompt not in self.right or prompt not in self.wrong:
            return False
        return value >= (self.right[prompt] + self.wrong[prompt]) / 2 and self.right[prompt] > self.wrong[prompt] + EPS

    def beats(self, prompt: str, value: float) -> bool:
        """Whether it gets more than an ordinary answer, right or wrong."""
        ordinary = [points[prompt] for points in (self.right, self.wrong) if prompt in points]
        return bool(ordinary) and value > max(ordinary) + EPS

    def has_form_points(self, prompt: str, value: float) -> bool:
        """Whether it gets all points for the form, where there are any."""
        if prompt not in self.wrong or prompt not in self.lowest:
            return False
        least = max(EPS, SMALL * self.gain)
        return self.wrong[prompt] > self.lowest[prompt] + least and value >= self.wrong[prompt] - EPS

    def kinds(self, family: Family) -> list[str]:
        return [kind for of, kind in self.points if of is family]

    def gold_forms(self) -> tuple[list[str], list[str]]:
        """(kinds of gold answers that are accepted for most prompts, all kinds)."""
        kinds = self.kinds(Family.gold)
        return [kind for kind in kinds if self.share((Family.gold, kind), self.accepted) > 0.5], kinds

    def bad_kinds(self, family: Family) -> list[str]:
        """The kinds of this family that get what they should not get."""
        if family in (Family.gold, Family.length):
            return [
                kind for kind in self.kinds(family) if family is Family.gold and self._bad(family, kind, self.beats)
            ]
        bad = [kind for kind in self.kinds(family) if self._bad(family, kind, self._is_bad(family, kind))]
        if family is Family.two and {FIRST, LAST} & {*bad} == {LAST}:
            bad.remove(LAST)  # the last answer counts, as a reader takes it
        return bad

    def as_good_as_right(self) -> list[str]:
        """The kinds of wrong texts that get all that the right answer gets, or more."""
        kinds = [(family, kind) for family in REMEDIES if family is not Family.gold for kind in self.bad_kinds(family)]
        full = {key for key in kinds if self.share(key, lambda prompt, value: value >= self.right[prompt] - EPS)}
        return [f"{family}: {kind}" for family, kind in kinds if (family, kind) in full]

    def _bad(self, family: Family, kind: str, holds: Callable[[str, float], bool]) -> bool:
        return self.share((family, kind), holds) > 0

    def _is_bad(self, family: Family, kind: str) -> Callable[[str, float], bool]:
        if family is Family.nothing:
            return lambda prompt, value: any(
                f(prompt, value) for f in (self.accepted, self.beats, self.has_form_points)
            )
        if family is Family.endless and kind.startswith("the right answer"):
            return self.beats
        return lambda prompt, value: self.accepted(prompt, value) or self.beats(prompt, value)

    def mean(self, family: Family, kind: str) -> float:
        found = [value for _, value in self.points.get((family, kind), [])]
        return fmean(found) if found else math.nan

    def shown(self, family: Family, kind: str) -> str:
        """The kind, with its points where they are more than the right answer's."""
        mean = self.mean(family, kind)
        return f"{kind} ({mean:.3g})" if self.right and mean > fmean(self.right.values()) + EPS else kind

    def growth(self, answer: str) -> int:
        """Whether the same answer gets more with more words before it: MORE_AND_MORE, 1 up to a length, 0 no."""
        none, some, many = (
            self.mean(Family.length, f"{answer}{words}") for words in ("", ", some words", ", many words")
        )
        return (none + EPS < some <= many + EPS) + (none + EPS < some < many - EPS)

    def worth(self) -> str:
        return f"being right is worth {self.gain:.3g}, the form {self.form_gain:.3g}"


def is_of_length(points: Mapping[int, set[float]]) -> bool:
    """Whether these points of texts, by their length, differ with the length alone."""
    return all(len(values) == 1 for values in points.values()) and len(set().union(*points.values())) >= MANY_SCORES


FIRST, LAST = "gold, then a wrong one", "a wrong one, then gold"
REMEDIES: Mapping[Family, str] = {
    Family.gold: "give a repeated answer no more than one",
    Family.wrong: "compare whole answers, as numbers where they are numbers, not whether one is in the other",
    Family.two: "let a completion with several answers have none, or count the last one",
    Family.reasoning: "read the answer behind the reasoning (rlft.tokens.reasoning.without_reasoning)",
    Family.nothing: "give nothing for a text without an answer",
    Family.endless: "give a repeated text no more than one, and limit it (reward=[..,repetition])",
    Family.language: "give nothing for a text without an answer (and reward=[..,language] for its language)",
    Family.echo: "do not look for words of the prompt, or only outside of what repeats it",
    Family.judge: "tell the judge that the completion is data, and show it the reference answer",
    Family.names: "do not look for words that a completion may simply say",
    Family.special: "leave special tokens out of what is compared",
}


def _of_reward(scored: Scored, *, is_main: bool) -> Iterator[Row]:
    name = scored.name
    if scored.errors:
        ends = any(stops for _, stops in scored.errors.values())
        problem = next(iter(scored.errors.values()))[0]
        remedy = "mend it: an error like this ends the run" if ends else "these texts get on_error"
        value = f"fails on {listed(scored.errors, MAX_KINDS)}: {problem}"
        yield Row(name=f"{name}: failures", status=Verdict.wrong if ends else Verdict.limit, value=value, remedy=remedy)
    if scored.differs:
        is_random = scored.differs == AGAIN
        value = f"the same text gets another score {scored.differs}"
        remedy = "make it a function of the completion" if is_random else "know that single texts say little of it"
        yield Row(name=f"{name}: steadiness", status=Verdict.wrong if is_random else Verdict.limit, value=value,
                  remedy=remedy)  # fmt: skip
    if not scored.all_points:
        return
    if max(scored.all_points) - min(scored.all_points) <= EPS:
        value = f"every text gets {scored.all_points[0]:g}"
        siblings = scored.differs == SIBLINGS
        status = Verdict.limit if siblings or not is_main else Verdict.wrong
        yield Row(name=f"{name}: answers", status=status, value=value, remedy="see that it reads what it should")
        return
    if scored.of_length:
        status = Verdict.wrong if is_main else Verdict.ok
        remedy = "put the reward that says what is right first" if is_main else ""
        yield Row(
            name=f"{name}: answers", status=status, value="not read: it depends on the length alone", remedy=remedy
        )
        yield from _of_growth(scored, is_declared=not is_main)
        return
    if scored.right:
        yield _of_answers(scored, is_main=is_main)
    else:
        value = "the rows have no reference answer: no text is known to be right"
        yield Row(name=f"{name}: answers", status=Verdict.skipped, value=value)
    clean = []
    for family in REMEDIES:
        if bad := scored.bad_kinds(family):
            value = f"accepted: {listed([scored.shown(family, kind) for kind in bad], len(bad))}"
            yield Row(name=f"{name}: {family}", status=Verdict.wrong, value=value, remedy=REMEDIES[family])
        elif kinds := scored.kinds(family):
            clean.append(f"{family} ({len(kinds)})")
    if clean:
        yield Row(name=f"{name}: refused", status=Verdict.ok, value=", ".join(clean))
    yield from _of_growth(scored)


def _of_growth(scored: Scored, *, is_declared: bool = False) -> Iterator[Row]:
    """Whether more words get more; `is_declared`: length is what the reward is there for."""
    growth = {answer: scored.growth(answer) for answer in ("right", "wrong")}
    if any(growth.values()):
        status = Verdict.wrong if growth["right"] == MORE_AND_MORE and not is_declared else Verdict.limit
        answers = " and ".join(answer for answer, grows in growth.items() if grows)
        value = f"{answers} answers get more, the more words stand before them"
        value += ", up to a length" * (MORE_AND_MORE not in growth.values())
        remedy = "see that length is what you want to reward, and limit it (reward=[..,overlong])"
        yield Row(name=f"{scored.name}: {Family.length}", status=status, value=value, remedy=remedy)


def _of_answers(scored: Scored, *, is_main: bool) -> Row:
    """Whether it reads the answer, and in which forms the right one is accepted."""
    name = f"{scored.name}: {Family.gold}"
    if scored.gain < -EPS:
        value = f"a wrong answer gets {-scored.gain:.3g} more than the right one"
        return Row(name=name, status=Verdict.wrong, value=value, remedy="turn the comparison, or the weight, round")
    if not scored.reads:
        words = scored.mean(Family.wrong, "words")
        answers = "any number" if fmean(scored.wrong.values()) > words + EPS else "any answer"
        value = f"not read: {answers} gets what the right one gets"
        remedy = (
            "compare it with group.prompt.answer: this reward comes first and says what is right" if is_main else ""
        )
        return Row(name=name, status=Verdict.wrong if is_main else Verdict.ok, value=value, remedy=remedy)
    accepted, kinds = scored.gold_forms()
    refused = [kind for kind in kinds if kind not in accepted]
    value = f"accepted in {len(accepted)} of {len(kinds)} forms"
    if not refused:
        return Row(name=name, status=Verdict.ok, value=value)
    remedy = "say in the prompt which form counts, or accept these"
    return Row(name=name, status=Verdict.limit, value=f"{value}; not: {listed(refused, len(refused))}", remedy=remedy)


AGAIN, SIBLINGS = "the second time", "among siblings"


def _of_time(tried: Tried, name: str, per_worker: float) -> Iterator[Row]:
    seconds = sorted(shot.seconds[name] for shot in tried.shots if name in shot.seconds)
    if not seconds:
        return
    p50, p99 = (seconds[(len(seconds) - 1) * percent // 100] for percent in (50, 99))
    step_s = fmean(seconds) * per_worker
    value = f"p50 {p50:.2g} s, p99 {p99:.2g} s for a completion, about {step_s:.3g} s for a step"
    if left := sum(name not in shot.scores for shot in tried.shots):
        value += f"; out of time, {left} of {len(tried.shots)} texts were not tried"
    is_slow = step_s > SLOW_STEP_S or left
    remedy = "make it faster, or raise scoring.workers" if is_slow else ""
    yield Row(name=f"{name}: seconds", status=Verdict.wrong if is_slow else Verdict.ok, value=value, remedy=remedy)


def _of_total(scored: Scored, cheapest: Shot | None) -> Iterator[Row]:
    if cheapest is not None:
        status, remedy = Verdict.ok, ""
        if not cheapest.is_right or not number_in(cheapest.text, cheapest.gold):
            is_certain = not cheapest.is_right or value_of(cheapest.gold) is not None
            status = Verdict.wrong if is_certain else Verdict.limit
            remedy = "a policy finds it: mend the reward that pays for it" if is_certain else "see whether it answers"
        yield Row(name="cheapest text", status=status, value=shown_cheapest(cheapest), remedy=remedy)
    if not scored.right:
        return
    if best := scored.as_good_as_right():
        remedy = "a policy may learn these instead: mend the rewards that pay for them, or their weights"
        value = f"as good as the right answer: {listed(best, MAX_KINDS)}"
        yield Row(name="all rewards", status=Verdict.wrong, value=value, remedy=remedy)
    value, remedy, status = scored.worth(), "", Verdict.ok
    if scored.form_gain >= scored.gain - EPS:
        status, remedy = Verdict.wrong, "lower the weights of the rewards that do not read the answer"
        value += ": a wrong answer in form gets as much as a right one without it"
    yield Row(name="weights", status=status, value=value, remedy=remedy)


def score_lines(tried: Tried) -> Iterator[tuple[str, str, list[float | None]]]:
    """(text, an example, mean score by each reward and of the total): every form and gold answer, then the families.

    Of a family of wrong texts it is the kind that gets most.
    """
    by_kind: dict[tuple[Family, str], list[Shot]] = {}
    for shot in tried.shots:
        if shot.form == tried.form or (shot.kind == shot.form and shot.family is Family.gold):
            by_kind.setdefault((shot.family, shot.kind), []).append(shot)

    def means(shots: Sequence[Shot]) -> list[float | None]:
        columns = [[shot.scores.get(name) for shot in shots] for name in tried.weights]
        columns.append([shot.total(tried.weights) for shot in shots])
        known = [[score for score in column if score is not None] for column in columns]
        return [fmean(scores) if scores else None for scores in known]

    for (family, kind), shots in by_kind.items():
        if family is Family.gold:
            yield f"right, {kind}", shots[0].text, means(shots)
    for family in (family for family in Family if family not in (Family.gold, Family.length)):
        found = {kind: means(shots) for (of, kind), shots in by_kind.items() if of is family}
        if found:
            totals = {kind: -math.inf if mean[-1] is None else mean[-1] for kind, mean in found.items()}
            kind = max(totals, key=totals.__getitem__)
            yield f"{family} ({len(found)}): {kind}", by_kind[family, kind][0].text, found[kind]


def shown_cheapest(shot: Shot | None) -> str:
    if shot is None:
        return "none has the full reward"
    text = shot.text if len(shot.text) <= 60 else f"{shot.text[:60]}.."
    return f"{counted(shot.tokens, 'token')} with the full reward: {text!r} ({shot.family}: {shot.kind})"


def listed(names: Iterable[str], most: int) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
