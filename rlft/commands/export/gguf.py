"""The commands with which llama.cpp converts an exported folder into a GGUF file; rlft itself writes none.

Both scripts are in llama.cpp's repository, which each command expects in the folder `llama.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    return None


def instructions(folder: Path, adapter: Mapping[str, Any] | None) -> str:
    """The line printed after an export; `adapter` is the folder's adapter_config.json, or None for a model."""
    if adapter is None:
        return f"as GGUF, with {REPOSITORY}: {model_command(str(folder))}"
    if (problem := why_no_adapter(adapter)) is not None:
        return f"as GGUF: {problem}; export as=model and convert that"
    base = str(adapter["base_model_name_or_path"])
    return f"as GGUF, with {REPOSITORY}: {adapter_command(str(folder), base, base_is_folder=Path(base).is_dir())}"


def card_section(
    folder: str, adapter: Mapping[str, Any] | None, base_id: str | None, end: tuple[int, str] | None = None
) -> str:
    """The section of a model card about GGUF.

    Args:
        folder: the exported folder's name.
        adapter: its adapter_config.json, or None for a model.
        base_id: the base's hub id; None if the base is a folder.
        end: (id, text) of the token that ends a turn, if the tokenizer names another one; else None.
    """
    if adapter is None:
        command = model_command(folder)
        note = "`--outtype q8_0` makes it half as large."
    elif (problem := why_no_adapter(adapter)) is not None:
        return f"## GGUF\n\nNot as an adapter: {problem}. Export the merged model and convert that."
    else:
        command = adapter_command(folder, base_id or "base", base_is_folder=base_id is None)
        note = "" if base_id else "`base` is a folder with the base model."
    introduction = (
        f"For [llama.cpp]({REPOSITORY}) and programs built on it, beside a clone of it and this folder as `{folder}`:"
    )
    parts = ("## GGUF", introduction, f"```\n{command}\n```", note, *([] if end is None else [end_note(*end)]))
    return "\n\n".join(part for part in parts if part)


def end_note(token: int, text: str) -> str:
    """How llama.cpp stops at the end of a turn: the file holds the tokenizer's end token, and not this one."""
    option = f"--override-kv tokenizer.ggml.eot_token_id=int:{token}"
    return f"A turn ends with `{text}`. If llama.cpp does not know that token by its name, start it with `{option}`."
