"""What the scores of tried texts say about rewards and their weights: functions of the scores alone.

A reward reads the answer if the reference answer gets more than another row's in the same form. Then a text is accepted
if it gets at least half of what lies between these two. Other rewards judge the form. A verdict is made only of texts
that were scored: rows say which were not, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rlft.reward.attacks import Attack, Family, number_in
from rlft.reward.attacks import value as value_of
from rlft.system.check_rows import CheckRow, Status
from rlft.types import counted

EPS = 1e-6
SLOW_STEP_S = 10.0
"""Seconds of scoring in a step from which a reward is called slow."""
MAX_KINDS = 6
SMALL = 0.01
"""The part of what being right is worth that points for the form are at least."""
MORE_AND_MORE = 2
MANY_SCORES = 8
"""So many different scores at least, and texts of a length that another text has, make a reward of length alone."""
AGAIN, SIBLINGS = "the second time", "among siblings"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText(Attack):
    """A text in a form, as a completion of a row's prompt, and what each reward said of it, before its weight.

    Attributes:
        gold: the row's reference answer.
        scores: {reward: its score, or what `on_error` gives}; None where the run would end; absent: not tried.
        errors: {reward: how it failed}.
        seconds: {reward: time for this completion}.
    """

    form: str
    prompt: str
    gold: str
    tokens: int
    scores: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

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
    """All that was tried.

    Attributes:
        weights: {reward: weight} of the run, the main reward first.
        form: the name of the form in which the total of a reference answer is highest; "" where it is not known.
        forms: {reward: the same for this reward alone}.
        left_out: {reward: why it scored none of the texts}.
        stopped: {reward: why it did not score all of them}.
        differing: {reward: whether other scores came "the second time" or "among siblings"}.
        noise: {reward: by how much scores differed the second time}.
        groups: {reward: how it failed on siblings that it scores alone}.
        late: rewards that exceeded the run's time limit on a reference answer, or on a group of the run's size.
        at_once: {reward: completions that it scores at the same time}, where these are more than one.
        cheapest: the text with the fewest tokens whose total is that of a reference answer; None: not known.
    """

    texts: Sequence[ScoredText]
    weights: Mapping[str, float]
    form: str
    forms: Mapping[str, str]
    left_out: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    differing: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    at_once: Mapping[str, int] = field(default_factory=dict)
    cheapest: ScoredText | None = None

    def rows(self, completions_per_step: int, workers: int) -> list[CheckRow]:
        """The verdicts on each reward, and then on their sum; `workers` score a step's completions."""
        rows: list[CheckRow] = []
        for number, (name, weight) in enumerate(self.weights.items()):
            if name in self.left_out:
                rows.append(CheckRow(name, Status.skipped, self.left_out[name]))
                continue
            found = list(_of_reward(self, name, is_main=number == 0))
            rows += _of_failures(self, name)
            rows += found if weight else [replace(row, status=_at_most_limit(row.status)) for row in found]
            rows += _of_time(self, name, completions_per_step / max(1, workers) / self.at_once.get(name, 1))
        return [*rows, *_of_total(self)]

    def summary(self) -> list[str]:
        """The two lines of `rlft plan`; one where not all of it is known."""
        scored = Scored.by(self, None)
        if self.left_out or self.stopped:
            return ["the rewards were not tried in whole: see rlft reward try"]
        if not scored.right:
            return ["right answers have no score: see rlft reward try"]
        accepted, forms = scored.gold_forms()
        bad = [f"{family}: {kind}" for family in Family for kind in scored.bad_kinds(family)]
        wrong = listed(bad, 3) if bad else "none"
        first = f"gold answers accepted in {len(accepted)} of {len(forms)} forms; wrong texts accepted: {wrong}"
        return [first, f"cheapest text: {shown_cheapest(self.cheapest)}; {scored.worth()}"]


