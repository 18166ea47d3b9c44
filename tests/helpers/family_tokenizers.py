"""Small tokenizers built like those of families of models, with chat templates written for the tests.

They have the kinds of parts where the boundaries between template and text could go wrong: byte-level BPE with the
families' regular expressions, or SentencePiece's BPE with bytes to fall back on, and tokens of several newlines, and of
newlines and other characters.
"""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlft.tokens.text import RunTokenizer

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "environment" / "templates"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
MISTRAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]

SPECIAL = dict.fromkeys(("qwen2.5", "qwen3", "smollm2", "smollm3"), CHATML)
SPECIAL |= {"llama-3": LLAMA, "mistral": MISTRAL, "gemma": GEMMA}
BEGIN_AND_END = {"llama-3": LLAMA[:2], "mistral": MISTRAL[1:3], "gemma": [GEMMA[2], GEMMA[1]]}


@cache
def family_tokenizer(family: str) -> RunTokenizer:
    """The small tokenizer of a family, with its template; the same one each time."""
    special = SPECIAL[family]
    made = _sentencepiece(special, family == "mistral") if family in ("mistral", "gemma") else _byte_level(special)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if special is CHATML:
        made.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    bos, eos = BEGIN_AND_END.get(family, (None, "<|im_end|>"))
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    keys = {"bos_token": bos, "eos_token": eos, "chat_template": template, "name_or_path": family}
    return RunTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **keys))


def with_attributes(tokenizer: RunTokenizer, **attributes: Any) -> RunTokenizer:
    """Another tokenizer, such as one with this chat_template."""
    own = copy.deepcopy(tokenizer.own)
    for name, value in attributes.items():
        setattr(own, name, value)
    return replace(tokenizer, own=own)


def _corpus() -> list[str]:
    """Plain text with the words of templates, and newlines and brackets side by side in many ways."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(TEMPLATES.glob("*.jinja"))]
    odd = ["\n\n", "\n\n\n", ">\n", "\n<", "}\n", ' "', '"}', "user\n", "assistant\n", "model\n", "  ", "\n ", "▁"]
    return [*texts, *(a + b for a in odd for b in odd for _ in range(20)), "The answer is 42.\n\n" * 50]


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    keys = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **keys)
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _sentencepiece(special: list[str], with_prefix: bool) -> Tokenizer:
    """BPE over the whole text between special tokens, with a space before each if `with_prefix` (Llama 2, Mistral)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if with_prefix else spaces
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *all_bytes], show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    written: dict[str, Any] = json.loads(tokenizer.to_str())
    written["model"]["byte_fallback"] = True
    written["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(written))
    ends = [decoders.Strip(" ", 1, 0)] if with_prefix else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
