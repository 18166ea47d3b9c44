"""Further arguments of vLLM's engine, as `generation.vllm.options` gives them.

Arguments that vLLM does not have and those that rlft sets itself are refused. The lists are those of vLLM 0.32, which
is not imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlft.types import UserError

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values vLLM takes for max_lora_rank."""

KEYS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "code_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "prompts.max_tokens and generation.max_tokens",
    "max_lora_rank": "lora.rank",
    "seed": "seed",
    "max_num_seqs": "generation.vllm.max_num_seqs",
    "gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "enable_sleep_mode": "generation.vllm.sleep",
    "enforce_eager": "generation.vllm.enforce_eager",
}
"""{argument: rlft's key that sets it}."""

ONE_PROCESS = "would start processes that can outlive the run"
OTHER_MODEL = "would make the engine another model than the one that is trained"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "default_mm_loras"), "is set for the policy's adapter"
    ),
    **dict.fromkeys(("lora_dtype", "lora_target_modules"), "would change or leave out a part of the policy's adapter"),
    **dict.fromkeys(("hf_overrides", "model_class_overrides", "model_weights", "hf_config_path"), OTHER_MODEL),
    **dict.fromkeys(("load_format", "model_impl", "convert", "runner"), OTHER_MODEL),
    **dict.fromkeys(("generation_config", "override_generation_config"), "would change how completions are sampled"),
    **dict.fromkeys(
        ("logits_processors", "logprobs_mode"), "would make log-probs others than those that are trained on"
    ),
    **dict.fromkeys(("tokenizer_mode", "skip_tokenizer_init"), "would change what token ids mean"),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), ONE_PROCESS),
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "worker_extension_cls", "nnodes"), ONE_PROCESS),
    "enable_prefix_caching": "is set: a prompt is computed once for its group",
    "async_scheduling": "is left to vLLM, which drops it where requests must be repeatable",
}
"""{argument: what it is or would do}."""

ROUNDING = ("quantization", "kv_cache_dtype", "quantization_config")
"""Arguments with which log-probs are off by more than the trainer's own rounding."""


def engine_rank(rank: int) -> int:
    """The smallest max_lora_rank of vLLM that holds adapters of this rank. UserError("lora.rank") if none does."""
    for allowed in ENGINE_RANKS:
        if rank <= allowed:
            return allowed
    raise UserError(
        "lora.rank",
        f"vLLM takes adapters up to rank {ENGINE_RANKS[-1]}",
        got=rank,
        remedy="lower it, or choose generation=transformers",
    )


def unserved(modules: Iterable[str]) -> str | None:
    """Why vLLM cannot load an adapter that is on these modules of the base; None if it can.

    Of experts whose weights are stacked in one tensor PEFT saves one pair of matrices, and vLLM reads one per expert.
    """
    for name in modules:
        if name.removesuffix(".base_layer").endswith(".experts"):
            return f"vLLM loads no adapter on stacked experts ({name})"
    return None


def tensor_parallel(gpus: int) -> dict[str, Any]:
    """Arguments for an engine that divides each layer among `gpus` GPUs of its machine.

    It uses processes of its own, because inside a Ray actor vLLM would ask Ray for further actors with GPUs, which the
    engine's actor holds already.
    """
    return {"tensor_parallel_size": gpus, "distributed_executor_backend": "mp"}


def check(options: Mapping[str, Any]) -> None:
    """Refuses arguments that rlft sets itself, and where vLLM is installed those that its engine does not have.

    Raises:
        UserError: by the key `options.<argument>`.
    """
    for name, value in options.items():
        key = f"options.{name}"
        if name in KEYS:
            raise UserError(key, "is set by rlft", got=value, remedy=f"set {KEYS[name]}")
        if name in REFUSED:
            raise UserError(key, f"{REFUSED[name]}, and is not free to choose", got=value, remedy="leave it out")
        known = arguments()
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else "see its list of engine arguments"
            raise UserError(key, "vLLM's engine has no such argument", got=value, remedy=meant)


@cache
def arguments() -> tuple[str, ...]:
    """The arguments of the installed vLLM's engine, read from its source; none where it is not installed."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return ()
    file = Path(package.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    if not file.is_file():
        return ()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return tuple(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))
    return ()