def rows_in_all_forms(texts: Iterable[ScoredText], names: Iterable[str]) -> set[str]:
    """The prompts whose answers were scored in all forms by all of these rewards."""
    in_forms = [text for text in texts if text.tries_form(Family.gold) or text.tries_form(Family.wrong)]
    return {t.prompt for t in in_forms} - {t.prompt for t in in_forms if not {*names} <= t.scores.keys()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One reward's points for texts, or the total's: scores times the sign of the weight, so that more is better.

    Attributes:
        every: (text, points) of all texts, in any form.
        points: {(family, kind): [(text, points)]} in the form in which it pays most for the reference answer.
        right, wrong: {prompt: points of the reference answer and of another row's} in that form.
        lowest: {prompt: the least points of a wrong answer in any form}, where all forms were scored.
        eps: points that differ by no more are the same.
    """

    every: Sequence[tuple[ScoredText, float]]
    points: Mapping[tuple[Family, str], Sequence[tuple[ScoredText, float]]]
    right: Mapping[str, float]
    wrong: Mapping[str, float]
    lowest: Mapping[str, float]
    eps: float

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
        for family in (family for family in REMEDIES if family is not Family.gold):
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


def _at_most_limit(status: Status) -> Status:
    """Of a reward of weight 0, which no policy learns from."""
    return Status.limit if status is Status.wrong else status


def _of_failures(tried: Tried, name: str) -> Iterator[CheckRow]:
    failed = {f"{t.family}: {t.kind}": t for t in reversed(tried.texts) if name in t.errors}
    if failed:
        ends = any(text.scores[name] is None for text in failed.values())
        value = f"fails on {listed([*failed][::-1], MAX_KINDS)}: {[*failed.values()][-1].errors[name]}"
        remedy = "mend it: an error like this ends the run" if ends else "these texts get on_error"
        yield CheckRow(f"{name}: failures", Status.wrong if ends else Status.limit, value, remedy)
    if name in tried.groups:
        remedy = "return a score for each completion of a group"
        yield CheckRow(f"{name}: groups", Status.wrong, f"fails on a whole group: {tried.groups[name]}", remedy)


def _of_reward(tried: Tried, name: str, *, is_main: bool) -> Iterator[CheckRow]:
    scored, differs = Scored.by(tried, name), tried.differing.get(name)
    if differs is not None:
        value, is_random = f"the same text gets another score {differs}", differs == AGAIN
        remedy = "make it a function of the completion" if is_random else "know that single texts say little of it"
        yield CheckRow(f"{name}: steadiness", Status.wrong if is_random else Status.limit, value, remedy)
    title, points = f"{name}: answers", [value for _, value in scored.every]
    if name in tried.stopped:
        left = sum(name not in text.scores for text in tried.texts)
        value = f"{left} of {len(tried.texts)} texts were not tried: {tried.stopped[name]}"
        yield CheckRow(f"{name}: untried", Status.skipped, value, "try fewer rows, or make it faster")
    if not scored.right or not scored.wrong:
        has_answers = any(text.family is Family.gold for text in tried.texts)
        reason = "neither the right nor a wrong answer was scored in the form that it pays most for"
        reason = reason if has_answers else "the rows have no reference answer: no text is known to be right"
        yield CheckRow(title, Status.skipped, reason)
    elif max(points) - min(points) <= EPS:
        status = Status.limit if differs == SIBLINGS or not is_main else Status.wrong
        yield CheckRow(title, status, f"every text gets {points[0]:g}", "see that it reads what it should")
    elif scored.is_of_length():
        remedy = "put the reward that says what is right first" if is_main else ""
        value = "not read: it depends on the length alone"
        yield CheckRow(title, Status.wrong if is_main else Status.ok, value, remedy)
        yield from _of_growth(scored, name, is_declared=not is_main)
    else:
        yield _of_answers(scored, name, is_main=is_main)
        yield from _of_families(scored, name, is_main=is_main)
        yield from _of_growth(scored, name)


def _of_families(scored: Scored, name: str, *, is_main: bool) -> Iterator[CheckRow]:
    """What it pays for and what not; what a reward that need not read the answer pays for is judged in the sum."""
    status = Status.wrong if scored.reads or is_main else Status.limit
    verb = "accepted" if scored.reads else "paid like an answer, or more"
    for family, remedy in REMEDIES.items():
        if bad := scored.bad_kinds(family):
            value = f"{verb}: {listed([scored.shown(family, kind) for kind in bad], len(bad))}"
            yield CheckRow(f"{name}: {family}", status, value, remedy)
    refused = [f"{family} ({n if n == every else f'{n} of {every}'})" for family, n, every in scored.refused()]
    if refused and scored.reads:
        yield CheckRow(f"{name}: refused", Status.ok, ", ".join(refused))


def _of_growth(scored: Scored, name: str, *, is_declared: bool = False) -> Iterator[CheckRow]:
    """Whether more words get more; `is_declared`: length is what the reward is there for."""
    growth = {answer: scored.growth(answer) for answer in ("right", "wrong")}
    if any(growth.values()):
        status = Status.wrong if growth["right"] == MORE_AND_MORE and not is_declared else Status.limit
        answers = " and ".join(answer for answer, grows in growth.items() if grows)
        value = f"{answers} answers get more, the more words stand before them"
        value += ", up to a length" * (MORE_AND_MORE not in growth.values())
        remedy = "see that length is what you want to reward, and limit it (reward=[..,overlong])"
        yield CheckRow(f"{name}: {Family.length}", status, value, remedy)


def _of_answers(scored: Scored, name: str, *, is_main: bool) -> CheckRow:
    """Whether it reads the answer, and in which forms the right one is accepted."""
    name = f"{name}: {Family.gold}"
    if scored.gain < -scored.eps:
        value = f"a wrong answer gets {-scored.gain:.3g} more than the right one"
        return CheckRow(name, Status.wrong, value, "turn the comparison, or the weight, round")
    if not scored.reads:
        words = scored.mean(Family.wrong, "words")
        answers = "any number" if fmean(scored.wrong.values()) > words + scored.eps else "any answer"
        value = f"not read: {answers} gets what the right one gets"
        remedy = "compare it with group.prompt.answer: this reward comes first and says what is right"
        return CheckRow(name, Status.wrong, value, remedy) if is_main else CheckRow(name, Status.ok, value)
    accepted, kinds = scored.gold_forms()
    refused = [kind for kind in kinds if kind not in accepted]
    value = f"accepted in {len(accepted)} of {len(kinds)} forms"
    if not refused:
        return CheckRow(name, Status.ok, value)
    remedy = "say in the prompt which form counts, or accept these"
    return CheckRow(name, Status.limit, f"{value}; not: {listed(refused, len(refused))}", remedy)


def _of_time(tried: Tried, name: str, per_worker: float) -> Iterator[CheckRow]:
    """The seconds of a step; slow is not wrong, unless the run's own time limit ends it."""
    seconds = sorted(text.seconds[name] for text in tried.texts if name in text.seconds)
    if not seconds:
        return
    p50, p99 = (seconds[(len(seconds) - 1) * percent // 100] for percent in (50, 99))
    step_s = fmean(seconds) * per_worker
    value = f"p50 {p50:.2g} s, p99 {p99:.2g} s for a completion, about {step_s:.3g} s for a step"
    status, remedy = (
        (Status.slow, "make it faster, or raise scoring.workers") if step_s > SLOW_STEP_S else (Status.ok, "")
    )
    if name in tried.late:
        value += "; right answers, or a group of the run's size, take longer than scoring.timeout"
        status, remedy = Status.wrong, "make it faster, or raise scoring.timeout"
    yield CheckRow(f"{name}: seconds", status, value, remedy)


def _of_total(tried: Tried) -> Iterator[CheckRow]:
    if tried.left_out:
        yield CheckRow("weights", Status.skipped, f"no text has a sum without {', '.join(tried.left_out)}")
        return
    scored, cheapest = Scored.by(tried, None), tried.cheapest
    if cheapest is not None:
        status, remedy = Status.ok, ""
        if not cheapest.gives_gold or not number_in(cheapest.text, cheapest.gold):
            is_certain = not cheapest.gives_gold or value_of(cheapest.gold) is not None
            status = Status.wrong if is_certain else Status.limit
            remedy = "a policy finds it: mend the reward that pays for it" if is_certain else "see whether it answers"
        yield CheckRow("cheapest text", status, shown_cheapest(cheapest), remedy)
    if not scored.right or not scored.wrong:
        yield CheckRow("weights", Status.skipped, "right and wrong answers have no sum")
        return
    if best := scored.as_good_as_right():
        remedy = "a policy may learn these instead: mend the rewards that pay for them, or their weights"
        value = f"as good as the right answer: {listed(best, MAX_KINDS)}"
        yield CheckRow("all rewards", Status.wrong, value, remedy)
    if not scored.lowest:
        yield CheckRow("weights", Status.skipped, "no row's answers were scored in all forms")
    elif scored.form_gain >= scored.gain - scored.eps:
        value = f"{scored.worth()}: a wrong answer in form gets as much as a right one without it"
        yield CheckRow("weights", Status.wrong, value, "lower the weights of the rewards that do not read the answer")
    else:
        yield CheckRow("weights", Status.ok, scored.worth())


def score_lines(tried: Tried) -> Iterator[tuple[str, str, list[float | None]]]:
    """(text, an example, mean score by each reward and of the total): every form and gold answer, then the families.

    Of a family of wrong texts it is the kind that gets most.
    """
    by_kind: dict[tuple[Family, str], list[ScoredText]] = {}
    for text in tried.texts:
        if text.form == tried.form or text.tries_form(Family.gold):
            by_kind.setdefault((text.family, text.kind), []).append(text)

    def means(texts: Sequence[ScoredText]) -> list[float | None]:
        columns = [[text.scores.get(name) for text in texts] for name in tried.weights]
        columns.append([text.total(tried.weights) for text in texts])
        known = [[score for score in column if score is not None] for column in columns]
        return [fmean(scores) if scores else None for scores in known]

    for (family, kind), texts in by_kind.items():
        if family is Family.gold:
            yield f"right, {kind}", texts[0].text, means(texts)
    for family in (family for family in Family if family not in (Family.gold, Family.length)):
        found = {kind: means(texts) for (of, kind), texts in by_kind.items() if of is family}
        if found:
            totals = {kind: -math.inf if mean[-1] is None else mean[-1] for kind, mean in found.items()}
            kind = max(totals, key=totals.__getitem__)
            yield f"{family} ({len(found)}): {kind}", by_kind[family, kind][0].text, found[kind]


def shown_cheapest(text: ScoredText | None) -> str:
    if text is None:
        return "none has the full reward"
    shown = text.text if len(text.text) <= 60 else f"{text.text[:60]}.."
    return f"{counted(text.tokens, 'token')} with the full reward: {shown!r} ({text.family}: {text.kind})"


def listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
