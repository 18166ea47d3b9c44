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
from collections.abc import Iterator
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


def examples(size: int, seed: int) -> Iterator[tuple[dict[str, str], dict[str, str], dict[str, str]]]:
    """(demonstration, preference, cold start) of each problem."""
    rng = random.Random(seed)
    for a, operation, b in problems(size, rng):
        thought, answer = working(a, operation, b), a + b if operation == "+" else a - b
        asked, right = question(a, operation, b), well_formatted(thought, answer)
        near_miss = rng.random() < NEAR_MISS / (NEAR_MISS + BAD_FORMAT)
        bad = well_formatted(thought, wrong(answer, rng)) if near_miss else badly_formatted(thought, answer, rng)
        spoken = well_formatted(in_words(thought, operation, german=rng.random() < 0.5), answer)
        yield (
            {"prompt": asked, "completion": right},
            {"prompt": asked, "chosen": right, "rejected": bad},
            {"prompt": asked, "completion": spoken},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder to write to")
    parser.add_argument("--size", type=int, default=1024, help="problems")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    columns = zip(*examples(args.size, args.seed), strict=True)
    for name, lines in zip(("demonstrations", "preferences", "cold-start"), columns, strict=True):
        file = args.out / f"arithmetic-{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{len(lines)} {name}, {file.stat().st_size:,} bytes: {file}")


if __name__ == "__main__":
    main()
