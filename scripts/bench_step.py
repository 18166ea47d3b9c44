"""Seconds and memory of a training step by stage, rlft against TRL's GRPOTrainer on the same work.

    python scripts/bench_step.py                                  # every shape, on this machine's CPU or GPU
    python scripts/bench_step.py --shapes 384+64 --groups 8 --rounds 3
    python scripts/bench_step.py --only rlft --engine vllm --size 1.5b

Needs `pip install 'rlft[bench]'`. Each measurement is a process of its own, rlft and TRL in turn (A B A B), and its
first step is left out. Shapes are prompt + completion tokens of a model with random weights that never ends early;
`tiny` is the embedded model on its own task. The table gives medians and their range, and goes to <out>/step.md beside
step.json.
TRL has no stages of its own: its `train` is what is neither sampling nor reward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from bench_flops import peak_rate, step_flops
from bench_work import (
    EMBEDDED,
    SIZES,
    Measured,
    Work,
    default_dtype,
    make_model,
    run_rlft,
    table,
    where_and_when,
    write_prompts,
)

STAGES = ("sample", "score", "credit", "update", "publish", "train", "step")
TINY = Work(prompt_tokens=32, completion_tokens=48)


def main() -> None:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    results: list[dict] = []
    for work, tiny in works(asked):
        runs: dict[str, list[Measured]] = {name: [] for name in asked.only}
        for turn in range(asked.rounds):
            for name in asked.only:
                runs[name].append(measure(name, work, asked, tiny))
                print(f"{label(work, tiny)} round {turn + 1} {name}: {told(runs[name][-1])}", flush=True)
        results.append(
            {"work": asdict(work), "tiny": tiny, "runs": {n: [asdict(m) for m in r] for n, r in runs.items()}}
        )
        (asked.out / "step.json").write_text(json.dumps(results, indent=1))
    text = report(results, asked)
    (asked.out / "step.md").write_text(text + "\n")
    print(text)


def works(asked: argparse.Namespace) -> list[tuple[Work, bool]]:
    found = []
    for shape in asked.shapes:
        for group in asked.groups:
            if shape == "tiny":
                found.append((replace(TINY, group=group), True))
            else:
                prompt, completion = map(int, shape.split("+"))
                found.append((Work(group=group, prompt_tokens=prompt, completion_tokens=completion), False))
    return found


def label(work: Work, tiny: bool) -> str:
    return f"tiny G{work.group}" if tiny else work.name


def measure(name: str, work: Work, asked: argparse.Namespace, tiny: bool) -> Measured:
    model = EMBEDDED if tiny else str(make_model(asked.out / asked.size, SIZES[asked.size], default_dtype()))
    if name == "rlft":
        engine = [f"generation={asked.engine}", *asked.override]
        return run_rlft(asked.out / "run", model, work, asked.steps, engine, embedded=tiny)
    return run_trl(model, work, asked, tiny)


def run_trl(model: str, work: Work, asked: argparse.Namespace, tiny: bool) -> Measured:
    """TRL at the micro-batch that is fastest for it among those asked for: tried once, then kept."""
    sizes = [size for size in asked.trl_micro_batch if size <= work.completions]
    if len(sizes) > 1:
        best = fastest(sizes, lambda size: trl_once(model, work, asked, tiny, size, 1))
        asked.chosen[label(work, tiny)] = asked.chosen.get(label(work, tiny), best)
        sizes = [asked.chosen[label(work, tiny)]]
    return trl_once(model, work, asked, tiny, sizes[0], asked.steps)


def fastest(sizes: list[int], run: Callable[[int], Measured]) -> int:
    return min(sizes, key=lambda size: statistics.median(step["step"] for step in run(size).seconds))


def trl_once(model: str, work: Work, asked: argparse.Namespace, tiny: bool, micro_batch: int, steps: int) -> Measured:
    prompts = asked.out / "prompts.jsonl"
    if tiny:
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in tiny_prompts(steps)))
    else:
        write_prompts(prompts, work, steps + 1)
    if tiny:
        from rlft.model.backbone import resolve_path

        model = resolve_path(model)
    command = [
        sys.executable, str(Path(__file__).with_name("bench_trl.py")), "--work", json.dumps(asdict(work)),
        "--model", model, "--prompts", str(prompts), "--steps", str(steps), "--micro-batch", str(micro_batch),
        "--dtype", default_dtype(), "--out", str(asked.out / "trl"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def tiny_prompts(steps: int) -> list[str]:
    """The embedded task's questions as the chat template writes them."""
    from transformers import AutoTokenizer

    from rlft.model.backbone import resolve_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_path(EMBEDDED))
    turns = [[{"role": "user", "content": f"{a}+{b}=?"}] for a in range(10, 60) for b in range(10, 12 + steps)]
    return cast(list[str], tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def told(measured: Measured) -> str:
    middle = {
        name: statistics.median(s[name] for s in measured.seconds) for name in STAGES if name in measured.seconds[0]
    }
    return ", ".join(f"{name} {value:.2f}" for name, value in middle.items()) + f" s; {measured.peak / 1e9:.2f} GB"


def report(results: list[dict], asked: argparse.Namespace) -> str:
    """The table of stages and, where both ran, of ratios."""
    head = ["work", "trainer", *STAGES, "completion tokens/s", "peak memory"]
    rows, ratios = [], []
    for result in results:
        work, name = Work(**result["work"]), label(Work(**result["work"]), result["tiny"])
        for trainer, runs in result["runs"].items():
            seconds = [step for run in runs for step in run["seconds"]]
            cells = [spread([s[stage] for s in seconds]) if stage in seconds[0] else "" for stage in STAGES]
            rate = work.completions * work.completion_tokens / middle(seconds, "step")
            told_rate = "" if result["tiny"] else f"{rate:,.0f}"
            rows.append([name, trainer, *cells, told_rate, f"{max(r['peak'] for r in runs) / 1e9:.2f} GB"])
        if len(result["runs"]) == 2:
            ratios.append([name, *ratio_cells(result["runs"]), asked.chosen.get(name, asked.trl_micro_batch[0])])
    parts = [table(head, rows)]
    if ratios:
        parts.append(
            table(["work", "TRL / rlft: step", "train", "peak memory rlft / TRL", "TRL's micro-batch"], ratios)
        )
    if default_dtype() == "bfloat16":
        parts.append(utilisation(results, asked))
    micro = (
        f"Seconds: median (smallest to largest) of {asked.rounds} processes x {asked.steps} steps. {where_and_when()}."
    )
    return "\n\n".join([*parts, micro])


def ratio_cells(runs: dict) -> list[str]:
    """Medians of the ratios of processes that ran one after the other."""
    cells = []
    for stage in ("step", "train"):
        pairs = zip(runs["trl"], runs["rlft"], strict=True)
        cells.append(spread([middle(t["seconds"], stage) / middle(r["seconds"], stage) for t, r in pairs]))
    return [*cells, f"{max(r['peak'] for r in runs['rlft']) / min(r['peak'] for r in runs['trl']):.2f}"]


def utilisation(results: list[dict], asked: argparse.Namespace) -> str:
    """Model FLOPs utilisation of rlft's training part: arithmetic it needs / (seconds x the device's product rate)."""
    rows = []
    for result in results:
        if result["tiny"] or "rlft" not in result["runs"]:
            continue
        work = Work(**result["work"])
        seconds = [step for run in result["runs"]["rlft"] for step in run["seconds"]]
        share = step_flops(SIZES[asked.size], work) / middle(seconds, "train") / peak_rate()
        rows.append([work.name, f"{share:.0%}"])
    return table(["work", "FLOPs utilisation of the training part"], rows)


def middle(seconds: list[dict[str, float]], stage: str) -> float:
    return statistics.median(s[stage] for s in seconds)


def spread(values: list[float]) -> str:
    digits = 3 if statistics.median(values) < 0.1 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128+128", "384+64", "64+512", "tiny"])
    parser.add_argument("--groups", nargs="+", type=int, default=[8])
    parser.add_argument("--rounds", type=int, default=2, help="processes of each, in turn")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a process")
    parser.add_argument("--only", nargs="+", choices=["rlft", "trl"], default=["rlft", "trl"])
    parser.add_argument("--size", choices=list(SIZES), default="17m")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--trl-micro-batch", nargs="+", type=int, default=[4, 8], help="several: the fastest is taken")
    parser.add_argument("--override", nargs="*", default=[], help="more keys for rlft, such as token_budget=4096")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    asked = parser.parse_args()
    asked.out, asked.chosen = asked.out.resolve(), {}
    return asked


if __name__ == "__main__":
    main()
