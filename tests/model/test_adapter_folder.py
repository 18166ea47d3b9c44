"""Adapter folders: what is in them is found without reading weights, and what is wrong with them is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlft.model.adapter_folder import (
    adapter_shapes,
    check_adapter_folder,
    check_head,
    head_shapes,
    load_adapter,
    load_head,
    read_record,
)
from rlft.types import UserError

FIELDS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole folder: two tensors of an adapter, a head, a record."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(FIELDS))
    tensors = {"a.lora_A.weight": torch.arange(6.0).view(2, 3), "a.lora_B.weight": torch.ones(5, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    save_file({"weight": torch.full((1, 3), 0.5), "bias": torch.tensor([0.25])}, tmp_path / "head.safetensors")
    (tmp_path / "rlft.json").write_text('{"role": "critic", "base_fingerprint": "ab"}')
    return tmp_path


def test_tensors_are_read_as_they_were_saved(folder: Path) -> None:
    adapter, head = load_adapter(folder, "lora.path"), load_head(str(folder), "critic.init")
    assert {n: t.tolist() for n, t in adapter.items()} == {
        "a.lora_A.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "a.lora_B.weight": [[1.0, 1.0]] * 5,
    }
    assert {n: t.tolist() for n, t in head.items()} == {"weight": [[0.5, 0.5, 0.5]], "bias": [0.25]}


def test_shapes_are_those_of_the_tensors(folder: Path) -> None:
    assert adapter_shapes(folder, "lora.path") == {"a.lora_A.weight": (2, 3), "a.lora_B.weight": (5, 2)}
    assert head_shapes(folder, "critic.init") == {"weight": (1, 3), "bias": (1,)}


def test_the_config_and_the_record_are_read(folder: Path) -> None:
    assert check_adapter_folder(folder, "lora.path") == FIELDS
    assert read_record(folder, "lora.path") == {"role": "critic", "base_fingerprint": "ab"}
    check_head(folder, "critic.init")


def test_a_folder_of_another_program_has_no_record(folder: Path) -> None:
    (folder / "rlft.json").unlink()
    assert read_record(folder, "lora.path") == {}


def test_a_config_that_names_no_kind_is_a_loras(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 2}')
    assert check_adapter_folder(folder, "lora.path") == {"r": 2}


def test_a_folder_may_stand_in_the_users_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    path = f"~/{folder.name}"
    assert check_adapter_folder(path, "lora.path") == FIELDS
    assert set(load_adapter(path, "lora.path")) == set(adapter_shapes(path, "lora.path"))
    assert set(load_head(path, "critic.init")) == set(head_shapes(path, "critic.init"))
    assert read_record(path, "lora.path")["role"] == "critic"
    check_head(path, "critic.init")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_pefts_files_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"^lora\.path: there is no {name} in that folder, got {folder}; "):
        check_adapter_folder(folder, "lora.path")


def test_a_folder_without_a_head_is_refused_where_one_is_needed(folder: Path) -> None:
    (folder / "head.safetensors").unlink()
    with pytest.raises(
        UserError, match=rf"^critic\.init: there is no head\.safetensors in that folder, got {folder}; "
    ):
        check_head(folder, "critic.init")


def test_another_kind_of_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(UserError, match=r"^lora\.path: holds an adapter of the kind IA3, got .*; point it at a LoRA"):
        check_adapter_folder(folder, "lora.path")


@pytest.mark.parametrize("text", ['{"r": 2', "[1, 2]", "\xff"])
def test_json_that_is_none_or_holds_no_fields_is_refused(folder: Path, text: str) -> None:
    for name in ("adapter_config.json", "rlft.json"):
        (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"^lora\.path: adapter_config\.json cannot be read \(.+\), got "):
        check_adapter_folder(folder, "lora.path")
    with pytest.raises(UserError, match=r"^lora\.path: rlft\.json cannot be read \(.+\), got "):
        read_record(folder, "lora.path")


@pytest.mark.parametrize("read", [load_adapter, adapter_shapes])
def test_an_adapter_cut_short_is_refused(folder: Path, read: Callable[[Path, str], object]) -> None:
    cut_short(folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"^lora\.path: the adapter cannot be read \(.+\), got "):
        read(folder, "lora.path")


@pytest.mark.parametrize("read", [load_head, head_shapes])
def test_a_head_cut_short_is_refused(folder: Path, read: Callable[[Path, str], object]) -> None:
    cut_short(folder / "head.safetensors")
    with pytest.raises(UserError, match=r"^critic\.init: the scalar head cannot be read \(.+\), got "):
        read(folder, "critic.init")


def test_a_pickled_adapter_is_never_looked_at(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"there is no adapter_model\.safetensors"):
        check_adapter_folder(folder, "lora.path")
    with pytest.raises(UserError, match=r"the adapter cannot be read"):
        load_adapter(folder, "lora.path")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
