"""Typed sections of the config that concern the model, and what the paths in them name: a model (folder, hub id, or one
that ships with rlft), or an adapter. Defaults and meanings are in configs/train.yaml."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import rlft
from rlft.config.bounds import Decay, NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt
from rlft.config.choices import closest
from rlft.config.keys import Key
from rlft.types import UserError

EMBEDDED = "embedded:"  # the beginning of a path to a model that ships with rlft

ANSWER = "{answer}"  # stands for the prompt's reference answer in snapshot.teacher_hint

ALL_LINEAR = "all-linear"  # the default of lora.target_modules

SWITCHES = ("use_rslora", "use_dora", "experts", "router")
"""Keys of the `lora` section that are true or false, and change what an adapter is."""

HEAD = "lm_head"  # what most models call their output layer

MADE_BY_HAND = {Path("models/SmolLM2-135M-Instruct"): "docs/tutorials/start.md"}
"""{folder of a model that a recipe names and nothing brings: the page that says how it is made}."""

WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""Files in which transformers looks for weights, in its order."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
)  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16")  # the values of model.dtype besides auto

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")  # what model.device may begin with; torch knows which exist here


def resolve_path(path: str, key: str = "model.path") -> str:
    """A folder or hub id that transformers understands: `embedded:<name>` is a model that ships with rlft."""
    if not path.startswith(EMBEDDED):
        return str(Path(path).expanduser()) if looks_local(path) else path
    folder = Path(rlft.__file__).parent / "assets" / path.removeprefix(EMBEDDED)
    if not (folder / "config.json").is_file():
        known = [f.parent.name for f in sorted(folder.parent.glob("*/config.json"))]
        close = closest(folder.name, known)
        guess = f"did you mean {EMBEDDED}{close}? All: " if close else "use "
        remedy = f"{guess}{', '.join(EMBEDDED + name for name in known)}, a folder or a hub id"
        raise UserError(key, "there is no such embedded model", got=path, remedy=remedy)
    return str(folder)


def looks_local(path: str) -> bool:
    """Whether the path is an existing folder, or looks like one, and not a hub id."""
    return path.startswith(("/", ".", "~")) or Path(path).exists()


def check_local(path: str, key: str = "model.path") -> None:
    """Refuses an empty path, an unknown embedded model and a folder that is no model's; a hub id is not looked up."""
    if not path:
        remedy = "give a model folder, a hub id or embedded:tiny-arithmetic"
        raise UserError(key, "is empty", got="nothing", remedy=remedy)
    folder = Path(resolve_path(path, key))
    if looks_local(path) and is_adapter(str(folder)):
        problem = "that folder holds an adapter, not a model"
        raise UserError(key, problem, got=path, remedy=_on_its_base(folder))
    if looks_local(path) and not (folder / "config.json").is_file():
        problem = "there is no config.json in that folder" if folder.exists() else "there is no such folder"
        page = MADE_BY_HAND.get(Path(path))
        first = f"make it as in {page}, or " if page else ""
        raise UserError(key, problem, got=path, remedy=f"{first}point it at a Hugging Face model folder")


def check_whole(path: str, key: str = "model.path", *, needs_weights: bool = True) -> None:
    """Refuses a local folder that lacks a model's config, tokenizer or weights, by the names of its files alone."""
    check_local(path, key)
    folder = Path(resolve_path(path, key))
    if not looks_local(path):
        return
    has = {name for name in (*WEIGHT_FILES, *TOKENIZER_FILES) if (folder / name).is_file()}
    has_own_name = b"transformers_weights" in (folder / "config.json").read_bytes()
    missing = {"a tokenizer": "tokenizer.json and tokenizer_config.json"} if has.isdisjoint(TOKENIZER_FILES) else {}
    if needs_weights and not has_own_name and has.isdisjoint(WEIGHT_FILES):
        missing["weights"] = f"{WEIGHT_FILES[0]}, or {WEIGHT_FILES[1]} and all files that it names"
    for what, names in missing.items():
        remedy = f"copy or download the rest of the model into it ({names}), or give a whole model's folder"
        raise UserError(key, f"there is no file with {what} in that folder", got=path, remedy=remedy)


def _on_its_base(folder: Path) -> str:
    """What to type for the model that this folder's adapter makes of its base."""
    fields: Any = {}
    with contextlib.suppress(OSError, ValueError):  # damaged: it is refused as lora.path
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    fields = fields if isinstance(fields, dict) else {}
    keys = {"model.path": fields.get("base_model_name_or_path") or "<its base>", "lora.path": folder}
    keys |= {"lora.rank": fields.get("r"), "lora.alpha": fields.get("lora_alpha")}
    trained = " ".join(f"{key}={value}" for key, value in keys.items() if value is not None)
    return f"set {trained}; rlft sample and serve take adapter={folder} in the place of lora"


def is_adapter(path: str | None) -> bool:
    """Whether a learned reward is an adapter on the base (None: a new one) and not a network of its own."""
    return path is None or (Path(path).expanduser() / "adapter_config.json").is_file()


class Old(StrEnum):
    auto = "auto"
    sampled = "sampled"
    recompute = "recompute"
    copy = "copy"


class KernelChoice(StrEnum):
    """What a model is computed with: rlft's functions where they are tested, or unchanged transformers and PEFT."""

    auto = "auto"
    plain = "plain"


class CriticKind(StrEnum):
    """Where values come from: nowhere, an adapter of its own with a value head, or a head on the policy's features."""

    none = "none"
    adapter = "adapter"
    shared = "shared"


