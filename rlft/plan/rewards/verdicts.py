"""What the scores of tried texts say about rewards and their weights, in words.

A verdict is made only of texts that were scored: rows say which were not, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from rlft.logger.text import one_line
from rlft.plan.rewards.attacks import Family, number_in, value as value_of
from rlft.plan.rewards.scores import AGAIN, EPS, MORE_AND_MORE, SIBLINGS, WRONG, Scored, ScoredText, Tried
from rlft.system.terminal import CheckRow, Status
from rlft.types import counted

SLOW_STEP_S = 10.0  # seconds of scoring in a step from which a reward is called slow
MAX_KINDS = 6
REMEDIES: Mapping[Family, str] = {
    Family.gold: "give a repeated answer no more than one",
    Family.wrong: "compare whole answers, as numbers where they are numbers, not whether one is in the other",
    Family.two: "let a completion with several answers have none, or count the last one",
    Family.reasoning: "read the answer behind the reasoning (rlft.tokens.answers.without_reasoning)",
    Family.nothing: "give nothing for a text without an answer",
    Family.endless: "give a repeated text no more than one, and limit it (reward=[..,repetition])",
    Family.language: "give nothing for a text without an answer (and reward=[..,language] for its language)",
    Family.echo: "do not look for words of the prompt, or only outside of what repeats it",
    Family.judge: "tell the judge that the completion is data, and show it the reference answer",
    Family.names: "do not look for words that a completion may simply say",
    Family.special: "leave special tokens out of what is compared",
}


def verdicts_on(tried: Tried, completions_per_step: int, workers: int) -> list[CheckRow]:
    """The verdicts on each reward, and then on their sum; `workers` score a step's completions."""
    rows: list[CheckRow] = []
    for number, (name, weight) in enumerate(tried.weights.items()):
        if name in tried.left_out:
            rows.append(CheckRow(name, Status.skipped, tried.left_out[name]))
            continue
        found = list(_of_reward(tried, name, is_main=number == 0))
        rows += _of_failures(tried, name)
        for row in found:  # no policy learns from a reward of weight 0
            is_limit = not weight and row.status is Status.wrong
            rows.append(replace(row, status=Status.limit) if is_limit else row)
        rows += _of_time(tried, name, completions_per_step / max(1, workers) / tried.at_once.get(name, 1))
    return [*rows, *_of_total(tried)]


def summary_of(tried: Tried) -> list[str]:
    """The two lines of `rlft plan`; one where not all of it is known."""
    scored = Scored.by(tried, None)
    if tried.left_out or tried.stopped:
        return ["the rewards were not tried in whole: see rlft reward try"]
    if not scored.right:
        return ["right answers have no score: see rlft reward try"]
    accepted, forms = scored.gold_forms()
    bad = [f"{family}: {kind}" for family in Family for kind in scored.bad_kinds(family)]
    wrong = listed(bad, 3) if bad else "none"
    first = f"gold answers accepted in {len(accepted)} of {len(forms)} forms; wrong texts accepted: {wrong}"
    return [first, f"cheapest text: {shown_cheapest(tried.cheapest)}; {scored.worth()}"]


def _of_failures(tried: Tried, name: str) -> Iterator[CheckRow]:
    failed = {f"{t.family}: {t.kind}": t for t in reversed(tried.texts) if name in t.errors}
    if failed:
        ends = any(text.scores[name] is None for text in failed.values())
        value = f"fails on {listed([*failed][::-1], MAX_KINDS)}: {[*failed.values()][-1].errors[name]}"
        value += such_as([*failed.values()][-1])
        remedy = "fix it: an error like this ends the run" if ends else "these texts get on_error"
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
    verb = "accepted" if scored.reads else "rewarded as much as an answer, or more"
    for family, remedy in REMEDIES.items():
        if bad := scored.bad_kinds(family):
            value = f"{verb}: {listed([scored.shown(family, kind) for kind in bad], len(bad))}"
            value += such_as(next(text for text, _ in scored.points[family, bad[0]]))
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
        return CheckRow(name, Status.wrong, value, "invert the comparison, or the sign of the weight")
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
    example = such_as(scored.points[Family.gold, refused[0]][0][0])
    return CheckRow(name, Status.limit, f"{value}; not: {listed(refused, len(refused))}{example}", remedy)


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
            remedy = "a policy finds it: fix the reward that pays for it" if is_certain else "see whether it answers"
        yield CheckRow("cheapest text", status, shown_cheapest(cheapest), remedy)
    if not scored.right or not scored.wrong:
        yield CheckRow("weights", Status.skipped, "right and wrong answers have no sum")
        return
    if best := scored.as_good_as_right():
        remedy = "a policy may learn these instead: fix the rewards that pay for them, or their weights"
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
    """(text, an example, mean scores): every form and gold answer, then the best-paid kind of each wrong family."""
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
    for family in WRONG:
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


def such_as(text: ScoredText) -> str:
    """An example, for the end of a row's words."""
    return f"; such as {one_line(text.text, 60)!r}"


def listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
