"""What a CUDA GPU computes with, run on a CPU: whole branches, and flash attention by stand-ins for its operators.

In float64 it is held to the kernels of a CPU, in bfloat16 to the same model in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import flash_stand_in
import pytest
import torch
from slow_cases import slow_but
from torch import Tensor
from transformers import PreTrainedModel

from rlft.config.model import KernelChoice
from rlft.model.backbone import Backbone
from rlft.model.kernels import elementwise, selection
from rlft.model.kernels.elementwise import Norm
from rlft.model.roles import POLICY, Roles
from rlft.types import Batch

FAMILIES = ["llama", "llama_one_kv_head", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "mistral", "gemma"]


@pytest.fixture
def results(random_model, backbone, make_roles, awkward_batch: Batch) -> Callable[..., dict[str, Tensor]]:
    """Log-probs, entropy and the adapter's gradients of a random model of this family."""

    def compute(
        family: str, choice: KernelChoice, *, dtype: torch.dtype, exact: bool = False, seed: int = 0
    ) -> dict[str, Tensor]:
        model: PreTrainedModel = random_model(family, dtype=dtype)
        if exact:
            model = model.double()
        model.set_attn_implementation("sdpa")
        kernels = selection.install(model, choice, own_attention=True)
        cpu = torch.device("cpu")
        made = Backbone(model=model, tokenizer=backbone.tokenizer, device=cpu, path="none", kernels=kernels)
        roles: Roles = make_roles(noise=0.05, backbone=made, token_budget=99)
        dice = torch.Generator().manual_seed(seed)  # float32 noise is the same for a base of any dtype
        for _, parameter in roles.named_parameters(POLICY):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=dice))
        with roles.training():
            outputs = roles.outputs(awkward_batch, entropy=True)
            assert outputs.entropy is not None
            dice = torch.Generator().manual_seed(3)
            weights = [torch.randn(outputs.entropy.shape, generator=dice) for _ in range(2)]
            ((weights[0] * outputs.logprobs).sum() + (weights[1] * outputs.entropy).sum()).backward()
        kinds = [("log-probs", outputs.logprobs.detach()), ("entropy", outputs.entropy.detach())]
        for name, parameter in roles.named_parameters(POLICY):
            assert parameter.grad is not None
            kinds.append((name, parameter.grad))
        return dict(kinds)

    return compute


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_it_gives_what_the_kernels_of_a_cpu_give(family, results, monkeypatch, request) -> None:
    """Those are held to their formulas to 1e-11; transformers' own norms are made in float32 even then."""
    theirs = results(family, KernelChoice.auto, dtype=torch.float64)
    gpu = request.getfixturevalue("gpu")
    ours = results(family, KernelChoice.auto, dtype=torch.float64)
    assert flash_stand_in.CALLS.count("backward") > 0
    assert gpu["attention"] > 0
    assert gpu["mlp"] == (0 if family == "gemma" else gpu["attention"]), "Gemma's gate is a GELU"
    for name, tensor in theirs.items():
        # Gradients are rounded to float32, as the adapter is.
        tolerance = 1e-11 if tensor.dtype == torch.float64 else 2**-23
        assert (ours[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.parametrize("family", slow_but("qwen3", ["llama", "qwen2", "qwen3", "gemma"]))
def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_models_own_modules(family, results, gpu) -> None:
    """The truth is the same weights in float64. Both round some 14 times a layer, each by up to 2^-8 of the number and
    by 0.82 x 2^-9 in the mean; which of the two is nearer is chance, 0.9 to 1.2 over eight adapters."""
    squares: dict[str, list[Tensor]] = {}
    for seed in range(4):
        exact = results(family, KernelChoice.plain, dtype=torch.bfloat16, exact=True, seed=seed)
        both = (results(family, choice, dtype=torch.bfloat16, seed=seed) for choice in KernelChoice)
        ours, theirs = (error_of_each_kind(found, exact) for found in both)
        for kind in ours:
            squares.setdefault(kind, []).append(torch.stack([ours[kind], theirs[kind]]).square())
    roundings = 3 * 14 + 4
    for kind, values in squares.items():
        mine, its = torch.stack(values).mean(0).sqrt().tolist()
        assert mine <= 1.4 * its, kind
        if kind in ("log-probs", "entropy"):
            assert mine <= 0.82 * 2**-9 * roundings**0.5, kind


def error_of_each_kind(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of log-probs, entropy, and gradients of A and B: the norm of the error, in units of the exact numbers'."""
    result = {}
    for kind in ("log-probs", "entropy", "lora_A", "lora_B"):
        names = [name for name in exact if kind in name]
        gap = torch.cat([(found[name].double() - exact[name].double()).flatten() for name in names])
        result[kind] = gap.norm() / torch.cat([exact[name].double().flatten() for name in names]).norm()
    return result


@pytest.mark.parametrize("adds_one", [False, True])
def test_norms_in_16_bits_are_rounded_where_transformers_rounds_them_and_nowhere_else(adds_one: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(n, 48, generator=dice).bfloat16() for n in (50, 1, 50))
    norm = Norm(weight[0], 1e-6, adds_one)
    wide, factor = x.double().requires_grad_(), weight[0].double() + adds_one
    by_formula = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor
    y, scale = elementwise.normed(x, *norm)
    assert scale.dtype == torch.float32
    # Each rounding is by at most half a unit of the last of 8 bits, 2^-8 of the number; a plain weight comes after one.
    roundings = 1 if adds_one else 2
    assert ((y.double() - by_formula).abs() <= 1.005 * roundings * 2**-8 * by_formula.abs() + 1e-6).all()
    weighted = grad.double() if adds_one else (grad * weight[0]).double() / factor
    [slope] = torch.autograd.grad(by_formula, wide, weighted)
    found = elementwise.norm_gradient(grad.clone(), norm, x, scale)
    # Rounded once; its two terms, made in float32, may cancel.
    assert ((found.double() - slope).abs() <= 1.01 * 2**-8 * slope.abs() + 1e-5).all()


def test_a_norm_outside_a_branch_is_one_function_in_16_bits_too(random_model, gpu) -> None:
    model = random_model("llama", dtype=torch.bfloat16)
    elementwise.install(model)
    x = torch.ones(1, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    assert type(model.base_model.norm(x).grad_fn).__name__ == "_RMSNormBackward"
