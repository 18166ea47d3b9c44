"""What `rlft plan` says of memory beside what a run takes.

    python scripts/check_plan.py                        # ten minutes on two CPU cores
    python scripts/check_plan.py --only "17m 384+64 G8"

Every row is one `rlft plan --json` and one `rlft train` of two steps, of models with random weights whose completions
all have the length that they may have. The table goes to <out>/plan.md; 15 % is what we hold ourselves to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_work import (
    EMBEDDED,
    default_dtype,
    environment,
    overridden,
    run_rlft,
    table,
    where_and_when,
    words_of,
)

from rlft.commands.doctor.work import SIZES, Workload, make_model

ALLOWED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """size: of rlft.commands.doctor.work's models; None: the embedded one on its own task."""

    size: str | None
    work: Workload
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.size or "tiny", self.work.name, *self.overrides])


CRITIC = ("algorithm=ppo", "critic.kind=adapter")
CASES = [
    Case(size="1m", work=Workload(prompts=2, group=2, prompt_tokens=8, completion_tokens=8)),
    Case(size=None, work=Workload(prompts=32, prompt_tokens=32, completion_tokens=48)),
    Case(size=None, work=Workload(prompts=32, prompt_tokens=32, completion_tokens=48), overrides=CRITIC),
    Case(size="17m", work=Workload(prompt_tokens=128, completion_tokens=128)),
    Case(size="17m", work=Workload(prompt_tokens=384, completion_tokens=64)),
    Case(size="17m", work=Workload(prompts=4, group=16, prompt_tokens=64, completion_tokens=256)),
    Case(size="17m", work=Workload(prompt_tokens=128, completion_tokens=128), overrides=CRITIC),
    Case(
        size="17m",
        work=Workload(prompt_tokens=128, completion_tokens=128),
        overrides=("token_budget=8192", "generation.transformers.weights=apart"),
    ),
    Case(
        size="17m",
        work=Workload(prompt_tokens=128, completion_tokens=128),
        overrides=("token_budget=8192", "model.gradient_checkpointing=true"),
    ),
    Case(
        size="17m",
        work=Workload(prompts=2, prompt_tokens=128, completion_tokens=128),
        overrides=("eval.every=2", "eval.num_prompts=16", "eval.num_samples=8", "data.held_out_fraction=0.6"),
    ),
    Case(size="120m", work=Workload(prompts=2, prompt_tokens=128, completion_tokens=64)),
    Case(
        size="120m",
        work=Workload(prompts=2, group=4, prompt_tokens=64, completion_tokens=64, rank=64),
        overrides=CRITIC,
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES], help="names of rows")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    rows = []
    for case in CASES:
        if case.name in asked.only:
            rows.append(row(case, asked.out))
            print(*rows[-1], sep="  ", flush=True)
    text = "\n\n".join([table(["run", "planned", "measured", "planned / measured"], rows), f"{where_and_when()}."])
    (asked.out / "plan.md").write_text(text + "\n")
    print(text)


def row(case: Case, out: Path) -> list[str]:
    planned, measured = both(case, out)
    mark = "" if abs(planned / measured - 1) <= ALLOWED else " (over 15 %)"
    return [case.name, f"{planned / 1e6:,.0f} MB", f"{measured / 1e6:,.0f} MB", f"{planned / measured:.2f}{mark}"]


def both(case: Case, out: Path) -> tuple[int, int]:
    """(bytes planned, most bytes that the run held)."""
    embedded = case.size is None
    model = EMBEDDED if case.size is None else str(make_model(out / case.size, SIZES[case.size], default_dtype()))
    words = overridden(words_of(out, model, case.work, 1, embedded), case.overrides)
    command = [sys.executable, "-m", "rlft.cli", "plan", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=out, env=environment())
    measured = run_rlft(out / "run", model, case.work, 1, list(case.overrides), embedded=embedded)
    return json.loads(done.stdout)["peak"], measured.peak


if __name__ == "__main__":
    main()
