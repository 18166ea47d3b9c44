"""What is to be exported, checked before anything is computed; and the commands that make a GGUF file of the folder.

Those are of llama.cpp's two scripts; rlft itself writes no GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft.config.choices import choice_remedy
from rlft.config.model import DTYPES
from rlft.config.resolved import AUTO
from rlft.model.adapter_folder import switches_of
from rlft.runs import run_folder
from rlft.runs.find import CheckpointKind, NamedRun, find_checkpoint, kind_of_checkpoint
from rlft.system.terminal import command_line
from rlft.types import UserError, require

REPOSITORY = "https://github.com/ggml-org/llama.cpp"
MODEL_SCRIPT, ADAPTER_SCRIPT = "llama.cpp/convert_hf_to_gguf.py", "llama.cpp/convert_lora_to_gguf.py"


def model_command(folder: str) -> str:
    """The command that converts a model folder into <folder>.gguf, in the model's 16-bit format.

    >>> model_command("exports/mine")
    'python llama.cpp/convert_hf_to_gguf.py exports/mine --outfile exports/mine.gguf --outtype auto'
    """
    return command_line("python", MODEL_SCRIPT, folder, "--outfile", f"{folder}.gguf", "--outtype", "auto")


def adapter_command(folder: str, base: str, *, base_is_folder: bool) -> str:
    """The command that converts an adapter folder into <folder>.

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


def gguf_line(folder: Path, adapter: Mapping[str, Any] | None) -> str:
    """The line printed after an export; `adapter` is the folder's adapter_config.json, or None for a model."""
    if adapter is None:
        return f"as GGUF, with {REPOSITORY}: {model_command(str(folder))}"
    if (problem := why_no_adapter(adapter)) is not None:
        return f"as GGUF: {problem}; export as=model and convert that"
    base = str(adapter["base_model_name_or_path"])
    return f"as GGUF, with {REPOSITORY}: {adapter_command(str(folder), base, base_is_folder=Path(base).is_dir())}"


FORMS = ("model", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A validated request to export a checkpoint of the run `source` to the folder `out`."""

    source: NamedRun
    checkpoint: Path  # its folder, which is undamaged
    checkpoint_kind: CheckpointKind
    is_model: bool
    dtype: str  # `auto`, or one of DTYPES
    out: Path
    repo_id: str | None = None  # the repository that the folder is pushed to, for the model card; None: none


def prepare(
    source: NamedRun, out: str | None, kind: str | None, dtype: str | None, say: Callable[[str], None]
) -> Export:
    """Validates a request, in which None stands for a key that was not typed; imports no torch and writes nothing."""
    require(out, "out", "is missing" if out is None else "is empty", remedy="write out=<new folder>")
    folder = Path(out or "").expanduser()
    if kind == "gguf":
        remedy = f"use as=model, then `{model_command(str(folder))}`"
        raise UserError("as", "is written by llama.cpp's converter, not by rlft", got=kind, remedy=remedy)
    remedy = choice_remedy(kind, FORMS)
    require(kind in (None, *FORMS), "as", "is not a form that rlft writes", got=kind or "nothing", remedy=remedy)
    remedy = choice_remedy(dtype, (AUTO, *DTYPES))
    require(dtype in (None, AUTO, *DTYPES), "dtype", "is not a known dtype", got=dtype or "nothing", remedy=remedy)
    is_model = kind != "adapter"
    problem = "applies to a model's weights only: an adapter keeps its own dtype"
    require(is_model or dtype is None, "dtype", problem, got=dtype, remedy="leave it out, or use as=model")
    is_new, problem = not (folder.exists() or folder.is_symlink()), "exists already, and nothing is ever overwritten"
    require(is_new, "out", problem, got=folder, remedy="choose a new folder, or remove that one first")
    is_among_them = folder.resolve().is_relative_to(run_folder.checkpoints(source.run).resolve())
    problem = "lies among the run's checkpoints, which would no longer be whole"
    require(not is_among_them, "out", problem, got=folder, remedy="choose another folder")
    checkpoint = find_checkpoint(source, say)
    saved_kind = kind_of_checkpoint(checkpoint)
    has_it = is_model or saved_kind is not CheckpointKind.weights
    require(has_it, "as", "the run trained all weights and has no adapter", got=kind, remedy="use as=model")
    if is_model and saved_kind is CheckpointKind.reward:
        problem = "a reward model is an adapter with a scalar head, which no causal language model holds"
        raise UserError("as", problem, got="model", remedy=f"use as=adapter; then reward.learned.path={folder}")
    return Export(
        source=source,
        checkpoint=checkpoint,
        checkpoint_kind=saved_kind,
        is_model=is_model,
        dtype=dtype or AUTO,
        out=folder,
    )
