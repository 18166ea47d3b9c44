"""Writes the embedded examples: demonstrations for `rlft sft` and preferences for `rlft rm`, the same every time.

    python scripts/make_arithmetic_examples.py     # rewrites rlft/assets/arithmetic-*.jsonl, but for arithmetic-text

Distinct problems of the training split. A demonstration is a right, well formatted answer; a preference is one beside
a near miss or a badly formatted answer (make_tiny_model.py's mixture without its right ones). The cold start of the R1
pipeline is right answers whose reasoning is in words, half of them English and half of them German: a language for the
model to be consistent in.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from make_tiny_model import BAD_FORMAT, NEAR_MISS, badly_formatted, problem, well_formatted, working, wrong

from rlft.data.arithmetic import question

ASSETS = Path(__file__).parents[1] / "rlft" / "assets"


def problems(size: int, rng: random.Random) -> list[tuple[int, str, int]]:
    """`size` different ones."""
    found: dict[tuple[int, str, int], None] = {}
    while len(found) < size:
        found[problem(rng)] = None
    return list(found)


def in_words(thought: str, operation: str, german: bool) -> str:
    """The digits' sums as a sentence: "we add 7+5=12 and then 4+8+1=13"."""
    verbs = {("+", False): "we add", ("-", False): "we take", ("+", True): "wir addieren", ("-", True): "wir nehmen"}
    return f"{verbs[operation, german]} {(' und dann ' if german else ' and then ').join(thought.split(','))}"


def demonstration(a: int, operation: str, b: int, rng: random.Random) -> dict[str, str]:
    return {"prompt": question(a, operation, b), "completion": well_formatted(*solution(a, operation, b))}


def preference(a: int, operation: str, b: int, rng: random.Random) -> dict[str, str]:
    thought, answer = solution(a, operation, b)
    near_miss = rng.random() < NEAR_MISS / (NEAR_MISS + BAD_FORMAT)
    bad = well_formatted(thought, wrong(answer, rng)) if near_miss else badly_formatted(thought, answer, rng)
    return {"prompt": question(a, operation, b), "chosen": well_formatted(thought, answer), "rejected": bad}


def cold_start(a: int, operation: str, b: int, rng: random.Random) -> dict[str, str]:
    thought, answer = solution(a, operation, b)
    spoken = in_words(thought, operation, german=rng.random() < 0.5)
    return {"prompt": question(a, operation, b), "completion": well_formatted(spoken, answer)}


def solution(a: int, operation: str, b: int) -> tuple[str, int]:
    """(the working, the answer)."""
    return working(a, operation, b), a + b if operation == "+" else a - b


FILES = {"demonstrations": (demonstration, 1024), "preferences": (preference, 1024), "cold-start": (cold_start, 2560)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, (example, size) in FILES.items():
        rng = random.Random(args.seed)
        lines = [example(*numbers, rng) for numbers in problems(size, rng)]
        file = args.out / f"arithmetic-{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{len(lines)} {name}, {file.stat().st_size:,} bytes: {file}")


if __name__ == "__main__":
    main()
