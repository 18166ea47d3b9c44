"""Writes the embedded examples, the same every time: demonstrations for `rlft sft`, preferences, text for PPO-ptx.

    python scripts/make_arithmetic_examples.py     # rewrites rlft/assets/arithmetic-*.jsonl

Distinct problems of the training split. A demonstration is a right, well formatted answer; a preference is one beside
a near miss or a badly formatted answer (make_tiny_model.py's mixture without its right ones). The cold start of the R1
pipeline is right answers whose reasoning is in words, half of them English and half of them German: a language for the
model to be consistent in. The text is what the embedded model was taught last, for PPO-ptx to keep it modelling that:
chats in plain text with their special tokens, `given`, which it was never taught to predict, and `text`, the answer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from make_tiny_model import BAD_FORMAT, NEAR_MISS, badly_formatted, problem, response, well_formatted, working, wrong
from transformers import AutoTokenizer

from rlft.data.arithmetic import question
from rlft.data.examples import Text

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


def make_texts(tokenizer: Any, size: int, seed: int) -> list[Text]:
    """`size` chats in the model's template, no two of the same problem, in the shares of make_tiny_model.py."""
    rng = random.Random(seed)
    texts: dict[tuple[int, str, int], Text] = {}
    while len(texts) < size:
        numbers = problem(rng)
        if numbers not in texts:
            chat = [{"role": "user", "content": question(*numbers)}]
            context = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            # The line break that the template adds after a turn was never taught: the answer ends with its end token.
            texts[numbers] = Text(context=context, text=response(*numbers, mixture=True, rng=rng) + tokenizer.eos_token)
    return list(texts.values())


FILES = {"demonstrations": (demonstration, 1024), "preferences": (preference, 1024), "cold-start": (cold_start, 2560)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = make_texts(AutoTokenizer.from_pretrained(ASSETS / "tiny-arithmetic"), 1350, args.seed)
    made = {"text": [{"given": text.context, "text": text.text} for text in texts]}
    for name, (example, size) in FILES.items():
        rng = random.Random(args.seed)
        made[name] = [example(*numbers, rng) for numbers in problems(size, rng)]
    for name, lines in made.items():
        file = args.out / f"arithmetic-{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{len(lines)} {name}, {file.stat().st_size:,} bytes: {file}")


if __name__ == "__main__":
    main()
