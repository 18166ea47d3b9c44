"""How bench_step.py runs each trainer on a work: one process a measurement, with a time limit and a log of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from bench_work import EMBEDDED, Measured, MeasurementError, default_dtype, run_rlft, run_to_the_end
from card_memory import CardMemory

from rlft.commands.doctor.work import SIZES, Workload, make_model, write_prompts

TRAINERS = ("rlft", "trl", "trl-transformers")


def trainers_for(engine: str) -> list[str]:
    """Those that are compared by default."""
    return ["rlft", "trl"] if engine == "transformers" else [*TRAINERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is said to every trainer of a benchmark.

    Args:
        engine: "transformers" or "vllm", which TRL then runs in its own process, too (colocated).
        steps: measured steps of a process, after one that is left out.
        micro_batches: of TRL, of which the fastest is taken; tried with one process of one step each.
        overrides: further keys for rlft.
        seconds: time limit of a process.
        out: folder of models, prompts, runs and logs.
    """

    engine: str
    steps: int
    micro_batches: tuple[int, ...]
    overrides: tuple[str, ...]
    seconds: float
    out: Path


def measure(trainer: str, size: str, work: Workload, setting: Setting, micro_batch: int | None = None) -> Measured:
    """One process. size: of the model; "" is the embedded model on its own task. micro_batch: TRL's.

    Raises:
        MeasurementError: the process failed or did not end in time.
    """
    model = str(make_model(setting.out / size, SIZES[size], default_dtype())) if size else EMBEDDED
    with CardMemory() as card:
        if trainer == "rlft":
            words = [f"generation={setting.engine}", *setting.overrides]
            run, log = setting.out / "run", setting.out / "rlft.log"
            found = run_rlft(run, model, work, setting.steps, words, not size, log=log, time_limit=setting.seconds)
        else:
            found = _run_another(trainer, model, work, setting, micro_batch or setting.micro_batches[0])
    return replace(found, card=card.peak)


def fastest_micro_batch(trainer: str, size: str, work: Workload, setting: Setting) -> int:
    """TRL's, among those that the work allows; those that fail, as for want of memory, are out."""
    sizes = [number for number in setting.micro_batches if number <= work.completions]
    if len(sizes) < 2:
        return sizes[0] if sizes else work.completions
    short = replace(setting, steps=1)
    return fastest(sizes, lambda number: measure(trainer, size, work, short, number))


def fastest(sizes: Sequence[int], run: Callable[[int], Measured]) -> int:
    """The size whose run takes the shortest steps; the smallest where every one fails, which then says why."""
    took: dict[int, float] = {}
    for size in sizes:
        try:
            took[size] = statistics.median(step["step"] for step in run(size).seconds)
        except MeasurementError:
            continue
    return min(took, key=lambda size: took[size]) if took else min(sizes)


def _run_another(trainer: str, model: str, work: Workload, setting: Setting, micro_batch: int) -> Measured:
    prompts = setting.out / "prompts.jsonl"
    if model == EMBEDDED:
        from rlft.model.backbone import resolve_path

        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _tiny_prompts(setting.steps)))
        model = resolve_path(model)
    else:
        write_prompts(prompts, work, setting.steps + 1)
    engine = "transformers" if trainer == "trl-transformers" else setting.engine
    command = [
        sys.executable, str(Path(__file__).with_name("bench_trl.py")), "--work", json.dumps(asdict(work)),
        "--model", model, "--prompts", str(prompts), "--steps", str(setting.steps), "--micro-batch", str(micro_batch),
        "--dtype", default_dtype(), "--engine", engine, "--out", str(setting.out / "trl"),
    ]  # fmt: skip
    printed = run_to_the_end(command, log=setting.out / f"{trainer}.log", seconds=setting.seconds)
    return Measured(**json.loads(printed.strip().splitlines()[-1]))


def _tiny_prompts(steps: int) -> list[str]:
    """The embedded task's questions as the chat template writes them."""
    from transformers import AutoTokenizer

    from rlft.model.backbone import resolve_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_path(EMBEDDED))
    turns = [[{"role": "user", "content": f"{a}+{b}=?"}] for a in range(10, 60) for b in range(10, 12 + steps)]
    return cast(list[str], tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
