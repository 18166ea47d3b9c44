"""The corners of a study's space: every value and every end of an interval, checked before the first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlft.checks import check_early
from rlft.config import compose as configs
from rlft.keys import verbs
from rlft.planning.run_plan import Plan
from rlft.run.references import resolved
from rlft.types import UserError
from rlft.verbs.study.config import key_of
from rlft.verbs.study.measure import check_measured_alike, check_same_questions, check_same_steps
from rlft.verbs.study.space import Space
from rlft.verbs.sweep import NOT_OF_THE_FILES


def composed(space: Space, config_dir: Path | None, verb: str) -> list[dict[str, Any]]:
    """The plain config of every corner of the space, once each has been checked by itself and with the first."""
    plains: list[dict[str, Any]] = []
    for word, params in space.corners():
        with _of_value(word):
            plains.append(resolved(configs.compose(space.words(params), config_dir, verb)))
            check_early(plains[-1], verb)
            check_measured_alike(plains[0], plains[-1])
    return plains


def checked_plan(space: Space, plains: Sequence[dict[str, Any]], verb: str) -> Plan:
    """The plan of the first corner, once each that reads other files has been planned; files are read once."""
    plans: list[tuple[dict[str, Any], Plan]] = []
    for (word, _), plain in zip(space.corners(), plains, strict=True):
        of_the_files = {key: value for key, value in plain.items() if key not in NOT_OF_THE_FILES}
        if verb == "train" and of_the_files in [seen for seen, _ in plans]:  # other verbs may count steps from epochs
            continue
        with _of_value(word):
            plan = verbs.named(verb).make_plan(plain)
            if plans:
                check_same_questions(key_of(word), plans[0][1], plan)
                check_same_steps(key_of(word), plans[0][1], plan)
            plans.append((of_the_files, plan))
    return plans[0][1]


@contextmanager
def _of_value(word: str) -> Iterator[None]:
    """Adds the word that was tried to a refusal inside."""
    try:
        yield
    except UserError as error:
        problem, remedy = f"{error.problem} (tried with {word})", error.remedy
        if error.problem.startswith("must be a whole number") and f"{error.key}=" in word:
            remedy = f"write {error.key}=int(interval(..)) to draw whole numbers"
        raise UserError(error.key, problem, got=error.got, remedy=remedy) from None
