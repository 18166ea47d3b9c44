"""LoRA on stacked experts: log-probs and gradients of a loop over the experts with W + s B A, for unlike interfaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_one_test import each
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from rlft.model import experts
from rlft.model.experts import LoraExperts, grouped, mixture_of
from rlft.model.lora_config import as_configured

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # transposed, with biases, gate and up interleaved
    "nemotron_h": {  # without gates
        "layers_block_type": ["attention", "moe"], "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


def loop_over_experts(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor, matrices: dict[str, Tensor]) -> Tensor:
    """Token by token, expert by expert: the definition."""

    def linear(row: Tensor, name: str, expert: int) -> Tensor:
        matrix = matrices[name][expert]
        y = row @ matrix if experts.is_transposed else matrix @ row
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y

    rows = []
    for token, row in enumerate(x):
        total = torch.zeros_like(row)
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = linear(row, "gate_up_proj" if experts.has_gate else "up_proj", expert)
            inner = experts._apply_gate(inner[None])[0] if experts.has_gate else experts.act_fn(inner)
            total = total + weight * linear(inner, "down_proj", expert)
        rows.append(total)
    return torch.stack(rows)


def adapted(model: Any, rank: int, *, ours: bool = True) -> PeftModel:
    mixture = mixture_of(model)
    config = LoraConfig(
        r=rank, lora_alpha=3, target_parameters=mixture.parameters(experts=True, router=False), target_modules=[],
        init_lora_weights=False,
    )  # fmt: skip
    if ours:
        experts.install_adapters(config, model)
    with torch.random.fork_rng(devices=[]), as_configured():
        torch.manual_seed(2)
        return get_peft_model(model, config)


@each(
    "kind, rank, dtype, tolerance",
    [(k, r, torch.float64, 1e-10) for k in KINDS for r in (1, 4)]
    + [(k, r, torch.float32, 1e-5) for k in KINDS for r in (3, 4)],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(kind, rank, dtype, tolerance, random_moe) -> None:
    model = random_moe(kind, KINDS[kind]).to(dtype)
    wrapped = adapted(model, rank).to(dtype)
    layer = next(m for m in wrapped.modules() if isinstance(m, LoraExperts))
    experts = layer.get_base_layer()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, 32, generator=generator, dtype=dtype, requires_grad=True)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator, dtype=dtype, requires_grad=True)  # the last expert gets no token
    inputs = [x, weights, *(p for p in layer.parameters() if p.requires_grad)]
    assert len(inputs) == 6

    found = layer(x, chosen, weights)
    matrices, wrapper = {}, layer
    while isinstance(wrapper, ParamWrapper):
        matrices[wrapper.parameter_name] = wrapper.get_param() + wrapper.get_delta_weight("default")
        wrapper = wrapper.base_layer
    expected = loop_over_experts(experts, x, chosen, weights, matrices)
    out_grad = torch.randn(found.shape, generator=generator, dtype=dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, out_grad)),
        (expected, *torch.autograd.grad(expected, inputs, out_grad)),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1, float(theirs.detach().abs().max())))


def test_grouped_products_are_those_of_a_loop_whatever_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, ends = torch.randn(9, 8, generator=generator), torch.tensor([2, 2, 9], dtype=torch.int32)
    matrices = torch.randn(3, 8, 12, generator=generator)
    assert experts.has_grouped_mm(rows, matrices)
    expected = torch.cat([rows[:2] @ matrices[0], rows[2:] @ matrices[2]])
    torch.testing.assert_close(grouped(rows, matrices, ends), expected)
    monkeypatch.setattr(experts, "GROUPED", ())
    torch.testing.assert_close(grouped(rows, matrices, ends), expected)


def test_a_model_computes_as_with_pefts_layers_and_as_its_base_where_adapters_are_off(random_moe) -> None:
    ids = torch.arange(3, 27).view(2, 12)
    for kind, keys in KINDS.items():
        logits = {}
        for ours in (True, False):
            wrapped = adapted(random_moe(kind, keys), 4, ours=ours)
            assert any(isinstance(m, LoraExperts) for m in wrapped.modules()) == ours
            with torch.no_grad():
                logits[ours] = wrapped(input_ids=ids, use_cache=False).logits
                with wrapped.disable_adapter():
                    logits[ours, "off"] = wrapped(input_ids=ids, use_cache=False).logits
        base = random_moe(kind, keys)(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=2e-4, msg=kind)
        torch.testing.assert_close(logits[True, "off"], base, rtol=0, atol=2e-4, msg=kind)
        assert (logits[True] - base).abs().max() > 0.01, kind
