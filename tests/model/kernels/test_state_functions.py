"""Functions of recurrent layers: where a package's crash or have no gradients, torch's take their place."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from types import ModuleType, SimpleNamespace

import hybrid_models
import pytest
import torch
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlft.config.model import KernelChoice
from rlft.model.kernels import recurrent, selection

NAME = "torch_chunk_gated_delta_rule"
IDS = torch.tensor([[3, 17, 5, 99, 42]])


def on_a_gpu(query, *args, **kwargs):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


@pytest.fixture
def package(monkeypatch) -> ModuleType:
    """A flash-linear-attention that computes on a GPU alone, which transformers' Qwen3.5 has imported."""
    fla = ModuleType("fla")
    fla.chunk_gated_delta_rule = on_a_gpu
    fla.utils = SimpleNamespace(IS_NVIDIA_HOPPER=False, TRITON_ABOVE_3_4_0=True)
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setitem(sys.modules, "fla.utils", fla.utils)
    monkeypatch.setitem(sys.modules, "tilelang", None)  # not installed
    in_torch = inspect.unwrap(getattr(modeling_qwen3_5, NAME))
    wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(in_torch)
    monkeypatch.setattr(modeling_qwen3_5, NAME, wrapped)
    return fla


def test_on_a_cpu_a_hybrid_is_computed_in_torch_though_a_package_for_gpus_is_installed(package):
    model = hybrid_models.random_model("qwen3_5_text")
    with pytest.raises(ValueError, match="cpu tensor"):
        model(IDS)
    for choice in (KernelChoice.plain, KernelChoice.auto):  # a second time it changes nothing
        selection.install(model, choice, own_attention=False)
        assert model(IDS).logits.isfinite().all()
    chosen = getattr(modeling_qwen3_5, NAME)
    assert not isinstance(chosen.function, type(chosen))
    with pytest.raises(ValueError, match="cpu tensor"):  # a tensor on a GPU gets the package's
        chosen(SimpleNamespace(is_cpu=False))
    assert recurrent.obstacle_of_functions(model) is None


def test_where_the_package_refuses_gradients_it_is_torch_and_says_why(package, monkeypatch):
    package.utils.IS_NVIDIA_HOPPER = True
    model = hybrid_models.random_model("qwen3_5_text")
    recurrent.install_functions(model)
    chosen = getattr(modeling_qwen3_5, NAME)
    monkeypatch.setattr(chosen, "in_torch", lambda first: "in torch")
    assert chosen(SimpleNamespace(is_cpu=False)) == "in torch"
    assert "no right gradients on Hopper GPUs with this Triton" in recurrent.obstacle_of_functions(model)
    assert recurrent.obstacle_of_functions(hybrid_models.random_model("lfm2")) is None


@pytest.mark.parametrize(
    "is_fixed", [{"IS_NVIDIA_HOPPER": False}, {"TRITON_ABOVE_3_4_0": False}, {"TRITON_ABOVE_3_7_1": True}]
)
def test_gradients_are_right_on_other_gpus_with_other_tritons_and_by_tilelang(package, is_fixed, monkeypatch):
    vars(package.utils).update(IS_NVIDIA_HOPPER=True)
    assert recurrent.why_no_gradients() is not None
    with monkeypatch.context() as patch:
        tilelang = ModuleType("tilelang")
        tilelang.__spec__ = importlib.machinery.ModuleSpec("tilelang", None)
        patch.setitem(sys.modules, "tilelang", tilelang)
        assert recurrent.why_no_gradients() is None
    vars(package.utils).update(is_fixed)
    assert recurrent.why_no_gradients() is None


def test_a_package_that_is_not_in_use_is_no_obstacle(monkeypatch):
    monkeypatch.delitem(sys.modules, "fla.utils", raising=False)
    assert recurrent.why_no_gradients() is None
