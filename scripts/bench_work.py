"""What the benchmarks run on: models with random weights, prompts of a given length, and ways to run and read rlft.

No model or data set is downloaded. A prompt is letters, one token each, and the end token lies outside the model's
vocabulary, so that every completion has the length it is asked for.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare_algorithms import machine

from rlft import runfolder
from rlft.logger.jsonl import METRICS, read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
EMBEDDED = "embedded:tiny-arithmetic"


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
    "17m": Size(hidden=384, layers=8, heads=6, key_heads=2, intermediate=1152, vocabulary=8192),
    "120m": Size(hidden=768, layers=12, heads=12, key_heads=4, intermediate=2304, vocabulary=32768),
    "0.5b": Size(hidden=896, layers=24, heads=14, key_heads=2, intermediate=4864, vocabulary=151936),
    "1.5b": Size(hidden=1536, layers=28, heads=12, key_heads=2, intermediate=8960, vocabulary=151936),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step: prompts x group completions. Lengths in tokens; rank of the LoRA on all linear layers."""

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


def make_model(folder: Path, size: Size, dtype: str) -> Path:
    """Config, weights (normal, 0.02) and a tokenizer of bytes; made once."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"<end>": size.vocabulary}, merges=[]))
    # The library's own stubs give these two properties getters alone.
    setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))  # noqa: B010
    setattr(tokenizer, "decoder", decoders.ByteLevel())  # noqa: B010
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="!")
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
    return folder


def write_prompts(file: Path, work: Work, steps: int) -> Path:
    """JSONL of prompts of exactly `work.prompt_tokens` letters; the answers are never looked at."""
    dice = random.Random(0)
    rows = [
        {"prompt": "".join(dice.choices(string.ascii_letters, k=work.prompt_tokens)), "answer": "a"}
        for _ in range(4 * work.prompts * steps)  # some are held out
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process: seconds by stage of each measured step, and the most memory it held, in bytes.

    `train` is credit + update (TRL's is what is neither sampling nor reward).
    """

    seconds: list[dict[str, float]]
    peak: int

    def dump(self) -> str:
        return json.dumps(asdict(self))


def run_rlft(folder: Path, model: str, work: Work, steps: int, overrides: list[str], embedded: bool) -> Measured:
    """An ordinary `rlft train` in a process of its own; the first step, in which things are warmed up, is left out."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"hydra.run.dir={folder}", *overridden(words_of(folder.parent, model, work, steps, embedded), overrides)]
    subprocess.run(
        [sys.executable, "-m", "rlft.cli", "train", *words], check=True, cwd=folder.parent, env=environment()
    )
    lines = read_lines(folder / METRICS)
    idle = max(line["waste/zero_advantage_fraction"] for line in lines)
    assert embedded or idle == 0, f"{idle:.0%} of the completions taught nothing, so there was less to do"
    seconds = [
        {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
        for line in lines[1:]
    ]
    for step in seconds:
        step["train"] = step["credit"] + step["update"]
    return Measured(seconds=seconds, peak=max(line["memory/peak_bytes"] for line in lines))


def mean_token(group: Any) -> list[float]:
    """The mean token id: a reward that differs between siblings, so that every group is trained on."""
    return [mean_of(rollout.completion.token_ids) for rollout in group.rollouts]


def mean_of(token_ids: Sequence[int]) -> float:
    return sum(token_ids) / len(token_ids) / 1000


def environment() -> dict[str, str]:
    """This one, in which workers find the reward above."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def overridden(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The words, those left out that are given anew, and the overrides."""
    given = {word.partition("=")[0] for word in overrides}
    return [*(word for word in words if word.partition("=")[0] not in given), *overrides]


def words_of(folder: Path, model: str, work: Work, steps: int, embedded: bool) -> list[str]:
    """What `rlft train` is told of this work; the prompts are written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        f"steps={steps + 1}",
        f"prompts_per_step={work.prompts}",
        f"group_size={work.group}",
        f"lora.rank={work.rank}",
        f"lora.alpha={work.rank}",
        f"generation.max_tokens={work.completion_tokens}",
        "eval.every=0",
        "checkpoint.every=0",
        "logger=[jsonl]",
    ]
    if not embedded:
        prompts = write_prompts(folder / "prompts.jsonl", work, steps + 1)
        words += [
            "data=jsonl",
            f"data.path={prompts}",
            "data.held_out_fraction=0.01",
            f"prompts.max_tokens={work.prompt_tokens}",
            "prompts.style=raw",
            f"model.path={model}",
            "~reward.exact_match",
            "~reward.format",
            "+reward.mean_token={_target_: bench_work.mean_token, weight: 1.0}",
        ]
    return words


def where_and_when() -> str:
    """Machine, torch, commit and date, for the foot of a table."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"{machine(device)}, torch {torch.__version__}, commit {runfolder.commit()}, {datetime.now(UTC):%Y-%m-%d}"


def default_dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
