"""vLLM with the trainer's base on its storage, or the policy in it: when, and what it takes. No vLLM is started."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_engine import fused
from real_engines import open_vllm, vllm_engine
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.config.schema import RunConfig
from rlft.generation.memory import Load, ModelSizes, When, peak
from rlft.generation.shared_base import SharedBaseError, checksum
from rlft.generation.vllm import (
    engine as vllm_module,
    generator as vllm_generator,
    guest as vllm_guest,
    memory as vllm_memory,
)
from rlft.generation.vllm.engine import COPIED, VLLM
from rlft.generation.vllm.generator import VLLMGenerator
from rlft.model.activations import LayerModules
from rlft.plan.fit import settled
from rlft.plan.model_rules import choose_engine
from rlft.plan.roles import check_teacher_engine
from rlft.types import Adapter, UserError

ON_CUDA: Mapping[str, Any] = {"device": "cuda:0", "itemsize": 2, "quantized": False}
CPU, GIB = torch.device("cpu"), 2**30


def engine(**changes: Any) -> VLLM:
    return vllm_engine(**{"gpu_memory_utilization": 0.5, "enforce_eager": False, **changes})


# -- when ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "base", "why"),
    [
        ({}, {}, None),
        ({"share_base": True}, {"device": "cuda"}, None),
        ({"options": {"kv_cache_dtype": "fp8"}}, {}, None),
        ({"share_base": False}, {}, "generation.vllm.share_base is false"),
        ({}, {"device": "cpu"}, "in its own way on cpu"),
        ({}, {"device": "cuda:1"}, "vLLM runs on cuda:0 and the trainer on cuda:1"),
        ({}, {"itemsize": 4}, "has 32 bits, not 16"),
        ({}, {"quantized": True}, "the trainer's base is quantised"),
        ({"options": {"quantization": "fp8"}}, {}, "options.quantization gives vLLM other weights"),
        ({"options": {"cpu_offload_gb": 2}}, {}, "options.cpu_offload_gb gives vLLM other weights"),
    ],
)
def test_one_copy_of_the_base_where_it_can_be(keys: dict[str, Any], base: dict[str, Any], why: str | None) -> None:
    found = engine(**keys).base_sharing_obstacle(**{**ON_CUDA, **base})
    assert (found is None) if why is None else (found is not None and why in found)
    if why is not None and keys.get("share_base") is not False:
        with pytest.raises(UserError, match=r"^share_base: .*, got true; set"):
            engine(**keys, share_base=True).check_device(**{**ON_CUDA, **base})


@pytest.mark.parametrize(
    ("keys", "base", "why"),
    [
        ({}, {}, None),
        ({}, {"device": "cpu", "itemsize": 4}, None),
        ({"share_base": False}, {"itemsize": 4}, None),
        ({"share_base": True}, {}, "share_base is true"),
        ({}, {"device": "cuda:1"}, "vLLM runs on cuda:0 and the trainer on cuda:1"),
        ({}, {"quantized": True}, "the trainer's base is quantised"),
        ({"options": {"quantization": "fp8"}}, {}, "options.quantization gives vLLM other weights"),
    ],
)
def test_a_copy_of_the_policy_where_it_can_be_and_auto_is_one_there(
    keys: dict[str, Any], base: dict[str, Any], why: str | None
) -> None:
    where, copying = {**ON_CUDA, **base}, engine(**keys, weights="copy")
    if why is None:
        copying.check_device(**where)
        shares = engine(**keys | {"share_base": "auto"}, weights="copy").base_sharing_obstacle(**where)
        assert "those of the policy" in str(shares)
    elif keys.get("share_base") is not True:
        with pytest.raises(UserError, match=rf"^weights: .*{why}.*, got copy; set weights=adapter"):
            copying.check_device(**where)
    on = {"device": where["device"], "quantized": where["quantized"]}
    lora, dora, large = (
        SimpleNamespace(use_dora=dora, rank=rank) for dora, rank in ((False, 8), (True, 8), (False, 513))
    )
    for shape, modules, fits, can in (
        (lora, ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.fc1"], True, True),
        (lora, ["model.layers.0.self_attn.q_proj"], False, False),
        (dora, ["model.layers.0.self_attn.q_proj"], False, True),
        (large, ["model.layers.0.self_attn.q_proj"], False, True),
        (dora, ["model.layers.0.self_attn.kv_a_proj_with_mqa"], True, False),
        (None, [], True, False),
    ):
        found = engine(**keys, weights="auto").settled(shape, lambda m=modules: m, lambda each, fits=fits: fits, **on)
        assert found == engine(**keys, weights="copy" if can and why is None else "adapter")
        assert copying.settled(shape, list, lambda each: False, **on) == copying, "what is named stays"


def test_neither_is_one_that_runs_in_another_process_or_cannot_free_its_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_module, "release", lambda: (0, 30))
    assert engine().base_sharing_obstacle(**ON_CUDA) is None
    assert "only vLLM 0.31 and later" in str(engine(sleep=True).base_sharing_obstacle(**ON_CUDA))
    monkeypatch.setattr(vllm_module, "release", lambda: (0, 31))
    assert engine(sleep=True).base_sharing_obstacle(**ON_CUDA) is None
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert "another process" in str(engine().base_sharing_obstacle(**ON_CUDA))


def test_a_base_in_4_bits_is_refused_where_vllm_has_none_and_auto_chooses_another_engine(
    monkeypatch: pytest.MonkeyPatch, run_config: Callable[..., RunConfig]
) -> None:
    in_4_bits = ("model.quantization=4bit", "model.device=cuda", "model.dtype=bfloat16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    fp8 = "+generation.vllm.options.quantization=fp8"
    for reads, words, chosen in (
        (False, (), "transformers"),
        (False, ("generation=vllm",), None),
        (False, (fp8,), "vllm"),
        (False, ("generation=vllm", fp8), "vllm"),
        (True, (), "vllm"),
        (True, ("generation=vllm",), "vllm"),
    ):
        monkeypatch.setattr(vllm_module, "reads_bitsandbytes", lambda reads=reads: reads)
        config = run_config(*in_4_bits, *words)
        if chosen is None:
            with pytest.raises(
                UserError, match=r"^model\.quantization: vLLM .* 0\.30\), got 4bit; add \+gen.*fp8 .*'vllm<0\.30', or"
            ):
                choose_engine(config.generation, config.model, config.lora)
            continue
        assert choose_engine(config.generation, config.model, config.lora)[0] == chosen, words


def test_auto_chooses_vllm_only_where_it_serves_the_adapter_as_it_would_be_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(vllm_module, "reads_bitsandbytes", lambda: True)
    dora, apart, usual = "lora.use_dora=true", "cluster.engines=1", COPIED
    for copied, words, chosen in (
        (usual, (), "vllm"),
        (usual, (apart,), "vllm"),
        (usual, (dora,), "vllm"),
        (usual, ("lora.rank=600",), "vllm"),
        (usual, ("model.device=cuda:1",), "vllm"),
        (usual, (dora, apart), "transformers"),
        (usual, ("lora.rank=600", apart), "transformers"),
        (usual, (dora, "model.quantization=4bit"), "transformers"),
        (usual, (dora, "+generation.vllm.options.quantization=fp8"), "transformers"),
        (usual, (dora, "generation.vllm.share_base=true"), "transformers"),
        (usual, (dora, "model.device=cuda:1"), "transformers"),
        ({"q_proj"}, (dora,), "transformers"),
        ({"q_proj"}, (dora, "lora.target_modules=[q_proj]"), "vllm"),
        ({"q_proj"}, ("lora.rank=600",), "transformers"),
    ):
        monkeypatch.setattr(vllm_module, "COPIED", copied)
        asked = ["+recipe=grpo_arithmetic", "model.device=cuda", "model.dtype=bfloat16", *words]
        plan = resolve(compose(asked)).plan(runs_here=False)
        assert plan.engine == chosen, words
        settled(plan, chosen, lambda: None)  # without a refusal
        if chosen == "transformers":
            with pytest.raises(UserError, match=r"^lora\.(use_dora|rank): vLLM "):
                settled(resolve(compose([*asked, "generation=vllm"])).plan(runs_here=False), "vllm", lambda: None)


def test_a_teacher_in_4_bits_is_refused_where_vllm_has_none(
    monkeypatch: pytest.MonkeyPatch, run_config: Callable[..., RunConfig]
) -> None:
    of_teacher = ("snapshot.teacher=embedded:tiny-student", "snapshot.teacher_engine=vllm")
    monkeypatch.setattr(vllm_module, "reads_bitsandbytes", lambda: False)
    config = run_config(*of_teacher, "snapshot.teacher_quantization=4bit")
    with pytest.raises(
        UserError, match=r"^snapshot\.teacher_engine: vLLM .*; use transformers, or snapshot\.teacher_q"
    ):
        check_teacher_engine(config, "vllm", "cuda", runs_here=True)
    check_teacher_engine(config, "vllm", "cuda", runs_here=False)


def test_what_the_installed_vllm_can_hold_and_its_release_are_read_without_an_import() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert vllm_module.reads_bitsandbytes() == ("bitsandbytes" in QUANTIZATION_METHODS)
    found = vllm_module.release()
    assert found is not None
    assert (0, 27) <= found < (1, 0)


def test_batch_invariance_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"^batch_invariant: .* on CUDA only, and model\.device is cpu, got true; set it"
    ):
        engine(batch_invariant=True).check_device(**{**ON_CUDA, "device": "cpu"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        reason = vllm_module.why_not_invariant("cuda:0")
        assert (reason is None) == (capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "from compute capability 8.0 on, and this GPU has 7.5" in str(vllm_module.why_not_invariant("cuda:0"))


def test_batch_invariance_is_set_before_vllm_is_imported_and_not_changed_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_guest.INVARIANT, "0")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_guest.set_batch_invariant(False)
    assert vllm_guest.os.environ[vllm_guest.INVARIANT] == "0"
    vllm_guest.set_batch_invariant(True)
    assert vllm_guest.os.environ[vllm_guest.INVARIANT] == "1"
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    vllm_guest.set_batch_invariant(True)
    with pytest.raises(UserError, match=r"^generation\.vllm\.batch_invariant: vLLM reads it once .* on, got false; "):
        vllm_guest.set_batch_invariant(False)


# -- how -------------------------------------------------------------------------------------------------------------
class FakeLLM:
    """What vLLM's `LLM` is asked for, with weights that lie as vLLM's do on a GPU."""

    def __init__(self, model: nn.Module, moves: bool = False) -> None:
        self.model, self.moves, self.calls, self.seen = fused(model, wrapped=False), moves, [], ""
        core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(
            engine_core=core,
            add_lora=lambda request: True,
            step=list,
            reset_prefix_cache=lambda: self.calls.append("reset"),
            output_processor=SimpleNamespace(request_states={}),
            abort_request=lambda ids, internal: self.calls.append("abort"),
        )

    def get_tokenizer(self) -> None:
        return None

    def apply_model(self, work: Any) -> list[Any]:
        return [work(self.model)]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release")
        if self.moves:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake {tags}")

    def generate(self, *arguments: Any, **more: Any) -> list[Any]:
        self.seen = checksum(self.weight)
        raise KeyboardInterrupt  # as a user may do it

    @property
    def weight(self) -> Tensor:
        return dict(self.model.named_parameters())["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).requires_grad_(False).eval()


@pytest.fixture
def started(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    @contextmanager
    def inside(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(vllm_generator, "guest_while_starting", inside)
    monkeypatch.setattr(vllm_generator, "guest", inside)
    monkeypatch.setattr(vllm_generator, "runs_on_cpu", lambda: False)
    generators = []

    def start(moves: bool = False, **changes: Any) -> tuple[VLLMGenerator, FakeLLM, dict[str, Any]]:
        fake, given = FakeLLM(model, moves), {}
        monkeypatch.setattr(vllm_generator, "_start", lambda options, *_: given.update(options) or fake)
        keys = engine(max_num_seqs=4, sleep=True, **changes)
        generators.append(open_vllm("x", keys, dtype="bfloat16", lora_rank=6, max_sequence_tokens=64))
        return generators[-1], fake, given

    yield start
    for generator in generators:
        generator.close()


def adapter() -> Adapter:
    random, stem = torch.Generator().manual_seed(0), "base_model.model.model.layers.0.self_attn.k_proj"
    weights = {
        f"{stem}.lora_A.weight": torch.randn(4, 32, generator=random),
        f"{stem}.lora_B.weight": torch.randn(16, 4, generator=random),
    }
    return Adapter(version=3, weights=weights, config={"r": 4, "lora_alpha": 8})


def test_with_a_shared_base_sleep_frees_the_cache_alone_and_weights_stay(started: Any, model: nn.Module) -> None:
    generator, fake, options = started()
    assert options["max_lora_rank"] == 8
    generator.sleep()
    generator.wake()
    assert fake.calls == ["sleep 1", "wake None"], "a base of its own"
    generator.adopt(model, CPU)
    assert generator.shared_base.apart == {}
    fake.calls.clear()
    generator.sleep()
    generator.sleep()
    generator.wake()
    assert fake.calls == ["sleep 0", "release", "wake ['kv_cache']"]
    generator.close()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0, "nothing of the engine's is held"


def test_weights_that_move_in_sleep_are_noticed(started: Any, model: nn.Module) -> None:
    generator, _, _ = started(moves=True)
    generator.adopt(model, CPU)
    with pytest.raises(SharedBaseError, match="has moved"):
        generator.sleep()


def test_a_copy_needs_no_slot_for_adapters_and_keeps_nothing_of_a_job_that_is_over(
    started: Any, model: nn.Module
) -> None:
    generator, fake, options = started(weights="copy")
    assert not {"enable_lora", "max_loras", "max_lora_rank"} & options.keys()
    before, base = checksum(fake.weight), [checksum(p.data) for p in model.parameters()]
    generator.serve(SimpleNamespace(backbone=SimpleNamespace(model=model)))
    generator.load(adapter())
    assert (generator.version, fake.calls) == (3, ["reset"]), "keys of an older version are dropped"
    written = checksum(fake.weight)
    assert written != before
    assert [checksum(p.data) for p in model.parameters()] == base
    generator.sleep()
    generator._old_blocks = 0  # this stand-in has none
    assert generator.loaded_adapter().faults == ()
    assert fake.calls == ["reset", "sleep 1", "wake None"], "weights are read where they are awake"
    there = weakref.ref(model)
    generator.serve(None)
    del model
    other = AutoModelForCausalLM.from_config(there().config, dtype=torch.bfloat16)
    other.load_state_dict(there().state_dict())
    generator.serve(SimpleNamespace(backbone=SimpleNamespace(model=other)))
    generator.load(replace(adapter(), weights={}))
    assert checksum(fake.weight) == before, "what no adapter of the next job is on is the base's again"
    assert generator.metrics == {"sampler/rounding": 0}


# -- what it takes ---------------------------------------------------------------------------------------------------
MODEL = ModelSizes(
    parameters=7_600_000_000, base_bytes=15_200_000_000, itemsize=2, lora=40_000_000, adapted=6_500_000_000,
    largest_adapted=3584 * 18944,
    adapter=None, key_size=2 * 4 * 128 * 28, padded="", kernels=None, linear=6_500_000_000,
    config=SimpleNamespace(vocab_size=152_064, hidden_size=3584, intermediate_size=18944),
    modules=LayerModules(),
)  # fmt: skip
LOAD = Load(decodings=(), max_tokens=512, max_sequence_tokens=1024, device="cuda", device_memory=24 * GIB)


def sizes(model: ModelSizes = MODEL, **keys: Any) -> dict[str, tuple[int, When]]:
    return {part.name: (part.bytes, part.when) for part in engine(**keys).memory(model, LOAD).parts}


def test_a_shared_base_is_counted_once_and_stays_while_the_cache_sleeps() -> None:
    whole = int(0.85 * 24 * GIB)
    cache = "vLLM, its KV cache (it shares the base)"
    assert sizes(gpu_memory_utilization=0.85) == {cache: (whole - MODEL.base_bytes, When.always)}
    assert sizes(gpu_memory_utilization=0.85, sleep=True) == {
        cache: (whole - MODEL.base_bytes - vllm_memory.GRAPHS, When.sampling),
        "vLLM's CUDA graphs": (vllm_memory.GRAPHS, When.always),
    }
    apart = {"vLLM, its base and KV cache": (whole, When.sampling)}
    assert sizes(gpu_memory_utilization=0.85, share_base=False, sleep=True) == apart
    awake = {"vLLM, awake while it gets weights": (whole, When.publishing)}
    for largest, elements in ((2**20, 2**26), (5120 * 27648, 5120 * 27648)):  # the latter an MLP's of Qwen2.5-32B
        model = replace(MODEL, largest_adapted=largest)
        sums = {"a block of the policy's weights": (elements * (4 + 2), When.publishing)}
        assert sizes(model, gpu_memory_utilization=0.85, weights="copy", sleep=True) == apart | awake | sums
        lasting = {"vLLM, its base and KV cache": (whole, When.always)}
        assert sizes(model, gpu_memory_utilization=0.85, weights="copy") == lasting | sums, "the base counts twice"
    copying = engine(gpu_memory_utilization=0.85, weights="copy", sleep=True)
    assert peak(copying.memory(MODEL, LOAD).parts) == whole + 3584 * 18944 * (4 + 2), "load wakes it"
    assert [engine(weights=way).rounds_sums for way in ("copy", "adapter")] == [True, False]


def test_a_share_in_which_it_does_not_start_is_told_and_so_is_the_smallest_in_which_it_does() -> None:
    # 8,192 tokens x (3 x 18,944 + 3 x 3,584) x 2 bytes, logits of 8 rows twice in float32, 1,024 tokens of 57,344 bytes
    least = 15_200_000_000 + 8192 * 67584 * 2 + 2 * 8 * 152064 * 4 + 1024 * 2 * 28672
    assert vllm_memory.least_bytes(MODEL, LOAD, {}, 8) == least
    small = engine(gpu_memory_utilization=0.45)
    assert small.memory(MODEL, LOAD).lacks == least - int(0.45 * 24 * GIB)
    share = vllm_memory.least_share(MODEL, LOAD, {}, 8)
    assert replace(small, gpu_memory_utilization=share).memory(MODEL, LOAD).lacks == 0
    assert replace(small, gpu_memory_utilization=round(share - 0.01, 2)).memory(MODEL, LOAD).lacks > 0
    # The rest of the run leaves 6 GiB beside the base: 20.2 GiB of 24 for the engine with the base.
    assert [e.gpu_memory_utilization for e in small.smaller(MODEL, LOAD, 6 * GIB)] == [0.83, 0.45]
    eight_bits = engine(options={"quantization": "fp8"})
    assert vllm_memory.base_bytes(MODEL, eight_bits.options) == 6_500_000_000 + 2 * 1_100_000_000
