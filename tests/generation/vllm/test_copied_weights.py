"""The policy in the real vLLM's own matrices: the bits of a recomputation, an untouched base, faults that are seen."""

from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from real_engines import open_vllm, vllm_engine
from slow_cases import slow

from rlft.generation.vllm import copied_weights
from rlft.generation.vllm.generator import VLLMGenerator, _itself
from rlft.loop.freshness import Freshness, StaleAdapterError, limits_of
from rlft.types import Adapter, Prompt, Sampling, UserError
from tests.generation.vllm.test_generator import MODEL, TOLERANCE, Trainer

TEXTS = [list(range(10, 50)), list(range(70, 85))]
QKV = "model.layers.1.self_attn.qkv_proj.weight"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"k_proj": 2, r"layers\.1\..*up_proj": 9}, "alpha_pattern": {"v_proj": 5}},
    "dora": {"use_dora": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "rank above vLLM's": {"r": 600},
}  # fmt: skip


class Copied(Trainer):
    """With its clean base, and `slot` as the engine is given it."""

    def __init__(self, dtype, **changes):
        super().__init__(MODEL, dtype, **changes)
        self.base = self.model.get_base_model()
        self.clean = {name.replace(".base_layer", ""): p.clone() for name, p in self.base.named_parameters()}
        self.slot = SimpleNamespace(backbone=SimpleNamespace(model=self.base))

    def expected(self, name):
        """What a matrix of the engine has to be, made for one matrix after the other by what PEFT says of each."""
        stem, _, layer = name.removesuffix(".weight").rpartition(".")
        return torch.cat([self._sum(f"{stem}.{part}") for part in FUSED.get(layer, [layer])])

    @torch.no_grad()
    def _sum(self, module):
        layer, clean = self.base.get_submodule(module), self.clean[f"{module}.weight"]
        if not hasattr(layer, "lora_A"):
            return clean
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        total = product * layer.scaling["default"] + clean.float()
        if "default" in layer.lora_magnitude_vector:
            total *= (layer.lora_magnitude_vector["default"].weight.float() / total.norm(dim=1))[:, None]
        return total.to(clean.dtype)


@dataclass
class Bench:
    generator: VLLMGenerator
    dtype: torch.dtype

    def held(self):
        """{name: matrix} of what its layers multiply with."""
        [model] = self.generator._llm.apply_model(_itself)
        found = {name: p.data for name, p in model.named_parameters() if name.endswith("_proj.weight")}
        for name in found:
            layer = model.get_submodule(name.removesuffix(".weight"))
            ones = torch.ones(1, layer.weight.shape[1], dtype=self.dtype)
            assert torch.equal(layer(ones)[0], torch.nn.functional.linear(ones, layer.weight, layer.bias))
        return found


@pytest.fixture(scope="module", params=[slow("float32"), "bfloat16"])
def bench(request):
    with closing(open_vllm(MODEL, vllm_engine(weights="copy"), dtype=request.param, lora_rank=600)) as generator:
        yield Bench(generator, getattr(torch, request.param))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_there_bit_for_bit_and_the_base_is_untouched(kind, bench):
    trainer, generator = Copied(bench.dtype, **KINDS[kind]), bench.generator
    generator.serve(trainer.slot)
    freshness = Freshness(TEXTS, limits_of(bench.dtype), 1)
    for version in (1, 2):
        adapter = trainer.adapter(version, 0.02 if kind.startswith("rank above") else 0.1)
        generator.load(adapter)
        for name, matrix in bench.held().items():
            assert torch.equal(matrix, trainer.expected(name)), name
        gap = freshness.check(version, generator, trainer, adapter)
        assert gap is not None
        assert bench.dtype != torch.float32 or gap < TOLERANCE
        rounding = generator.metrics["sampler/rounding"]
        assert rounding == 0 if bench.dtype == torch.float32 else 0 < rounding < 1
        prompt = Prompt(id="p", messages=(), answer="", token_ids=tuple(TEXTS[0]))
        [group] = generator.sample([prompt], 2, [7], Sampling(max_tokens=8, temperature=1.0))
        for rollout in group.rollouts:
            [expected] = trainer.logprobs([[*TEXTS[0], *rollout.completion.token_ids]])
            found = torch.tensor(rollout.completion.logprobs) - expected[len(TEXTS[0]) - 1 :]
            assert found.abs().mean() < (TOLERANCE if bench.dtype == torch.float32 else 0.1), "a prefix of before"
    for name, parameter in trainer.base.named_parameters():
        clean = trainer.clean[name.replace(".base_layer", "")]
        assert "lora_" in name or torch.equal(parameter.view(torch.uint8), clean.view(torch.uint8))


def test_a_publish_is_in_blocks_that_change_no_bit(bench, monkeypatch):
    trainer = Copied(bench.dtype, use_dora=True)
    bench.generator.serve(trainer.slot)
    for block in (1, 10**5, 10**9):
        monkeypatch.setattr(copied_weights, "COPY_BLOCK_OF_A_CPU", block)
        bench.generator.load(trainer.adapter(block))
        assert all(torch.equal(matrix, trainer.expected(name)) for name, matrix in bench.held().items())
        assert bench.generator.loaded_adapter().faults == ()


