"""The keys of `generation.vllm`, and the arguments of vLLM's engine that `options` may not have.

Those that rlft sets itself and those that vLLM does not have are refused. Lists and rules are those of vLLM 0.33, which
is not imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlft.config.bounds import PositiveFraction, PositiveInt
from rlft.config.choices import closest
from rlft.config.suggest import refused_settings
from rlft.types import UserError, require

DEAD_ENGINE = "EngineDeadError"
"""The error of vLLM after which no call succeeds any more, although this process lives on."""

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values vLLM takes for max_lora_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMKeys:
    """Meanings and defaults are in configs/generation/auto.yaml."""

    gpu_memory_utilization: PositiveFraction
    max_num_seqs: PositiveInt
    sleep: bool
    enforce_eager: bool
    options: Mapping[str, Any]
    share_base: bool | Literal["auto"] = "auto"
    weights: Literal["auto", "copy", "adapter"] = "adapter"
    batch_invariant: bool = False

    @staticmethod
    def of_older(keys: Mapping[str, Any]) -> dict[str, Any]:
        """Keys as they are written now: `merged` made the sums of `copy` in a base that engine and trainer shared."""
        return {**keys, "weights": "copy", "share_base": "auto"} if keys.get("weights") == "merged" else dict(keys)


def engine_rank(rank: int) -> int:
    """The smallest max_lora_rank of vLLM that holds adapters of this rank. UserError("lora.rank") if none does."""
    problem, remedy = (
        f"vLLM takes adapters up to rank {ENGINE_RANKS[-1]}",
        "lower it, or choose generation=transformers",
    )
    require(rank <= ENGINE_RANKS[-1], "lora.rank", problem, got=rank, remedy=remedy)
    return next(allowed for allowed in ENGINE_RANKS if rank <= allowed)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses, by the key `options.<argument>`, what rlft sets itself, or an installed vLLM does not have."""
    for name, value in options.items():
        key = f"options.{name}"
        if refused := refused_settings("vllm").get(name):
            raise UserError(key, refused[0], got=value, remedy=refused[1])
        known = arguments()
        if known and name not in known:
            close = closest(name, known)
            meant = f"did you mean {close}?" if close else "see its list of engine arguments"
            raise UserError(key, "vLLM's engine has no such argument", got=value, remedy=meant)


@cache
def arguments() -> tuple[str, ...]:
    """The arguments of the installed vLLM's engine, read from its source; none where it is not installed."""
    source = source_of("engine", "arg_utils.py")
    if source is None:
        return ()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return tuple(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))
    return ()


def source_of(*path: str) -> str | None:
    """The text of this file of the installed vLLM; None where there is none."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0], *path)
    return file.read_text() if file.is_file() else None
