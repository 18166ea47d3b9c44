"""A run's chain of digests, chain.jsonl: a line for the start and for each step, with the sha256 of all that it made.

    {"step": 3, "previous": .., "machine": {..}, "sha256": {part: ..}, "metrics_line": .., "digest": ..}

`digest` is that of step, `previous`, `machine` and `sha256`, and `previous` the digest of the line before, so that the
last digest stands for the whole run. `metrics_line` is not part of it: it is of the whole line in metrics.jsonl, times
included. So an interrupted run has the same chain as one that was not; after a resume, lines beyond the checkpoint are
cut off, as in metrics.jsonl.

Parts: `config` (config.yaml), the fingerprints of inputs (`data`, `base`, ..), and of each step, as far as it has them,
`metrics` (without times and memory), `alarms`, `evaluation`, `rollouts` (the file, written or not), `scores`, `masks`
(token ids and loss mask), `advantages`, and those of a checkpoint (`rlft.runs.checkpoint.parts_of`), saved or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlft.runs import lines as run_lines
from rlft.runs.run_folder import CONFIG, versions
from rlft.system.disk import writing
from rlft.system.files import append, digest_of_bytes, digest_of_each, digest_of_file, flush
from rlft.types import Evaluation

if TYPE_CHECKING:
    from torch import Tensor

    from rlft.types import Batch

CHAIN = "chain.jsonl"
MEASURED = ("time/", "memory/")  # metrics that differ when a step is repeated
LIBRARIES = ("torch", "transformers", "peft", "vllm")


class Chain:
    """Writes the chain of one run: `add_*` collects the parts of a step, and `seal` makes its line.

    A thread computes the digests of tensors. The next `seal`, `flush` or `close` waits for it and appends the line, and
    raises what was raised there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._previous: str | None = None
        self._always: dict[str, str] = {}
        self._machine: Mapping[str, str] = {}
        self._parts: dict[str, str] = {}
        self._tensors: dict[str, Mapping[str, Tensor]] = {}  # of the parts whose digests are not computed yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        # (step, its parts, the digest of its line of metrics, the digests to come) of the line to be appended.
        self._sealed: tuple[int, dict[str, str], str | None, Future[dict[str, str]]] | None = None
        self._metrics_line: str | None = None
        self._alarms = b""

    def start(self, step: int, fingerprints: Mapping[str, str], machine: Mapping[str, str]) -> None:
        """Opens the file, cut after the line of `step`, from whose checkpoint the run goes on; -1: it is new."""
        path = self.folder / CHAIN
        self._file, self._machine = run_lines.open_after(path, step, run_lines.silent), machine
        lines = run_lines.read_lines(path, run_lines.silent)
        self._previous = lines[-1].get("digest") if lines else None
        inputs = {name.removesuffix("_fingerprint"): value for name, value in sorted(fingerprints.items())}
        self._always = {"config": digest_of_file(self.folder / CONFIG), **inputs}

    def add_batch(self, batch: Batch) -> None:
        self._tensors |= tensors_of_batch(batch)

    def add_step(self, record: run_lines.StepRecord) -> None:
        """The step's line of metrics, its alarms, and its completions with their scores."""
        metrics = {"step": record.step, **run_lines.numbers(record.metrics)}
        self._parts["metrics"] = metrics_part(metrics)
        self._metrics_line = digest_of_bytes(run_lines.encode(metrics))
        self._alarms += b"".join(map(run_lines.encode, run_lines.alarm_lines(record.step, record.alarms)))
        if record.groups:
            file = run_lines.rollout_file(self.folder, record.step)
            lines = b"" if file.exists() else b"".join(map(run_lines.encode, run_lines.rollout_lines(record)))
            self._parts["rollouts"] = digest_of_bytes(lines) if lines else digest_of_file(file)
            by_name = {name: [score for row in rows for score in row] for name, rows in record.rewards.items()}
            self._parts["scores"] = scores_part(by_name, [score for row in record.total_rewards for score in row])

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self._parts["evaluation"] = digest_of_bytes(run_lines.encode(run_lines.evaluation_line(evaluation)))
        self._alarms += b"".join(map(run_lines.encode, run_lines.alarm_lines(evaluation.step, evaluation.alarms)))

    def seal(
        self,
        step: int,
        more: Mapping[str, str] | None = None,
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Makes the line of a step from what was added, and from `more` parts and {part: its `tensors`}.

        Nothing may write into tensors in main memory any more; those on a device are brought there together.
        """
        self._append()
        parts, in_thread = {**self._always, **self._parts, **(more or {})}, {**self._tensors, **(tensors or {})}
        if self._alarms:
            parts["alarms"] = digest_of_bytes(self._alarms)
        computed = self._thread.submit(digest_of_each, _in_main_memory(in_thread))
        self._sealed = (step, parts, self._metrics_line, computed)
        self._parts, self._tensors, self._alarms, self._metrics_line = {}, {}, b"", None
        if not in_thread:
            self._append()

    def _append(self) -> None:
        if self._sealed is None:
            return
        assert self._file is not None, "it was started"
        step, parts, metrics_line, computed = self._sealed
        parts |= computed.result()
        self._sealed = (
            None  # before the write: a line that an interruption loses is made again, one written twice is not
        )
        line = sealed(step, self._previous, self._machine, parts, metrics_line)
        append(self._file, run_lines.encode(line))
        self._previous = line["digest"]

    def flush(self) -> None:
        """Waits until the lines are on disk, so that a power cut leaves no gap behind a checkpoint."""
        self._append()
        if self._file is not None:
            with writing(self.folder / CHAIN):
                flush(self.folder / CHAIN)

    def close(self) -> None:
        try:
            self._append()
        finally:
            self._thread.shutdown()
            if self._file is not None:
                self._file.close()
                self._file = None


# -- lines -------------------------------------------------------------------------------------------------------------
def sealed(
    step: int, previous: str | None, machine: Mapping[str, str], parts: Mapping[str, str], metrics_line: str | None
) -> dict[str, Any]:
    linked = {"step": step, "previous": previous, "machine": dict(machine), "sha256": dict(sorted(parts.items()))}
    return {**linked, "metrics_line": metrics_line, "digest": digest_of_bytes(run_lines.encode(linked))}


def lines_until(folder: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a run's or an export's chain up to this step; empty where there is no chain."""
    return [line for line in run_lines.read_lines(folder / CHAIN, run_lines.silent) if line["step"] <= step]


def made_on(machine: Mapping[str, str], engine: str | None) -> dict[str, str]:
    """{what: its name or version} of all that decides the bits of a step: machine, engine and libraries."""
    return {**machine, "engine": engine or "none", **versions(LIBRARIES)}


# -- parts -------------------------------------------------------------------------------------------------------------
def metrics_part(line: Mapping[str, Any]) -> str:
    return digest_of_bytes(
        run_lines.encode({name: value for name, value in line.items() if not name.startswith(MEASURED)})
    )


def scores_part(by_name: Mapping[str, Sequence[float]], totals: Sequence[float]) -> str:
    """Of each reward's scores and their totals, completion by completion."""
    rewards = {name: [run_lines.number(score) for score in scores] for name, scores in sorted(by_name.items())}
    return digest_of_bytes(
        run_lines.encode({"rewards": rewards, "reward": [run_lines.number(score) for score in totals]})
    )


def batch_parts(batch: Batch) -> dict[str, str]:
    return digest_of_each(tensors_of_batch(batch))


def tensors_of_batch(batch: Batch) -> dict[str, Mapping[str, Tensor]]:
    parts: dict[str, Mapping[str, Tensor]] = {"masks": {"token_ids": batch.token_ids, "loss_mask": batch.loss_mask}}
    return parts if batch.advantages is None else {**parts, "advantages": {"advantages": batch.advantages}}


def _in_main_memory(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    from rlft.system.device import to_cpu  # not at the module's level: commands that only read a chain need no torch

    flat = to_cpu({f"{part}\n{name}": tensor for part, of_part in parts.items() for name, tensor in of_part.items()})
    return {part: {name: flat[f"{part}\n{name}"] for name in of_part} for part, of_part in parts.items()}
