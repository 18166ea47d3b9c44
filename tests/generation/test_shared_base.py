"""One copy of the base for trainer and engine, shown with an engine whose weights lie as vLLM's do on a GPU."""

import json
from functools import partial

import pytest
import torch
from fused_engine import fused
from run_folders import metrics, rollouts
from transformers import AutoConfig, AutoModelForCausalLM

from rlft.generation.shared_base import SharedBaseError, checksum, share

CPU = torch.device("cpu")
# A vocabulary that is padded to 128; grouped queries: 32 rows of q, 16 of k, 16 of v.
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {"head_dim": 8}
FAMILIES = {"llama": HEADS | {"attention_bias": True}, "mistral": HEADS, "qwen2": {}, "qwen3": HEADS}


def model_of(family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], **changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_becomes_a_view_and_the_model_computes_the_same_bits(family, wrapped, tied):
    model = model_of(family, tie_word_embeddings=tied)
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
    gate, of_layer = found.shared["model.layers.1.mlp.gate_proj.weight"].own, r"model\.layers\.1\."
    for name, moved in ((r"mlp\.gate_proj\.weight", gate), (r"self_attn\.[qkv]_proj\.weight", qkv)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moved, "data", moved.data.clone())
            with pytest.raises(SharedBaseError, match=rf"^{of_layer}{name} has moved: .*share_base=false"):
                found.check_addresses()
    found.release()
    found.release()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0, "nothing of the engine's storage is held"


def test_a_tensor_that_differs_stays_apart_and_is_named():
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


@pytest.mark.parametrize(("name", "change", "reason"), [
    ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t[:0], "repacked by the engine"),
    ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t[:, :5], "(32, 32) here and (32, 5) in the"),
    ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t.float(), "bfloat16 here and float32 in the"),
    ("model.layers.0.self_attn.o_proj.base_layer.weight", lambda t: t.clone().t(), "not contiguous in the engine"),
    ("model.layers.0.self_attn.qkv_proj.base_layer.weight", lambda t: t[1:], "32+16+16 rows here and 63 in the"),
    ("model.layers.0.self_attn.qkv_proj.base_layer.weight", lambda t: t[:, :5], "one of ('q_proj', 'k_proj'"),
    ("model.norm.weight", lambda t: t.to("meta"), "on meta in the engine"),
])  # fmt: skip
def test_what_lies_otherwise_in_the_engine_stays_apart_with_its_reason(name, change, reason):
    model = model_of("mistral")
    engine = fused(model)
    path, _, leaf = name.rpartition(".")
    module = engine.get_submodule(path)
    changed = change(getattr(module, leaf).data)
    setattr(module, leaf, torch.nn.Parameter(changed, requires_grad=False))
    apart = share(model, engine, CPU).apart
    assert len(apart) == (3 if "qkv" in name else 1)
    assert all(reason in why for why in apart.values()), apart


def test_a_tensor_without_a_counterpart_is_named():
    model = model_of("llama")
    engine = fused(model)
    del engine.model.layers.__dict__["_modules"]["1"]
    found = share(model, engine, CPU)
    assert set(found.apart.values()) == {"not in the engine's model"}
    assert len(found.apart) == 13
    assert found.text.endswith(" and 10 more")
    with torch.inference_mode():
        engine = fused(model)
    assert set(share(model, engine, CPU).apart.values()) == {"made in inference mode by the engine"}


def test_a_changed_tensor_is_an_error_that_names_it_and_so_is_another_base_at_a_resume():
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
def test_a_checksum_sees_one_changed_bit_and_two_that_would_cancel(dtype, monkeypatch):
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


# -- whole runs ------------------------------------------------------------------------------------------------------
TINY = (
    "+recipe=grpo_arithmetic", "generation.engine=fused_engine.Fused", "steps=3", "prompts_per_step=2", "group_size=4",
    "generation.max_tokens=6", "model.device=cpu", "model.dtype=bfloat16", "lora.rank=2", "lora.alpha=4",
    "data.size=32", "data.held_out_size=4", "eval.every=0", "scoring.workers=0", "checkpoint.every=1",
    "console=null", "trainer.lr=0.01", "reward=format",
)  # fmt: skip


@pytest.fixture
def train(forks, tmp_path):
    run = partial(forks.run, "train", *TINY, cwd=tmp_path)
    return lambda folder, *words, events=(): run(f"hydra.run.dir={folder}", *words, events=events)


def results(folder):
    """Metrics, rollouts and adapters."""
    adapters = [file.read_bytes() for file in sorted(folder.glob("checkpoints/*/policy/*.safetensors"))]
    return metrics(folder), rollouts(folder), adapters


def checksums_of(folder):
    state = json.loads((folder / "checkpoints" / "step_000003" / "state.json").read_text())
    return state.get("base_checksums")


@pytest.mark.slow
def test_a_run_on_a_shared_base_is_the_same_run_to_the_bit_also_killed_and_resumed(forks, train, tmp_path):
    shared, apart = train("run"), train("apart", "+generation.Fused.lends=false")
    assert (shared.code, apart.code) == (0, 0), shared.err + apart.err
    assert results(tmp_path / "run") == results(tmp_path / "apart")
    assert any(line["policy/grad_norm"] for line in metrics(tmp_path / "run")), "the policy has learned"
    assert len(checksums_of(tmp_path / "run")) == 8
    assert checksums_of(tmp_path / "apart") is None

    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}
    assert train("killed", events=[kill]).code == -9
    resumed = forks.run("resume", "killed", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert results(tmp_path / "killed") == results(tmp_path / "run")
    assert checksums_of(tmp_path / "killed") == checksums_of(tmp_path / "run")


def test_a_base_that_something_writes_to_stops_the_run_before_it_is_saved(train, tmp_path):
    done = train("run", "+generation.Fused.spoils=true", "freshness.threshold=100")
    assert done.code == 1, done.err
    assert "the base has changed: model.embed_tokens.weight has the checksum " in done.err
    assert not (tmp_path / "run" / "checkpoints" / "step_000001").exists()
