"""One copy of the base for trainer and engine, shown with an engine whose weights lie as vLLM's do on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_engine import fused
from run_processes import Ended, Nursery
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from rlft.generation.shared_base import SharedBaseError, checksum, share

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 100,  # padded to 128
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped queries: 32 rows of q, 16 of k, 16 of v
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    sizes = {**SIZES, **changes}
    if family == "qwen2":
        sizes.pop("head_dim")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family](**sizes), dtype=dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_becomes_a_view_and_the_model_computes_the_same_bits(
    family: str, wrapped: bool, tied: bool
) -> None:
    model = model_of(family, tie_word_embeddings=tied, attention_bias=True) if family == "llama" else model_of(
        family, tie_word_embeddings=tied
    )  # fmt: skip
    engine, ids = fused(model, wrapped=wrapped), torch.arange(20)[None]
    before = model(ids).logits
    own = dict(model.named_parameters())
    found = share(model, engine, CPU)
    assert found.shared.keys() == own.keys()
    assert found.text == f"shared {len(own)} of {len(own)} tensors, 0.00 GiB"
    storages = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == storages
    assert torch.equal(model(ids).logits, before)
    k = own["model.layers.1.self_attn.k_proj.weight"]
    qkv = dict(engine.named_parameters())[f"model.layers.1.self_attn.qkv_proj.{'base_layer.' if wrapped else ''}weight"]
    assert k.data_ptr() == qkv.data_ptr() + 32 * 32 * 2, "after the rows of q, two bytes each"
    found.check_addresses()
    found.check_content()


def test_a_tensor_that_differs_stays_apart_and_is_named() -> None:
    model = model_of("qwen2")
    engine = fused(model)
    parameters = dict(engine.named_parameters())
    with torch.no_grad():
        parameters["model.layers.0.mlp.gate_up_proj.base_layer.weight"][50, 3] += 1  # in the rows of up_proj
        parameters["lm_head.weight"][7, 0] += 1
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = share(model, engine, CPU)
    assert found.apart == {"model.layers.0.mlp.up_proj.weight": "different", "lm_head.weight": "padded and different"}
    assert len(found.shared) == len(before) - 2
    assert "; kept apart: model.layers.0.mlp.up_proj (different), lm_head (padded and different)" in found.text
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t[:0], "repacked by the engine"),
        ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t[:, :5], "(32, 32) here and (32, 5) in the"),
        ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t.float(), "bfloat16 here and float32 in the"),
        ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t.clone().t(), "not contiguous in the engine"),
        ("model.layers.0.self_attn.qkv_proj.base_layer.weight", lambda t: t[1:], "32+16+16 rows here and 63 in the"),
        ("model.layers.0.self_attn.qkv_proj.base_layer.weight", lambda t: t[:, :5], "one of ('q_proj', 'k_proj'"),
        ("model.norm.weight", lambda t: t.to("meta"), "on meta in the engine"),
    ],
)
def test_what_lies_otherwise_in_the_engine_stays_apart_with_its_reason(name: str, change: Any, reason: str) -> None:
    model = model_of("mistral")
    engine = fused(model)
    path, _, leaf = name.rpartition(".")
    module = engine.get_submodule(path)
    changed = change(getattr(module, leaf).data)
    setattr(module, leaf, torch.nn.Parameter(changed, requires_grad=False))
    apart = share(model, engine, CPU).apart
    assert len(apart) == (3 if "qkv" in name else 1)
    assert all(reason in why for why in apart.values()), apart


def test_tensors_that_the_engine_made_in_inference_mode_are_not_shared() -> None:
    model = model_of("llama")
    with torch.inference_mode():
        engine = fused(model)
    assert set(share(model, engine, CPU).apart.values()) == {"made in inference mode by the engine"}


def test_a_tensor_without_a_counterpart_is_named() -> None:
    model = model_of("llama")
    engine = fused(model)
    del engine.model.layers.__dict__["_modules"]["1"]  # type: ignore[union-attr,operator]
    found = share(model, engine, CPU)
    assert set(found.apart.values()) == {"not in the engine's model"}
    assert len(found.apart) == 9
    assert found.text.endswith(" and 6 more")


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_moved_tensor_is_an_error(side: str) -> None:
    model = model_of("llama")
    engine = fused(model)
    found = share(model, engine, CPU)
    name = "model.layers.1.mlp.gate_proj.weight"
    moved = found.shared[name].own if side == "trainer" else found.shared[name].engine
    moved.data = moved.data.clone()
    with pytest.raises(SharedBaseError, match=rf"^{name} has moved: .*share_base=false"):
        found.check_addresses()


def test_a_changed_tensor_is_an_error_that_names_it_and_so_is_another_base_at_a_resume() -> None:
    model = model_of("llama")
    found = share(model, fused(model), CPU)
    saved = found.check_content()
    assert len(saved) == 8
    name = list(saved)[3]
    with torch.no_grad():
        found.shared[name].engine.view(-1)[-1] *= 2
    with pytest.raises(SharedBaseError, match=f"^the base has changed: {name} has the checksum "):
        found.check_content()
    again = share(model_of("llama"), fused(model_of("llama")), CPU)
    assert again.check_content(saved) == saved
    with pytest.raises(SharedBaseError, match=f"^the base has changed: {name} "):
        again.check_content({**saved, name: "0" * 16})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_checksum_sees_one_changed_bit_and_two_that_would_cancel(dtype: torch.dtype, monkeypatch: Any) -> None:
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = checksum(tensor)
    monkeypatch.setattr("rlft.generation.shared_base.CHUNK", 100)
    assert checksum(tensor) == whole, "it does not depend on how much is read at a time"
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[3, 4] ^= 1
    assert checksum(tensor) != whole
    bits[3, 4] ^= 1
    bits[3, 4] += 1
    bits[30, 5] -= 1
    assert checksum(tensor) != whole


def test_after_a_release_nothing_of_the_engines_storage_is_held() -> None:
    model = model_of("llama")
    found = share(model, fused(model), CPU)
    found.release()
    found.release()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0


# -- whole runs ------------------------------------------------------------------------------------------------------
TINY = (
    "+recipe=grpo_arithmetic", "generation.engine=fused_engine.Fused", "steps=3", "prompts_per_step=2", "group_size=4",
    "generation.max_tokens=6", "model.device=cpu", "model.dtype=bfloat16", "lora.rank=2", "lora.alpha=4",
    "data.size=32", "data.held_out_size=4", "eval.every=0", "scoring.workers=0", "checkpoint.every=1",
    "console=null", "trainer.lr=0.01", "reward=format",
)  # fmt: skip


@pytest.fixture
def train(forks: Nursery, tmp_path: Path) -> Callable[..., Ended]:
    def run(*words: str, folder: str = "run", events: list[dict[str, Any]] | None = None) -> Ended:
        return forks.run("train", *TINY, f"hydra.run.dir={folder}", *words, cwd=tmp_path, events=events or [])

    return run


def results(folder: Path) -> dict[str, Any]:
    """Metrics without what a clock or the machine says, rollouts and adapters."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]
    files = [*(folder / "rollouts").iterdir(), *folder.glob("checkpoints/*/policy/*.safetensors")]
    return {"metrics": told} | {str(file.relative_to(folder)): file.read_bytes() for file in files}


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())


