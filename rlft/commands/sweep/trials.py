"""The trials of a study: Optuna draws their values and judges them; the sweep's folder keeps all it knows of them.

Whatever is decided is kept whole or not at all, so that a study that was killed resumes what was being done, to the
same end: a trial and all its values, an evaluation and what it means for the trial. Each trial is drawn with a seed
of its own, from (sweep.seed, number), because Optuna does not keep the state of its generators.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from rlft.commands.sweep.space import Choice, Interval, Space, StudyConfig
from rlft.system.files import write_atomically
from rlft.system.interrupt import Deferred
from rlft.system.seeds import derive
from rlft.types import UserError, counted

JOURNAL = "optuna.log"
"""The file in the sweep's folder, in the format of Optuna's JournalFileBackend, which optuna-dashboard reads."""
NAME = "sweep"
REDUCTION = 3  # Hyperband lets one of so many trials continue at each rung
FEWEST_TO_COMPARE = 4  # complete trials without which the importance of a key is not told

SAME_AS, VALUES, WHY, ATTEMPTS = "same_as", "values", "why", "attempts"
"""Attributes of a trial: the number of the trial whose result it has; its value by seed; why it failed or was pruned;
[how far its runs were when they were last begun, how often they were begun or resumed since they were there]."""


class Journal(BaseJournalBackend):
    """Optuna's records, which the file holds as they were at the end of the last transaction.

    Optuna's own backends write each record by itself, so that a kill leaves half of a decision.

    file: is replaced as a whole: a kill leaves it as it was before or after. One process uses it at a time.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._is_whole = file, True
        self._lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        self._records: list[dict[str, Any]] = [json.loads(line) for line in self._lines]

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._records[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._records += logs
        self._lines += [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Writes all records at its end; after an exception inside neither then nor ever after."""
        try:
            yield
        except BaseException:
            self._is_whole = False  # Optuna remembers half of a change, which would be written with the next one
            raise
        if self._is_whole:
            self._write()

    def _write(self) -> None:
        write_atomically(self._file, (line.encode() for line in self._lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial, and what has become of it."""

    number: int  # counts from 0 in the order in which trials were drawn
    params: Mapping[str, Any]
    state: str = "unfinished"  # complete, pruned, failed or unfinished
    value: float | None = None  # of the metric: at the end, or where it was pruned; None if it has none
    values: Sequence[float] = field(default_factory=tuple)
    same_as: int | None = None  # the number of the trial whose result it has, or None
    why: str = ""  # why it failed, or what pruned it and where


STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}


class Trials:
    """The trials of one study. first_evaluation: the step of a run's first evaluation after some training.

    `parallel`: whether trials run concurrently, so that values near those of running ones are avoided.
    """

    def __init__(
        self,
        folder: Path,
        config: StudyConfig,
        space: Space,
        *,
        lower: bool,
        steps: int,
        first_evaluation: int,
        parallel: bool,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._config, self._space, self._parallel, self._steps = config, space, parallel, steps
        self.lower_is_better = lower
        self._distributions = {one.key: distribution(one) for one in space.varied}
        try:
            self._journal = Journal(folder / JOURNAL)
            storage = JournalStorage(self._journal)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, OptunaError) as error:
            problem = f"{JOURNAL} in that folder is damaged ({type(error).__name__})"
            remedy = "restore it from a copy, or begin another sweep"
            raise UserError("hydra.sweep.dir", problem, got=folder, remedy=remedy) from None
        with self._changing():
            self._study = optuna.create_study(
                storage=storage,
                study_name=NAME,
                direction="minimize" if lower else "maximize",
                pruner=pruner(config, first_evaluation, steps),
                load_if_exists=True,
            )

    @property
    def number_drawn(self) -> int:
        return len(self._all())

    def unfinished(self) -> list[Trial]:
        """The trials that have begun and not ended, in their order."""
        return [trial_of(trial) for trial in self._all((TrialState.RUNNING,))]

    def draw(self) -> Trial:
        """Begins another trial; one with the values of a trial that has ended gets its result at once."""
        number = self.number_drawn
        self._study.sampler = sampler(self._config, number, parallel=self._parallel)
        with self._changing():
            if self._config.sampler == "grid":
                self._study.enqueue_trial(next(itertools.islice(self._space.combinations(), number, None)))
            drawn = self._study.ask(self._distributions)
            ended = self._all((TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
            same = next((t for t in ended if t.params == drawn.params), None)
            if same is not None:
                self._end_like(drawn, same)
        return trial_of(self._all()[number])

    def attempt(self, number: int, progress: Sequence[int]) -> int:
        """Records that the runs of a trial are begun or resumed; returns how often they were since the last progress.

        `progress` is how far its runs are, in numbers that grow.
        """
        with self._changing():
            trial = self._handle(number)
            before, count = trial.user_attrs.get(ATTEMPTS, ([-1] * len(progress), 0))
            furthest = [max(pair) for pair in zip(before, progress, strict=True)]
            count = count + 1 if furthest == before else 1
            trial.set_user_attr(ATTEMPTS, [furthest, count])
        return count

    def withdraw_attempt(self, number: int) -> None:
        """The newest attempt no longer counts; nothing if the trial has ended."""
        if self._all()[number].state.is_finished():
            return
        with self._changing():
            trial = self._handle(number)
            furthest, count = trial.user_attrs[ATTEMPTS]
            trial.set_user_attr(ATTEMPTS, [furthest, count - 1])

    def reported(self, number: int) -> Mapping[int, float]:
        """{point: value} that was reported of a trial."""
        return self._all()[number].intermediate_values

    def report(self, number: int, point: int, value: float, *, may_end: bool) -> bool:
        """Reports the value of a trial at a point, once; returns whether the trial is thereby pruned.

        Args:
            point: how far it is, in steps, those of its earlier runs included.
            value: of its first run within that; at the end of a run the mean over all that have come so far.
            may_end: whether it can be pruned here.
        """
        with self._changing():
            trial = self._handle(number)
            trial.report(value, point)
            ends = may_end and trial.should_prune()
            if ends:
                where = f"at step {point}" if point <= self._steps else f"after {counted(point // self._steps, 'seed')}"
                trial.set_user_attr(WHY, f"{self._config.pruner} {where}")
                self._study.tell(number, state=TrialState.PRUNED)
        return ends

    def complete(self, number: int, values: Sequence[float]) -> None:
        """Ends a trial with its value by seed. One that is not finite makes it fail."""
        if not all(map(math.isfinite, values)):
            self.fail(number, "its metric is not finite")
            return
        with self._changing():
            self._handle(number).set_user_attr(VALUES, list(values))
            self._study.tell(number, sum(values) / len(values))

    def fail(self, number: int, why: str) -> None:
        with self._changing():
            self._handle(number).set_user_attr(WHY, why)
            self._study.tell(number, state=TrialState.FAIL)

    def rows(self) -> list[Trial]:
        """The trials, the best first; then those that were pruned, failed, and are unfinished."""
        order, sign = list(STATES.values()), 1.0 if self.lower_is_better else -1.0
        rows = [trial_of(trial) for trial in self._all()]
        return sorted(rows, key=lambda row: (order.index(row.state), sign * (row.value or 0.0), row.number))

    def importance(self) -> dict[str, float]:
        """{key: its share, of 1, in what sets the best tenth of the complete trials apart}; {} of too few trials.

        By PED-ANOVA (arXiv 2304.10255), of Optuna's evaluators the one that needs no scikit-learn.
        """
        complete = self._all((TrialState.COMPLETE,))
        varied = [key for key in self._distributions if len({trial.params[key] for trial in complete}) > 1]
        if len(complete) < FEWEST_TO_COMPARE or not varied or len({trial.value for trial in complete}) == 1:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator(), params=varied)
        return {key: float(share) for key, share in shares.items()}

    def _all(self, states: tuple[TrialState, ...] | None = None) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _handle(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._all()[number]._trial_id)

    def _end_like(self, drawn: optuna.Trial, same: FrozenTrial) -> None:
        for point, value in same.intermediate_values.items():
            drawn.report(value, point)
        for name in (name for name in (VALUES, WHY) if name in same.user_attrs):
            drawn.set_user_attr(name, same.user_attrs[name])
        drawn.set_user_attr(SAME_AS, same.number)
        self._study.tell(drawn, same.value if same.state is TrialState.COMPLETE else None, same.state)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change, which a signal does not interrupt: it is kept whole, and the signal is delivered behind it."""
        with Deferred(), warnings.catch_warnings(), self._journal.transaction():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield


def trial_of(trial: FrozenTrial) -> Trial:
    return Trial(
        number=trial.number,
        params=trial.params,
        state=STATES[trial.state],
        value=trial.value,
        values=trial.user_attrs.get(VALUES, ()),
        same_as=trial.user_attrs.get(SAME_AS),
        why=trial.user_attrs.get(WHY, ""),
    )


def distribution(one: Choice | Interval) -> BaseDistribution:
    if isinstance(one, Choice):
        return CategoricalDistribution(one.values)
    if one.whole:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


def sampler(config: StudyConfig, number: int, *, parallel: bool) -> BaseSampler:
    seed = derive(config.seed, number, "sweep") % 2**32
    if config.sampler == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, n_startup_trials=config.startup, constant_liar=parallel)


def pruner(config: StudyConfig, first_evaluation: int, steps: int) -> BasePruner:
    """What prunes trials. steps: of one run; Hyperband counts those of all runs of a trial."""
    if config.pruner == "median":
        return Median(config.startup, steps)
    if config.pruner == "hyperband":
        all_steps = steps * config.seeds
        return HyperbandPruner(min_resource=first_evaluation, max_resource=all_steps, reduction_factor=REDUCTION)
    return NopPruner()


class Median(MedianPruner):
    """Prunes a trial that is worse than the median of the complete ones at the same point.

    Before the last step of the first run its best value so far counts, as Optuna has it: an evaluation is noisy, and a
    run may still recover. At the end of a run the value there counts, which is what trials are compared by.
    """

    def __init__(self, startup: int, steps: int) -> None:
        super().__init__(n_startup_trials=startup)
        self._steps = steps

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        point = trial.last_step
        if point is not None and point >= self._steps:
            trial = copy.copy(trial)
            trial.intermediate_values = {point: trial.intermediate_values[point]}
        return super().prune(study, trial)
