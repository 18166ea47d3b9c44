"""The base's fingerprint in memory: any change of any weight changes it, and a role that makes one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from rlft.generation.adapter_files import AdapterFiles
from rlft.model import roles as roles_module
from rlft.model.backbone import load_backbone, read_backbone
from rlft.model.base_weights import BaseWeights, bit_sum
from rlft.model.roles import POLICY
from rlft.types import UserError


def test_one_changed_bit_of_any_element_changes_the_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        for size in (1, 3, 8, 13):
            tensor = torch.arange(size).to(dtype)
            before = bit_sum(tensor)
            assert before == bit_sum(tensor.clone())
            bits = tensor.view(torch.uint8)
            for index in range(len(bits)):
                bits[index] ^= 1
                assert bit_sum(tensor) != before, (dtype, size, index)
                bits[index] ^= 1


def test_the_sum_is_the_same_wherever_the_tensor_lies() -> None:
    tensor = torch.arange(40, dtype=torch.bfloat16)
    assert bit_sum(tensor[1:12]) == bit_sum(tensor[1:12].clone())
    matrix = tensor.view(5, 8).t()
    assert bit_sum(matrix) == bit_sum(matrix.contiguous())
    assert bit_sum(torch.zeros(0)) == 0
    assert bit_sum(torch.tensor(2.0)) == bit_sum(torch.tensor([2.0]))


def test_the_fingerprint_sees_written_and_replaced_parameters_also_inside_pefts_layers() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    weights = BaseWeights(model)
    peft.LoraModel(model, peft.LoraConfig(target_modules=["0", "1"]), "default")
    before = weights.fingerprint()
    assert sorted(before) == ["0.bias", "0.weight", "1.weight"]
    base = model[1].base_layer

    def changed() -> list[str]:
        return [name for name, value in weights.fingerprint().items() if value != before[name]]

    assert changed() == []
    base.weight.data[3, 2] += 1
    assert changed() == ["1.weight"]
    base.weight.data[3, 2] -= 1
    own, base.weight = base.weight, nn.Parameter(base.weight.detach().clone())
    assert changed() == ["1.weight"]
    base.weight = own
    assert changed() == []


@pytest.fixture
def adapter(make_roles: Callable[..., Any], tmp_path: Path) -> Iterator[Path]:
    roles, files = make_roles(noise=0.05), AdapterFiles(tmp_path)
    folder = files.write(roles.publish(1))
    roles.close()
    yield folder
    files.close()


def test_an_adapter_whose_loading_changes_the_base_is_refused_whatever_its_config_says(
    adapter: Path, make_roles: Callable[..., Any], model_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = load_backbone(model_config())
    backbone = read_backbone(model_config())

    def rewriting(fields: dict[str, Any]) -> peft.LoraConfig:
        targets = fields["target_modules"]
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="olora")

    monkeypatch.setattr(roles_module, "folder_config", rewriting)
    with pytest.raises(UserError, match=r"^snapshot\.reference: .*as the reference has changed 28 weights") as error:
        make_roles(backbone=backbone, reference=str(adapter))
    assert f"got {adapter};" in str(error.value)
    assert not any("lora" in name for name, _ in backbone.model.named_parameters())
    assert load_backbone(model_config()) is not shared, "no other job gets what may be the changed base"


def test_a_weight_that_is_written_while_the_policy_starts_from_a_folder_is_found(
    adapter: Path, make_roles: Callable[..., Any], model_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = read_backbone(model_config())
    real = roles_module.set_peft_model_state_dict

    def also_writes(model: Any, weights: Any, adapter_name: str) -> Any:
        backbone.model.model.embed_tokens.weight.data[7, 3] += 1e-3
        return real(model, weights, adapter_name=adapter_name)

    monkeypatch.setattr(roles_module, "set_peft_model_state_dict", also_writes)
    with pytest.raises(UserError, match=rf"^lora\.path: loading it as the {POLICY} has changed [12] weights of the ba"):
        make_roles(backbone=backbone, path=str(adapter))
