"""What is refused for a study's values: before the first run, at every value and end of an interval; and of a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlft.commands.sweep.config import key_of
from rlft.commands.sweep.measure import (
    check_loggers,
    check_measured_alike,
    check_metric,
    check_same_questions,
    check_same_steps,
)
from rlft.commands.sweep.plain import of_the_files
from rlft.commands.sweep.space import Space, check_changes_numbers
from rlft.config import command as verbs
from rlft.config import compose as configs
from rlft.plan.checks import check_early
from rlft.plan.run_plan import Plan
from rlft.runs.paths import is_path_key
from rlft.runs.references import resolved
from rlft.types import UserError


def composed(space: Space, config_dir: Path | None, verb: str, metric: str) -> list[dict[str, Any]]:
    """The plain config of every corner of the space, once each has been checked by itself and with the first."""
    plains: list[dict[str, Any]] = []
    for word, params in space.corners():
        with _of_value(word):
            plains.append(resolved(configs.compose(space.words(params), config_dir, verb)))
            check_early(plains[-1], verb)
            check_measured_alike(plains[0], plains[-1], metric)
            if len(plains) > 1:
                check_loggers(plains[-1])
        if len(plains) == 1:
            check_changes_numbers(space, plains[0])
            check_metric(metric, plains[0])
            check_loggers(plains[0])
    return plains


def checked_plans(space: Space, plains: Sequence[dict[str, Any]], verb: str) -> list[Plan]:
    """The plans of the first corner and of each that reads other files; files are read once."""
    plans: list[tuple[dict[str, Any], Plan]] = []
    for (word, _), plain in zip(space.corners(), plains, strict=True):
        planned = of_the_files(plain)
        with _of_value(word):
            if verb == "train" and planned in [seen for seen, _ in plans]:  # other verbs may count steps from epochs
                check_same_steps(key_of(word), plains[0]["steps"], plain["steps"])
                continue
            plan = verbs.named(verb).make_plan(plain)
            if plans:
                check_same_questions(key_of(word), plans[0][1], plan)
                check_same_steps(key_of(word), plans[0][1].num_steps, plan.num_steps)
            plans.append((planned, plan))
    return [plan for _, plan in plans]


class Values:
    """Tells whether a run was refused for what its study has chosen; any other refusal ends the study.

    A reward's server that does not answer, a base that has been moved away, or a GPU that another process has taken
    refuse every trial alike: none of them is a failure of a trial's values.
    """

    def __init__(self, space: Space, config_dir: Path | None, verb: str) -> None:
        self._space, self._config_dir, self._verb = space, config_dir, verb

    def are_refused(self, words: Sequence[str], key: str) -> bool:
        """Whether the values of a run are to blame for a refusal that ended it.

        The run is planned again. Refused again, it is for its values if the first corner, which was accepted when
        the study began, still is. Accepted, it was refused later (by its engine, by what is in its folder): for its
        values only if the refusal names a key that is chosen, and that is no file, which may have changed.

        Args:
            words: the overrides of the run.
            key: what the refusal names.
        """
        if self._is_refused(words):
            _, corner = next(self._space.corners())
            return not self._is_refused(self._space.words(corner))
        return key in {key_of(one.key) for one in self._space.varied} and not is_path_key(key)

    def _is_refused(self, words: Sequence[str]) -> bool:
        try:
            plain = resolved(configs.compose(words, self._config_dir, self._verb))
            check_early(plain, self._verb)
            verbs.named(self._verb).make_plan(plain)
        except UserError:
            return True
        return False


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
