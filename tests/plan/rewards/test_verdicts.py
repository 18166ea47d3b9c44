"""Verdicts are functions of the scores that texts were given."""

from dataclasses import replace

from in_one_test import each

from rlft.plan.rewards.attacks import Family
from rlft.plan.rewards.verdicts import ScoredText, Tried, verdicts_on
from rlft.system.terminal import Status


def text(family, kind, score, *, prompt="a", seconds=0.001):
    return ScoredText(family=family, kind=kind, form="alone", prompt=prompt, gold="41", text=kind, tokens=len(kind),
                      scores={"mine": score}, seconds={"mine": seconds})  # fmt: skip


def verdicts(*texts, **keys):
    ordinary = [text(Family.gold, "alone", 1.0), text(Family.wrong, "alone", 0.0)]
    of_forms = {"weights": {"mine": 1.0}, "form": "alone", "forms": {"mine": "alone"}}
    given = Tried(**{"texts": (*ordinary, *texts), **of_forms, **keys})
    return {row.name.removeprefix("mine: "): row for row in verdicts_on(given, completions_per_step=100, workers=2)}


@each(
    ("family", "score", "status"),
    [
        (Family.wrong, 0.5, Status.wrong),  # half of what being right is worth
        (Family.wrong, 0.49, None),
        (Family.nothing, 0.5, Status.wrong),
        (Family.endless, 0.0, None),
        (Family.reasoning, 1.0, Status.wrong),
        (Family.gold, 1.1, Status.wrong),  # more than the plain right answer
    ],
)
def test_a_text_is_accepted_from_half_of_what_being_right_is_worth(family, score, status):
    rows = verdicts(text(family, "some kind", score))
    said = f"accepted: some kind{' (1.1)' * (score > 1)}"
    found = [row.status for row in rows.values() if row.value.partition("; such as ")[0] == said]
    assert found == ([] if status is None else [status])


@each(("first", "last", "is_fault"), [(1.0, 1.0, True), (1.0, 0.0, True), (0.0, 1.0, False), (0.0, 0.0, False)])
def test_of_two_answers_only_the_last_may_count(first, last, is_fault):
    both = (text(Family.two, "gold, then a wrong one", first), text(Family.two, "a wrong one, then gold", last))
    assert (Family.two in verdicts(*both)) is is_fault


def test_a_reward_that_need_not_read_the_answer_has_limits_where_it_pays_for_texts_without_one():
    language = {"mine": 1.0, "second": 0.2}
    said = text(Family.names, "as a verdict", 0.0)
    more = replace(said, scores={"mine": 0.0, "second": 1.0})
    answers = [replace(text(family, "alone", score), scores={"mine": score, "second": 0.5})
               for family, score in ((Family.gold, 1.0), (Family.wrong, 0.0))]  # fmt: skip
    found = Tried(texts=(*answers, more), weights=language, form="alone", forms=dict.fromkeys(language, "alone"))
    rows = {row.name: row for row in verdicts_on(found, completions_per_step=1, workers=2)}
    row = rows["second: the reward named"]
    assert row.status is Status.limit
    assert row.value.partition("; such as ")[0] == "rewarded as much as an answer, or more: as a verdict (1)"
    assert rows["weights"].status is Status.ok


def test_seconds_are_those_of_a_step_and_their_percentiles():
    # 98 texts of 0.1 s and two more of 0.001 s: 100 completions on two workers take about 50 x 0.098 = 4.9 s.
    row = verdicts(*(text(Family.names, f"kind {k}", 0.0, seconds=0.1) for k in range(98)))["seconds"]
    assert row.status is Status.ok
    assert row.value == "p50 0.1 s, p99 0.1 s for a completion, about 4.9 s for a step"
    slow = verdicts(*(text(Family.names, f"kind {k}", 0.0, seconds=0.5) for k in range(98)))["seconds"]
    assert slow.status is Status.slow