class RoutingSource(StrEnum):
    """Who chooses the experts of tokens in the passes of the policy."""

    free = "free"
    old = "old"
    engine = "engine"


Recompute = bool | Literal["tiles", "offload"]  # what the backward computes again (`model.gradient_checkpointing`)
TILES, OFFLOAD = "tiles", "offload"
LESS_MEMORY: tuple[Recompute, ...] = (True, TILES, OFFLOAD)  # each takes less of a GPU's memory than the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: Annotated[str, Key(free=True, in_state=False, roles=("model",))]
    revision: str | None
    dtype: str
    device: Annotated[str, Key(free=True, in_state=False)]
    attn_implementation: Annotated[str, Key(in_state=False)]
    gradient_checkpointing: Annotated[Recompute | Literal["auto"], Key(in_state=False)]
    quantization: Literal["4bit"] | None
    trust_remote_code: bool
    kernels: Annotated[KernelChoice, Key(in_state=False)] = KernelChoice.auto
    date: str = "auto"

    def __post_init__(self) -> None:
        try:
            valid = self.date == "auto" or date.fromisoformat(self.date).isoformat() == self.date
        except ValueError:
            valid = False
        if not valid:
            raise UserError(
                "model.date", "is not a date", got=repr(self.date), remedy="write it as 2026-11-25, or auto"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    rank: PositiveInt
    alpha: PositiveFloat
    dropout: Annotated[Decay, Key(in_state=False)]
    target_modules: str | Sequence[str]
    path: Annotated[str | None, Key(roles=("policy",))]
    use_rslora: bool = False
    use_dora: bool = False
    experts: bool = False
    router: bool = False

    @property
    def adapts_head(self) -> bool:
        """Whether the output layer is adapted, under the name that it has in most models."""
        targets = self.target_modules
        if targets == ALL_LINEAR:  # PEFT leaves it out
            return False
        if isinstance(targets, str):
            return re.fullmatch(targets, HEAD) is not None
        return HEAD in targets

    @property
    def kind(self) -> str:
        if self.use_dora:
            return "DoRA with rsLoRA's scale" if self.use_rslora else "DoRA"
        return "rsLoRA" if self.use_rslora else "LoRA"

    @property
    def keys_of_shape(self) -> dict[str, object]:
        """{key: value} that give another run's adapter the shape and the scale of this run's."""
        keys: dict[str, object] = {"lora.rank": self.rank, "lora.alpha": f"{self.alpha:g}"}
        if self.target_modules != ALL_LINEAR:
            keys["lora.target_modules"] = self.target_modules
        return keys | {f"lora.{name}": "true" for name in SWITCHES if getattr(self, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    reference: Annotated[str, Key(roles=("policy",))]
    refresh_every: NonNegativeInt
    ema_decay: PositiveFraction | None
    old: Old
    routing: Annotated[RoutingSource, Key(only_trains=True)] = RoutingSource.free
    teacher: Annotated[str, Key(only_trains=True, roles=("policy", "model"))] = "none"
    teacher_hint: Annotated[str | None, Key(only_trains=True)] = None
    teacher_engine: Annotated[Literal["transformers", "vllm"], Key(only_trains=True)] = "transformers"
    teacher_dtype: Annotated[str | None, Key(only_trains=True)] = None
    teacher_quantization: Annotated[Literal["none", "4bit"] | None, Key(only_trains=True)] = None
    teacher_gpu_memory_utilization: Annotated[PositiveFraction, Key(free=True, only_trains=True)] = 0.3

    @property
    def teacher_adapter(self) -> str | None:
        """The folder of the teacher's adapter on the base; None if the teacher is not an adapter."""
        return self.teacher if self._has_teacher_folder and is_adapter(self.teacher) else None

    @property
    def teacher_model(self) -> str | None:
        """The path of a teacher that is a separate model; None if the teacher is not one."""
        return self.teacher if self._has_teacher_folder and not is_adapter(self.teacher) else None

    @property
    def _has_teacher_folder(self) -> bool:
        return self.teacher not in ("none", "base")


def teacher_settings(snapshot: SnapshotConfig, model: ModelConfig) -> ModelConfig | None:
    """The settings of a teacher that is a separate model: the base's where it has no key; None without one."""
    if snapshot.teacher_model is None:
        return None
    quantization = model.quantization
    if snapshot.teacher_quantization is not None:
        quantization = None if snapshot.teacher_quantization == "none" else snapshot.teacher_quantization
    return replace(
        model,
        path=snapshot.teacher_model,
        revision=None,
        gradient_checkpointing=False,
        dtype=model.dtype if snapshot.teacher_dtype is None else snapshot.teacher_dtype,
        quantization=quantization,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """A reference that never moves: `auto`, `none`, `base`, `copy` (the policy of the start), or a PEFT folder."""

    reference: Annotated[str, Key(roles=("policy",))]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    kind: Annotated[CriticKind, Key(in_state=True)]
    init: Annotated[str, Key(in_state=True, roles=("critic", "reward"))]
    lr: PositiveFloat
    warmup_steps: NonNegativeInt
    normalize_values: Annotated[bool, Key(in_state=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    refresh_every: NonNegativeInt
    labels: str | None
    pairs: PositiveInt
    pairs_per_group: PositiveInt
    replay: Decay
    capacity: NonNegativeInt
    epochs: PositiveInt
    pairs_per_update: PositiveInt
    lr: PositiveFloat
