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
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from bench_work import (
    EMBEDDED,
    Measured,
    MeasurementError,
    default_dtype,
    device_and_dtype,
    run_rlft,
    run_to_the_end,
    table,
    where,
    where_and_when,
)
from roofline import network

from rlft.commands.doctor.work import SIZES, Workload, make_model, write_prompts
from rlft.plan.roofline import operations_of, update
from rlft.system.machine import peak_rate

EVERY = 200  # milliseconds between two readings
MIB = 2**20
TO_STOP = 10  # seconds that nvidia-smi may take to end


@contextmanager
def watching_card() -> Iterator[list[int]]:
    """Inside it, what all processes hold of the first GPU is read, in bytes; no readings where nvidia-smi has none."""
    readings: list[int] = []
    query = ["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--loop-ms={EVERY}"]
    if (program := shutil.which("nvidia-smi")) is None:
        yield readings
        return
    process = subprocess.Popen([program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            readings.extend([int(line) * MIB] if line.strip().isdigit() else [])

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield readings
    finally:
        process.terminate()
        try:
            process.wait(TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(TO_STOP)
        reader.join(TO_STOP)


def added(readings: Sequence[int]) -> int | None:
    """The most that was taken of the GPU's memory, less what was at the start."""
    return max(readings) - readings[0] if readings else None


STAGES = ("sample", "score", "credit", "update", "publish", "log", "seal", "train", "step")
SHARES = ("sample", "score", "train", "publish")
"""Stages that do not overlap: credit and update are `train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured of one work.

    Args:
        size: of the model, by its name; empty for the embedded model.
        runs: by trainer, its processes in the order of the rounds.
        failed: by trainer, why a process of it ended without a measurement.
        micro_batch: TRL's, if it was among the trainers.
    """

    size: str
    work: Workload
    runs: Mapping[str, Sequence[Measured]]
    failed: Mapping[str, str]
    micro_batch: int | None = None

    @property
    def name(self) -> str:
        return f"{self.size} {self.work.name}" if self.size else f"tiny G{self.work.group}"

    def middle(self, trainer: str, stage: str) -> float:
        """The median of all steps, in seconds."""
        return statistics.median(step[stage] for run in self.runs[trainer] for step in run.seconds)


def report(results: Sequence[Result], rates: Mapping[str, float], foot: str) -> str:
    """rates: by work's name, seconds that a step's products would take at the device's rate; empty: not shown."""
    parts = [stage_table(results), share_table(results), ratio_table(results), utilisation_table(results, rates)]
    failed = [f"- {r.name}, {trainer}: {why}" for r in results for trainer, why in r.failed.items()]
    if failed:
        parts.append("Without a measurement:\n\n" + "\n".join(failed))
    return "\n\n".join([*filter(None, parts), foot])


def stage_table(results: Sequence[Result]) -> str:
    with_card = any(run.card is not None for r in results for runs in r.runs.values() for run in runs)
    head = ["work", "trainer", *STAGES, "completion tokens/s", "peak memory", *(["whole GPU"] if with_card else [])]
    rows = []
    for result in results:
        for trainer, runs in result.runs.items():
            seconds = [step for run in runs for step in run.seconds]
            cells = [spread([s[stage] for s in seconds]) if stage in seconds[0] else "" for stage in STAGES]
            tokens = result.work.completions * result.work.completion_tokens
            rate = f"{tokens / result.middle(trainer, 'step'):,.0f}" if result.size else ""
            card = [gigabytes(most_of_card(runs))] if with_card else []
            rows.append([result.name, trainer, *cells, rate, gigabytes(max(run.peak for run in runs)), *card])
    return table(head, rows)


def share_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for trainer, runs in result.runs.items():
            step = result.middle(trainer, "step")
            shares = [
                f"{result.middle(trainer, stage) / step:.0%}" if stage in runs[0].seconds[0] else "" for stage in SHARES
            ]
            rows.append([result.name, trainer, *shares])
    return table(["share of a step", "trainer", *SHARES], rows) if rows else ""


def ratio_table(results: Sequence[Result]) -> str:
    """Medians of the ratios of processes that ran one after the other."""
    rows = []
    for result in results:
        ours = result.runs.get("rlft", ())
        for trainer, runs in result.runs.items():
            if trainer == "rlft" or len(runs) != len(ours):
                continue
            cells = [
                spread([middle(t, stage) / middle(r, stage) for t, r in zip(runs, ours, strict=True)])
                for stage in ("step", "train")
            ]
            peaks = f"{max(r.peak for r in ours) / min(t.peak for t in runs):.2f}"
            cards = most_of_card(ours), most_of_card(runs)
            card = f"{cards[0] / cards[1]:.2f}" if cards[0] and cards[1] else ""
            micro_batch = result.micro_batch if trainer.startswith("trl") and result.micro_batch else ""
            rows.append([result.name, trainer, *cells, peaks, card, micro_batch])
    memory = ["peak memory rlft's / its", "whole GPU"]
    head = ["work", "trainer", "its step / rlft's", "train", *memory, "TRL's micro-batch"]
    return table(head, rows) if rows else ""


def utilisation_table(results: Sequence[Result], rates: Mapping[str, float]) -> str:
    """Model FLOPs utilisation of the training part: what rlft's packed row needs, over what the device could do.

    The same number of operations for every trainer, so that repeating a prompt for its siblings is no use of the GPU.
    """
    rows = [
        [result.name, trainer, f"{rates[result.name] / result.middle(trainer, 'train'):.0%}"]
        for result in results
        if result.name in rates
        for trainer in result.runs
    ]
    return table(["work", "trainer", "FLOPs utilisation of the training part"], rows) if rows else ""


def most_of_card(runs: Sequence[Measured]) -> int | None:
    return max((run.card for run in runs if run.card is not None), default=None)


def gigabytes(number: int | None) -> str:
    return "" if number is None else f"{number / 1e9:.2f} GB"


def middle(run: Measured, stage: str) -> float:
    return statistics.median(step[stage] for step in run.seconds)


def spread(values: list[float]) -> str:
    digits = 3 if statistics.median(values) < 0.1 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


TRAINERS = ("rlft", "trl", "trl-transformers")


def measure(
    trainer: str, size: str, work: Workload, asked: argparse.Namespace, micro_batch: int | None = None
) -> Measured:
    """One process. size: of the model; "" is the embedded model on its own task. micro_batch: TRL's.

    Raises:
        MeasurementError: the process failed or did not end in time.
    """
    model = str(make_model(asked.out / size, SIZES[size], default_dtype())) if size else EMBEDDED
    with watching_card() as readings:
        if trainer == "rlft":
            words = [f"generation={asked.engine}", *asked.override]
            run, log = asked.out / "run", asked.out / "rlft.log"
            found = run_rlft(run, model, work, asked.steps, words, not size, log=log, time_limit=asked.seconds)
        else:
            found = _run_another(trainer, model, work, asked, micro_batch or asked.trl_micro_batch[0])
    return replace(found, card=added(readings))


def fastest_micro_batch(trainer: str, size: str, work: Workload, asked: argparse.Namespace) -> int:
    """TRL's, among those that the work allows; those that fail, as for want of memory, are out.

    The smallest where every one fails, which then says why.
    """
    sizes = [number for number in asked.trl_micro_batch if number <= work.completions]
    if len(sizes) < 2:
        return sizes[0] if sizes else work.completions
    short = argparse.Namespace(**{**vars(asked), "steps": 1})
    took: dict[int, float] = {}
    for number in sizes:
        with suppress(MeasurementError):
            took[number] = middle(measure(trainer, size, work, short, number), "step")
    return min(took or sizes, key=lambda number: took.get(number, number))


def _run_another(trainer: str, model: str, work: Workload, asked: argparse.Namespace, micro_batch: int) -> Measured:
    prompts = asked.out / "prompts.jsonl"
    if model == EMBEDDED:
        from rlft.model.backbone import resolve_path

        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _tiny_prompts(asked.steps)))
        model = resolve_path(model)
    else:
        write_prompts(prompts, work, asked.steps + 1)
    engine = "transformers" if trainer == "trl-transformers" else asked.engine
    command = [
        sys.executable, str(Path(__file__).with_name("bench_trl.py")), "--work", json.dumps(asdict(work)),
        "--model", model, "--prompts", str(prompts), "--steps", str(asked.steps), "--micro-batch", str(micro_batch),
        "--dtype", default_dtype(), "--engine", engine, "--out", str(asked.out / "trl"),
    ]  # fmt: skip
    printed = run_to_the_end(command, log=asked.out / f"{trainer}.log", seconds=asked.seconds)
    return Measured(**json.loads(printed.strip().splitlines()[-1]))


def _tiny_prompts(steps: int) -> list[str]:
    """The embedded task's questions as the chat template writes them."""
    from transformers import AutoTokenizer

    from rlft.model.backbone import resolve_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_path(EMBEDDED))
    turns = [[{"role": "user", "content": f"{a}+{b}=?"}] for a in range(10, 60) for b in range(10, 12 + steps)]
    return cast(list[str], tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


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
    kept = Kept.read(asked.out / "measurements.jsonl", where())
    results: list[Result] = []
    text = ""
    for size, work in works(asked):
        results.append(measure_work(size, work, asked, kept))
        made = [{key: value for key, value in asdict(one).items() if key != "micro_batch"} for one in results]
        (asked.out / "step.json").write_text(json.dumps(made, indent=1))
        foot = f"Seconds: median (smallest to largest) of {asked.rounds} processes x {asked.steps} steps, "
        foot += f"engine {asked.engine}. {where_and_when()}."
        text = report(results, rates(results), foot)
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


def measure_work(size: str, work: Workload, asked: argparse.Namespace, kept: Kept) -> Result:
    """All rounds of all trainers on this work; those that are kept are not made again."""
    runs: dict[str, list[Measured]] = {name: [] for name in asked.only}
    failed: dict[str, str] = {}
    result = Result(size=size, work=work, runs=runs, failed=failed)
    chosen: dict[str, int] = {}
    shared: dict[str, Any] = {
        "engine": asked.engine,
        "steps": asked.steps,
    }  # what a measurement depends on besides the work
    shared |= {"micro_batches": asked.trl_micro_batch, "overrides": asked.override}
    for turn in range(asked.rounds):
        for name in (name for name in asked.only if name not in failed):
            key = {"trainer": name, "size": size, "work": asdict(work), "round": turn, **shared}
            try:
                if name.startswith("trl"):
                    chosen[name] = kept.choose(key, lambda n=name: fastest_micro_batch(n, size, work, asked))
                found = kept.find(key)
                if found is None:
                    found = measure(name, size, work, asked, chosen.get(name))
                    kept.add(key, asdict(found))
            except MeasurementError as error:
                failed[name] = str(error)
                print(f"{result.name} round {turn + 1} {name}: {error}", flush=True)
                continue
            runs[name].append(found)
            print(f"{result.name} round {turn + 1} {name}: {summary(found)}", flush=True)
    complete = {name: measured for name, measured in runs.items() if name not in failed and measured}
    return replace(result, runs=complete, micro_batch=chosen.get("trl"))


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
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
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
    kernels = {r.name: update(network(SIZES[r.size]), r.work.rows) for r in results if r.size}
    return {name: operations_of(of_update) / rate for name, of_update in kernels.items()}


def summary(measured: Measured) -> str:
    present = [name for name in STAGES if name in measured.seconds[0]]
    stages = ", ".join(f"{name} {middle(measured, name):.2f}" for name in present)
    return f"{stages} s; {measured.peak / 1e9:.2f} GB"


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
    given.only = given.only or list(TRAINERS[:2] if given.engine == "transformers" else TRAINERS)
    given.out = given.out.resolve()
    return given


if __name__ == "__main__":
    main()
