"""Models with random weights, and prompts of a given length, for `rlft doctor` and benchmarks.

No model or data set is downloaded. A prompt consists of letters, one token each, and the tokenizer has no end token, so
that every completion has the requested length.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

from rlft.plan.roofline import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen2-shaped model: head size = hidden / heads, tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int


SIZES = {
    # For trying out the scripts.
    "1m": Size(hidden=128, layers=2, heads=4, key_heads=2, intermediate=384, vocabulary=4096),
    "17m": Size(hidden=384, layers=8, heads=6, key_heads=2, intermediate=1152, vocabulary=8192),
    "120m": Size(hidden=768, layers=12, heads=12, key_heads=4, intermediate=2304, vocabulary=32768),
    "0.5b": Size(hidden=896, layers=24, heads=14, key_heads=2, intermediate=4864, vocabulary=151936),
    "1.5b": Size(hidden=1536, layers=28, heads=12, key_heads=2, intermediate=8960, vocabulary=151936),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    prompts: int = 8
    group: int = 8
    prompt_tokens: int
    completion_tokens: int
    rank: int = 16

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens}+{self.completion_tokens} G{self.group}"

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def rows(self) -> Work:
        """The rows of a step, in one micro-batch."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        budget = self.prompts * (prompt + self.group * completion)
        return Work(prompts=self.prompts, group=self.group, prompt=prompt, completion=completion, budget=budget)


def make_model(folder: Path, size: Size, dtype: str) -> Path:
    """A folder with a config, random weights (normal, 0.02) and a byte tokenizer; it is made only once."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    # The library's type stubs have only getters for these two properties.
    setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))  # noqa: B010
    setattr(tokenizer, "decoder", decoders.ByteLevel())  # noqa: B010
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    # transformers reads the tokenizer of a qwen2 as a Qwen2Tokenizer, which has an end token unless the file says null.
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None, "unk_token": None}))
    return folder


def write_prompts(file: Path, work: Workload, steps: int) -> Path:
    """A JSONL file of prompts of exactly `work.prompt_tokens` letters; their answers are not used."""
    rng = random.Random(0)
    rows = [
        {"prompt": "".join(rng.choices(string.ascii_letters, k=work.prompt_tokens)), "answer": "a"}
        for _ in range(4 * work.prompts * steps)  # some are held out
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
