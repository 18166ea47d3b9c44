"""What an export is asked for, validated before torch is imported and anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlft.commands.export import gguf
from rlft.config.choices import choice_remedy
from rlft.config.model import DTYPES
from rlft.config.resolved import AUTO
from rlft.runs import run_folder
from rlft.runs.find import CheckpointKind, NamedRun, find_checkpoint, kind_of_checkpoint
from rlft.types import UserError, require

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
        remedy = f"use as=model, then `{gguf.model_command(str(folder))}`"
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
