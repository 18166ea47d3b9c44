"""What an engine holds of a published adapter, read back from it, and what it has to hold: compared bit for bit.

Both are checksums under PEFT's names of the adapter's tensors, so that they can be sent between processes. An engine
rounds A and B to a dtype of its own and may multiply B by the adapter's scale s once, instead of each product: then
that is rounded again. What is compared are A and s B, rounded like that; of a model that is trained whole, its weights.
Rows and columns of zeros with which an engine fills a tensor up, to a larger rank, change no checksum, nor do the signs
of zeros.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlft.generation.shared_base import CHUNK, weighted_bits
from rlft.system.device import to_cpu, widest
from rlft.types import Adapter

PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class Fingerprint(NamedTuple):
    """Of a tensor: 16 hex digits that any changed bit changes, and its Euclidean norm."""

    checksum: str
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """What an engine holds."""

    dtype: str = "float32"  # what the adapter is rounded to, such as "bfloat16"
    tensors: Mapping[str, Fingerprint]  # {PEFT's name: fingerprint of A, or of s B}; empty without an adapter
    faults: tuple[str, ...] = ()  # what else is wrong with what it computes with, in words
    unread: tuple[str, ...] = ()  # names of tensors of the adapter that cannot be read back, and are not compared
    is_trainers: bool = False  # whether it computes with the trainer's own tensors, so that there is nothing to compare

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], faults: Iterable[str] = (), unread: Iterable[str] = ()) -> LoadedAdapter:
        """The fingerprints of what an engine holds: {PEFT's name: A, s B, or another tensor}."""
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} or {"float32"}
        assert len(dtypes) == 1, f"an adapter is rounded to one dtype, not to {dtypes}"
        return cls(dtype=dtypes.pop(), tensors=fingerprints(tensors), faults=tuple(faults), unread=tuple(unread))


def published(adapter: Adapter, dtype: str) -> dict[str, Fingerprint]:
    """What an engine that rounds to this dtype has to hold of the adapter."""
    scales = {name: scale_of(adapter.config, name.removesuffix(UP)) for name in adapter.weights if name.endswith(UP)}
    return fingerprints(adapter.weights, getattr(torch, dtype), scales)


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """s of the adapter's layer with this name, by its adapter_config.json as PEFT reads it."""

    def own(patterns: str, usual: float) -> float:
        of_modules = (config.get(patterns) or {}).items()
        return next((value for name, value in of_modules if re.match(rf"(.*\.)?({name})$", module)), usual)

    rank, alpha = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


@torch.no_grad()
def fingerprints(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, scales: Mapping[str, float] | None = None
) -> dict[str, Fingerprint]:
    """The fingerprint of each tensor. Those of one shape are computed together, and a device is waited for once.

    The checksum is that of `shared_base.checksum`.

    dtype: what they are rounded to first; None: they are read as they are.
    scales: {name: what a tensor is multiplied with after that}.
    """
    by_kind: dict[tuple[float | None, torch.Size, torch.dtype, torch.device], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        scale = None if scales is None else scales.get(name)
        by_kind[scale, tensor.shape, tensor.dtype, tensor.device].append(name)
    kept: list[list[str]] = []
    results: dict[str, Tensor] = {}
    for (scale, *_), names in by_kind.items():
        at_once = max(1, CHUNK // max(1, tensors[names[0]].numel()))
        for start in range(0, len(names), at_once):
            batch = names[start : start + at_once]
            read = ((name, tensors[name].detach()) for name in batch)
            # With the rank as the first axis, so that what fills up the rank comes last.
            rows = torch.stack([tensor.t() if name.endswith(UP) else tensor for name, tensor in read])
            rows = rows if dtype is None else rows.to(dtype)
            sums, norms = _sums(rows if scale is None else rows * scale)
            results |= {f"sums {len(kept)}": sums, f"norms {len(kept)}": norms}
            kept.append(batch)
    numbers = {name: tensor.tolist() for name, tensor in to_cpu(results).items()}
    found = {
        name: Fingerprint(f"{total % 2**64:016x}", norm)
        for i, batch in enumerate(kept)
        for name, total, norm in zip(batch, numbers[f"sums {i}"], numbers[f"norms {i}"], strict=True)
    }
    return {name: found[name] for name in tensors}


def _sums(tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of weighted bits int64 `[N]`, norms `[N]`) of N tensors `[N, ..]`, which may be written into."""
    rows = tensors.reshape(len(tensors), -1).add_(0)  # -0 becomes 0
    return weighted_bits(rows), torch.linalg.vector_norm(rows, dim=1, dtype=widest(rows.device))


# -- the comparison ----------------------------------------------------------------------------------------------------
def difference(
    version: int,
    found: LoadedAdapter,
    expected: Mapping[str, Fingerprint],  # its tensors, rounded as the engine rounds
    earlier: Mapping[int, Mapping[str, Fingerprint]],  # {version: tensors}, to name the one of a stale engine
) -> str | None:
    """How what an engine holds differs from what was published, in words; None if it is the same."""
    expected = {name: fingerprint for name, fingerprint in expected.items() if name not in found.unread}
    wrong = [name for name in {**expected, **found.tensors} if not _equal(found.tensors, expected, name)]
    if not wrong:
        return None if not found.faults else f"policy version {version}: {'; '.join(found.faults)}"
    if not found.tensors:
        return f"policy version {version}: it holds no adapter"
    worst = max(wrong, key=lambda name: _gap(found.tensors, expected, name))
    others = f"{len(wrong)} of the {len(expected)} tensors that it was given are others"
    text = f"policy version {version}: {others}, such as {_shown(worst, found.tensors, expected)}"
    for other in sorted(earlier, reverse=True):
        if all(_equal(found.tensors, earlier[other], name) for name in wrong):
            return f"{text}; it still holds version {other}"
    places = [name for name in expected if found.tensors.get(worst, _NONE).checksum == expected[name].checksum]
    return f"{text}, which is that of {_short(places[0])}" if places else text


_NONE = Fingerprint("", math.nan)


def _equal(first: Mapping[str, Fingerprint], second: Mapping[str, Fingerprint], name: str) -> bool:
    return name in first and name in second and first[name].checksum == second[name].checksum


def _gap(found: Mapping[str, Fingerprint], expected: Mapping[str, Fingerprint], name: str) -> float:
    if name not in found or name not in expected:
        return math.inf
    return abs(found[name].norm - expected[name].norm) / (expected[name].norm or math.inf)


def _shown(name: str, found: Mapping[str, Fingerprint], expected: Mapping[str, Fingerprint]) -> str:
    if name not in found:
        return f"{_short(name)}, which is missing"
    if name not in expected:
        return f"{_short(name)}, which was not published"
    there, here = found[name].norm, expected[name].norm
    times = f", {there / here:.8g} times" if here else ""
    return f"{_short(name)} with a norm of {there:.8g} instead of {here:.8g}{times}"


def _short(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(".weight")
