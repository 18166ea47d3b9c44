"""Seconds and memory of a training step by stage, rlft against TRL's GRPOTrainer on the same work.

    python scripts/bench_step.py                                  # every shape, on this machine's CPU or GPU
    python scripts/bench_step.py --shapes 384+64 --groups 8 --rounds 3
    python scripts/bench_step.py --only rlft --engine vllm --sizes 1.5b
    python scripts/bench_step.py --card                           # the whole table of a CUDA GPU, some hours

Needs `pip install 'rlft[bench]'`. Each measurement is a process of its own, the trainers in turn (A B A B), and its
first step is left out. Shapes are prompt + completion tokens of a model with random weights that never ends early;
`tiny` is the embedded model on its own task. The table gives medians and their range, and goes to <out>/step.md beside
step.json. TRL has no stages of its own: its `train` is what is neither sampling nor reward.

Each measurement is kept in <out>/measurements.jsonl as soon as it is made. The same command after an interruption
goes on with those that are missing; what another commit, machine or version measured is left there and made anew. A
process that fails or takes longer than --seconds is told in the table, and the others go on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench_report import STAGES, Result, middle, report
from bench_trainers import TRAINERS, Setting, fastest_micro_batch, measure, trainers_for
from bench_work import Measured, MeasurementError, default_dtype, device_and_dtype, shape_of, where, where_and_when

from rlft.commands.doctor.work import SIZES, Workload, step_flops
from rlft.system.machine import peak_rate

TINY = Workload(prompt_tokens=32, completion_tokens=48)
OF_A_CARD = {
    "engine": "vllm",
    "sizes": ["0.5b", "1.5b"],
    "prompts": 32,
    "shapes": ["128+128", "512+256", "512+768"],
    "groups": [8],
    "also": [("128+128", group) for group in (4, 16, 32, 64)],
    "rounds": 3,
    "steps": 3,
}
"""32 x 8 completions at three lengths, and at the shortest one groups of 4 to 64."""


def main() -> None:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        engine=asked.engine,
        steps=asked.steps,
        micro_batches=tuple(asked.trl_micro_batch),
        overrides=tuple(asked.override),
        seconds=asked.seconds,
        out=asked.out,
    )
    kept = Kept.read(asked.out / "measurements.jsonl", where())
    results: list[Result] = []
    text = ""
    for size, work in works(asked):
        results.append(measure_work(size, work, setting, asked, kept))
        (asked.out / "step.json").write_text(json.dumps([as_json(result) for result in results], indent=1))
        text = report(results, rates(results), foot(asked))
        (asked.out / "step.md").write_text(text + "\n")
    print(text)


def works(asked: argparse.Namespace) -> Iterator[tuple[str, Workload]]:
    """(the model's size, the work); the embedded model has no size."""
    named = [(shape, group) for shape in asked.shapes for group in asked.groups]
    for size, (shape, group) in product(asked.sizes, [*named, *asked.also]):
        if shape == "tiny":
            yield "", replace(TINY, group=group)
            continue
        prompt, completion = map(int, shape.split("+"))
        yield size, Workload(prompts=asked.prompts, group=group, prompt_tokens=prompt, completion_tokens=completion)


def measure_work(size: str, work: Workload, setting: Setting, asked: argparse.Namespace, kept: Kept) -> Result:
    """All rounds of all trainers on this work; those that are kept are not made again."""
    runs: dict[str, list[Measured]] = {name: [] for name in asked.only}
    failed: dict[str, str] = {}
    result = Result(size=size, work=work, runs=runs, failed=failed)
    chosen: dict[str, int] = {}
    for turn in range(asked.rounds):
        for name in asked.only:
            if name in failed:
                continue
            key = {"trainer": name, "size": size, "work": asdict(work), "round": turn, **setting_key(setting)}
            try:
                if name.startswith("trl"):
                    chosen[name] = kept.choose(key, lambda n=name: fastest_micro_batch(n, size, work, setting))
                found = kept.find(key)
                if found is None:
                    found = measure(name, size, work, setting, chosen.get(name))
                    kept.add(key, asdict(found))
            except MeasurementError as error:
                failed[name] = str(error)
                print(f"{result.name} round {turn + 1} {name}: {error}", flush=True)
                continue
            runs[name].append(found)
            print(f"{result.name} round {turn + 1} {name}: {summary(found)}", flush=True)
    complete = {name: measured for name, measured in runs.items() if name not in failed and measured}
    return replace(result, runs=complete, micro_batch=chosen.get("trl"))


def setting_key(setting: Setting) -> dict[str, Any]:
    """What a measurement depends on besides the work."""
    return {
        "engine": setting.engine,
        "steps": setting.steps,
        "micro_batches": list(setting.micro_batches),
        "overrides": list(setting.overrides),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Measurements in a JSONL file: a line each, with its key and where it was made."""

    file: Path
    place: str
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, file: Path, place: str) -> Kept:
        """A last line that was not written to its end is left out."""
        lines = []
        for line in file.read_text().splitlines() if file.is_file() else []:
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return cls(file=file, place=place, lines=lines)

    def find(self, key: dict[str, Any]) -> Measured | None:
        return next((Measured(**line["measured"]) for line in self._of(key) if "measured" in line), None)

    def choose(self, key: dict[str, Any], find: Any) -> int:
        """TRL's micro-batch for this work: what was chosen before, else what `find` finds."""
        key = {**key, "round": None}
        known = next((line["micro_batch"] for line in self._of(key) if "micro_batch" in line), None)
        if known is not None:
            return known
        chosen = find()
        self._write({"key": key, "micro_batch": chosen})
        return chosen

    def add(self, key: dict[str, Any], measured: dict[str, Any]) -> None:
        self._write({"key": key, "measured": measured})

    def _of(self, key: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return (line for line in self.lines if line["key"] == key and line["place"] == self.place)

    def _write(self, line: dict[str, Any]) -> None:
        line = {**line, "place": self.place}
        self.lines.append(line)
        ends_well = not self.file.is_file() or self.file.read_bytes()[-1:] in (b"", b"\n")
        with self.file.open("a") as file:
            file.write(("" if ends_well else "\n") + json.dumps(line) + "\n")


def rates(results: list[Result]) -> dict[str, float]:
    """By work's name, the seconds that its products would take at the device's rate; of a CPU that is not known."""
    if default_dtype() != "bfloat16":
        return {}
    rate = peak_rate(*device_and_dtype())
    return {r.name: step_flops(shape_of(SIZES[r.size], r.work.rank), r.work) / rate for r in results if r.size}


def as_json(result: Result) -> dict[str, Any]:
    runs = {name: [asdict(run) for run in measured] for name, measured in result.runs.items()}
    return {"size": result.size, "work": asdict(result.work), "runs": runs, "failed": dict(result.failed)}


def summary(measured: Measured) -> str:
    present = [name for name in STAGES if name in measured.seconds[0]]
    stages = ", ".join(f"{name} {middle(measured, name):.2f}" for name in present)
    return f"{stages} s; {measured.peak / 1e9:.2f} GB"


def foot(asked: argparse.Namespace) -> str:
    return (
        f"Seconds: median (smallest to largest) of {asked.rounds} processes x {asked.steps} steps, "
        f"engine {asked.engine}. {where_and_when()}."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128+128", "384+64", "64+512", "tiny"])
    parser.add_argument("--groups", nargs="+", type=int, default=[8], help="completions of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each, in turn")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a process")
    parser.add_argument("--only", nargs="+", choices=TRAINERS, help="default: all that the engine allows")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["17m"])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--trl-micro-batch", nargs="+", type=int, default=[4, 8], help="several: the fastest is taken")
    parser.add_argument("--override", nargs="*", default=[], help="more keys for rlft, such as token_budget=4096")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of one process")
    parser.add_argument("--card", action="store_true", help="32 x 8 with vLLM, 0.5b and 1.5b, three lengths, G 4 to 64")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.set_defaults(also=[])
    given = parser.parse_args()
    if given.card:
        parser.set_defaults(**OF_A_CARD)
        given = parser.parse_args()
    given.only = given.only or trainers_for(given.engine)
    given.out = given.out.resolve()
    return given


if __name__ == "__main__":
    main()
