"""The commands that make a GGUF file of an exported folder, with llama.cpp's two scripts; rlft itself writes none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlft.model.adapter_folder import switches_of
from rlft.system.terminal import command_line

REPOSITORY = "https://github.com/ggml-org/llama.cpp"
MODEL_SCRIPT, ADAPTER_SCRIPT = "llama.cpp/convert_hf_to_gguf.py", "llama.cpp/convert_lora_to_gguf.py"


def model_command(folder: str) -> str:
    """The command that converts a model folder into <folder>.gguf, in the model's 16-bit format.

    >>> model_command("exports/mine")
    'python llama.cpp/convert_hf_to_gguf.py exports/mine --outfile exports/mine.gguf --outtype auto'
    """
    return command_line("python", MODEL_SCRIPT, folder, "--outfile", f"{folder}.gguf", "--outtype", "auto")


def adapter_command(folder: str, base: str, *, base_is_folder: bool) -> str:
    """The command that converts an adapter folder into <folder>.gguf.

    `base` is a folder with the base's config, or its hub id.

    >>> adapter_command("mine", "Qwen/Qwen2.5-0.5B", base_is_folder=False)  # doctest: +ELLIPSIS
    'python llama.cpp/convert_lora_to_gguf.py mine --base-model-id Qwen/Qwen2.5-0.5B --outfile mine.gguf --outtype f32'
    """
    option = "--base" if base_is_folder else "--base-model-id"
    return command_line(
        "python", ADAPTER_SCRIPT, folder, option, base, "--outfile", f"{folder}.gguf", "--outtype", "f32"
    )


def why_no_adapter(adapter: Mapping[str, Any]) -> str | None:
    """Why the converter cannot take an adapter with this adapter_config.json; None if it can.

    The converter stores only A, B and `lora_alpha`, because llama.cpp scales every adapter by alpha / rank.
    """
    if adapter.get("use_dora"):
        return "llama.cpp has no DoRA"
    if adapter.get("use_rslora"):
        return "llama.cpp scales adapters by alpha / rank, not by rsLoRA's alpha / sqrt(rank)"
    if switches_of(adapter)["experts"]:
        return "its converter does not read adapters of stacked experts"
    return None


def instructions(folder: Path, adapter: Mapping[str, Any] | None) -> str:
    """The line printed after an export; `adapter` is the folder's adapter_config.json, or None for a model."""
    if adapter is None:
        return f"as GGUF, with {REPOSITORY}: {model_command(str(folder))}"
    if (problem := why_no_adapter(adapter)) is not None:
        return f"as GGUF: {problem}; export as=model and convert that"
    base = str(adapter["base_model_name_or_path"])
    return f"as GGUF, with {REPOSITORY}: {adapter_command(str(folder), base, base_is_folder=Path(base).is_dir())}"
