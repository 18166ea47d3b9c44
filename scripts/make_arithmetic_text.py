"""Writes the embedded text: chats as the embedded model was taught last, for PPO-ptx to keep it modelling them.

    python scripts/make_arithmetic_text.py             # rewrites rlft/assets/arithmetic-text.jsonl, the same every time

Right answers, near misses and bad format in the shares of make_tiny_model.py's late mixture, on distinct problems of
the training split. A line is one chat in plain text with its special tokens: `given`, all before the answer, which the
model was never taught to predict, and `text`, the answer with its end token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from make_tiny_model import problem, response
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlft.data.arithmetic import question
from rlft.data.texts import Text

ASSETS = Path(__file__).parents[1] / "rlft" / "assets"


def make_texts(tokenizer: PreTrainedTokenizerBase, size: int, seed: int) -> list[Text]:
    """`size` chats in the model's template, no two about the same problem."""
    rng = random.Random(seed)
    texts: dict[tuple[int, str, int], Text] = {}
    while len(texts) < size:
        numbers = problem(rng)
        if numbers not in texts:
            chat = [{"role": "user", "content": question(*numbers)}]
            context = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            # The line break that the template adds after a turn was never taught: the answer ends with its end token.
            texts[numbers] = Text(
                context=context, text=response(*numbers, mixture=True, rng=rng) + str(tokenizer.eos_token)
            )
    return list(texts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "arithmetic-text.jsonl", help="file to write (replaced)")
    parser.add_argument("--size", type=int, default=1350, help="texts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = make_texts(AutoTokenizer.from_pretrained(ASSETS / "tiny-arithmetic"), args.size, args.seed)
    lines = (json.dumps({"given": text.context, "text": text.text}) + "\n" for text in texts)
    args.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(texts)} texts, {args.out.stat().st_size:,} bytes: {args.out}")


if __name__ == "__main__":
    main()
