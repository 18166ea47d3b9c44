"""What engines hold is compared as checksums of bits, whatever fills them up."""

import re

import pytest
import torch

from rlft.generation.loaded_adapter import LoadedAdapter, difference, fingerprints, published, scale_of
from rlft.generation.shared_base import checksum
from rlft.types import Adapter

A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"


def adapter(alpha=5.0, **config):
    dice = torch.Generator().manual_seed(0)
    weights = {A: torch.randn(3, 7, generator=dice), B: torch.randn(4, 3, generator=dice)}
    return Adapter(version=3, weights=weights, config={"r": 3, "lora_alpha": alpha, **config})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_an_engine_rounds_scales_and_fills_up_is_what_was_published(dtype):
    down, up = torch.zeros(8, 7, dtype=dtype), torch.zeros(4, 8, dtype=dtype)
    down[:3], up[:, :3] = adapter().weights[A], adapter().weights[B]
    up *= 5 / 3  # as vLLM does, after rounding
    found = LoadedAdapter.of({A: down, B: up})
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert difference(3, found, published(adapter(), found.dtype), {}) is None
    down[7, 0] = 1e-6
    text = difference(3, LoadedAdapter.of({A: down, B: up}), published(adapter(), found.dtype), {})
    said = "policy version 3: 1 of the 2 tensors that it was given are others, such as layers.0.q_proj."
    assert str(text).startswith(said)


def test_any_changed_bit_changes_a_fingerprint_and_tensors_of_one_shape_have_their_own():
    dice = torch.Generator().manual_seed(0)
    tensors = {str(i): torch.randn(5, 6, generator=dice) for i in range(4)}
    tensors |= {"other": torch.ones(2), "none": torch.ones(0)}
    found = fingerprints(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].checksum == checksum(tensor)
        assert found[name].norm == pytest.approx(float(tensor.double().norm()), abs=1e-12)
    for index in range(30):
        changed = tensors["2"].clone()
        changed.view(torch.int32).view(-1)[index] ^= 1
        again = fingerprints({**tensors, "2": changed})
        assert [name for name in tensors if again[name].checksum != found[name].checksum] == ["2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_rounded_and_then_multiplied_each_by_its_own_scale(dtype):
    dice = torch.Generator().manual_seed(0)
    tensors = {str(i): torch.randn(5, 6, generator=dice) for i in range(5)}
    scales = {"1": 5 / 3, "2": 5 / 3, "4": 0.3}
    one_by_one = {name: t.to(dtype) * scales[name] if name in scales else t.to(dtype) for name, t in tensors.items()}
    assert fingerprints(tensors, dtype, scales) == fingerprints(one_by_one)
    assert fingerprints(tensors, dtype) == fingerprints({name: tensor.to(dtype) for name, tensor in tensors.items()})


def test_the_scale_is_pefts_also_by_pattern_and_for_rslora():
    from peft import LoraConfig, get_peft_model
    from torch import nn

    for use_rslora in (False, True):
        patterns = {"alpha_pattern": {"a": 3, "inner.b": 7.5}, "rank_pattern": {"b": 2}}
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["a", "b", "c"], use_rslora=use_rslora, **patterns)
        layers = {name: nn.Linear(5, 5) for name in "abc"}
        inner = {name: nn.Linear(5, 5) for name in "abc"}
        model = get_peft_model(nn.ModuleDict({**layers, "inner": nn.ModuleDict(inner)}), config)
        adapted = {name: module for name, module in model.named_modules() if hasattr(module, "scaling")}
        expected = {name: module.scaling["default"] for name, module in adapted.items()}
        found = {name: scale_of(config.to_dict(), name.removeprefix("base_model.model.")) for name in adapted}
        assert found == expected
        assert (len(found), len(set(found.values()))) == (6, 4)


def test_what_is_missing_left_over_or_wrong_beside_the_tensors_is_named():
    expected = published(adapter(), "float32")
    for found, said in (
        (LoadedAdapter(tensors={}), "policy version 3: it holds no adapter"),
        (LoadedAdapter(tensors={A: expected[A]}),
         "1 of the 2 tensors that it was given are others, such as layers.0.q_proj.lora_B, which is missing"),
        (LoadedAdapter(tensors={**expected, "x": expected[A]}), "such as x, which was not published"),
        (LoadedAdapter(tensors=expected, faults=("a", "b")), "policy version 3: a; b"),
        (LoadedAdapter(tensors=published(adapter(alpha=10.0), "float32")),
         "lora_B with a norm of .* instead of .*, 2 times"),
    ):  # fmt: skip
        assert re.search(said, difference(3, found, expected, {}) or "nothing is wrong")