@pytest.mark.slow
def test_a_run_on_a_shared_base_is_the_same_run_to_the_bit_also_killed_and_resumed(
    forks: Nursery, train: Callable[..., Ended], tmp_path: Path
) -> None:
    shared, apart = train(), train("+generation.Fused.lends=false", folder="apart")
    assert (shared.code, apart.code) == (0, 0), shared.err + apart.err
    assert results(tmp_path / "run") == results(tmp_path / "apart")
    assert any(line["policy/grad_norm"] for line in results(tmp_path / "run")["metrics"]), "the policy has learned"
    saved = state_of(tmp_path / "run", 3)["base_checksums"]
    assert len(saved) == 8
    assert "base_checksums" not in state_of(tmp_path / "apart", 3)

    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}
    assert train(folder="killed", events=[kill]).code == -9
    resumed = forks.run("resume", "killed", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert results(tmp_path / "killed") == results(tmp_path / "run")
    assert state_of(tmp_path / "killed", 3)["base_checksums"] == saved


def test_a_base_that_something_writes_to_stops_the_run_before_it_is_saved(
    train: Callable[..., Ended], tmp_path: Path
) -> None:
    done = train("+generation.Fused.spoils=true", "freshness.threshold=100")
    assert done.code == 1, done.err
    assert "the base has changed: model.embed_tokens.weight has the checksum " in done.err
    assert not (tmp_path / "run" / "checkpoints" / "step_000001").exists()
