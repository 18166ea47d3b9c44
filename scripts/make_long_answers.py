"""Makes a tiny model whose answers of 300 to 800 tokens are decided by their first token.

    python scripts/make_long_answers.py --out /tmp/long

It begins an answer with one of CHOICES tokens, each as likely as the others, and then goes through PHASES phases of the
choice, each of which is one token that is repeated, on average PHASE times; after the last one it ends. Every token
shows which choice was made, but each phase has a token of its own. So a critic has to learn the values of phases one by
one, and what is right is decided some 450 tokens before the end.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import rlft

BASE = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"
CHOICES, PHASES, PHASE = 4, 16, 28
FIRST = 20
"""The id of the token of the first choice's first phase; its further phases follow, then the other choices."""
HIDDEN, SURE = 128, 18.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    out = parser.parse_args().out
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    empty = [{"role": "user", "content": ""}]
    prompt = tokenizer.apply_chat_template(empty, add_generation_prompt=True, tokenize=False)
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"][-1]
    model(start, tokenizer.eos_token_id).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(BASE / name, out)


def model(start: int, end: int) -> Qwen2ForCausalLM:
    """A layer that adds nothing yet, between embeddings that are unit vectors and a head that is a table of log-odds.

    Args:
        start: the last token of a prompt.
        end: the token that ends an answer.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=272, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=end,
        pad_token_id=0,
    )  # fmt: skip
    made: Any = Qwen2ForCausalLM(config)
    embeddings, head, layer = made.model.embed_tokens.weight.data, made.lm_head.weight.data, made.model.layers[0]
    for weight in (embeddings, head, layer.self_attn.o_proj.weight.data, layer.mlp.down_proj.weight.data):
        weight.zero_()
    embeddings[:, HIDDEN - 1] = 1.0  # of all tokens that are in no answer
    place = {start: 0, **{FIRST + i: 1 + i for i in range(CHOICES * PHASES)}}
    for token, column in place.items():
        embeddings[token] = torch.eye(HIDDEN)[column]

    def follows(token: int, following: int, share: float) -> None:
        head[following, place[token]] = (SURE + math.log(share)) / math.sqrt(HIDDEN)  # what the norm scales it by

    for choice in range(CHOICES):
        first = FIRST + choice * PHASES
        follows(start, first, 1 / CHOICES)
        for token in range(first, first + PHASES):
            follows(token, token, 1 - 1 / PHASE)
            follows(token, end if token == first + PHASES - 1 else token + 1, 1 / PHASE)
    return made


if __name__ == "__main__":
    main()