def test_it_says_which_runner_schedule_and_graphs_it_has_and_what_v1_costs(bench, monkeypatch):
    of_a_cpu = bench.generator.facts
    assert of_a_cpu.rows[0] == ("vLLM's runner", "V1", "v1.worker.cpu_model_runner.CPUModelRunner")
    assert [row[:2] for row in of_a_cpu.rows[1:]] == [("vLLM's schedule", "synchronous")]
    assert of_a_cpu.notes == ()
    monkeypatch.setattr(bench.generator, "_on_cpu", False)
    assert bench.generator.facts.rows[2][:2] == ("CUDA graphs", "none")
    assert "V1 model runner" in bench.generator.facts.notes[0]
    assert "about 11 ms more a token" in bench.generator.facts.notes[0]


# -- faults ------------------------------------------------------------------------------------------------------------
DOWN_0, DOWN_1, DOWN_2 = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3))
FAULTS = {
    "one flipped bit": (lambda held, trainer: held[QKV].view(torch.uint8)[5, 0].bitwise_xor_(1),
                        r"1 of the 28 layers .* such as model\.layers\.1\.self_attn\.q_proj"),
    "layers exchanged": (lambda held, trainer: (held[DOWN_0].copy_(trainer.expected(DOWN_1)),
                                                held[DOWN_1].copy_(trainer.expected(DOWN_0))), "2 of the 28 layers"),
    "another scale": (lambda held, trainer: held[DOWN_2].copy_(2 * trainer.expected(DOWN_2) - trainer.clean[DOWN_2]),
                      r"1 of the 28 layers .*layers\.2\.mlp\.down_proj"),
    "one matrix not written": (lambda held, trainer: held[DOWN_1].copy_(trainer.clean[DOWN_1]),
                               r"1 of the 28 layers .*layers\.1\.mlp\.down_proj"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ["a stale copy", "a load that was lost", "another scale in the config", *FAULTS])
def test_a_fault_is_seen_at_a_learning_rate_of_1e_6(fault, bench, monkeypatch):
    trainer, generator = Copied(bench.dtype), bench.generator
    generator.serve(trainer.slot)
    freshness = Freshness(TEXTS, limits_of(bench.dtype), 1)
    old = trainer.adapter(4)
    generator.load(old)
    freshness.check(4, generator, trainer, old)
    for parameter in trainer.model.parameters():
        parameter.data += 1e-6 * parameter.requires_grad
    new, said = replace(old, version=5, weights=trainer.weights()), "56 of the 56 tensors .*; it still holds version 4"
    if fault == "a stale copy":
        said = r"\d+ of the 28 layers with the policy have other weights"
        with monkeypatch.context() as patch:
            patch.setattr(copied_weights, "copy_each", lambda *_: None)
            generator.load(new)
    elif fault == "another scale in the config":
        said = "28 of the 56 tensors .* 2 times"
        generator.load(replace(new, config={**new.config, "lora_alpha": 24}))
    elif fault != "a load that was lost":
        spoil, said = FAULTS[fault]
        generator.load(new)
        spoil(bench.held(), trainer)
    with pytest.raises(StaleAdapterError, match=rf"^freshness: the engine does not hold policy version 5: .*{said}"):
        freshness.check(5, generator, trainer, new)
    generator.load(new)
    assert freshness.check(5, generator, trainer, new) is not None


def test_a_base_that_is_not_the_engines_is_refused_before_anything_is_written():
    """A matrix with another number, one under another name, and one that has moved."""
    weight = torch.randn(4, 4)
    for own, why in (
        ({"a.weight": weight + 1}, "a as the trainer does .other numbers in the engine"),
        ({"a.weight": weight.bfloat16()}, "a as the trainer does .torch.bfloat16 on cpu here and torch.float32"),
        ({"b.weight": weight}, "a as the trainer does .not in the trainer's model by this name"),
        ({"a.weight": weight[:, :2]}, r"a as the trainer does .\(4, 2\) here and \(4, 4\) in the engine"),
    ):
        engine = torch.nn.Module()
        engine.register_module("a", torch.nn.Linear(4, 4, bias=False))
        engine.a.weight.data = weight.clone()
        ones = {"lora_A": torch.ones(1, 4), "lora_B": torch.ones(4, 1)}
        lora = {f"base_model.model.a.{name}.weight": tensor for name, tensor in ones.items()}
        adapter = Adapter(version=1, weights=lora, config={"r": 1, "lora_alpha": 1})
        with pytest.raises(UserError, match=rf"^generation\.vllm\.weights: .* {why}.*got copy; use .*=adapter"):
            copied_weights.CopiedWeights(own, engine, {}).load(adapter)
        assert torch.equal(engine.a.weight, weight)
    copied = copied_weights.CopiedWeights({"a.weight": weight}, engine, {})
    copied.load(adapter)
    assert copied.held().faults == ()
    engine.a.weight.data = engine.a.weight.data.clone()
    assert copied.held().faults == ("a has moved in the engine",)
