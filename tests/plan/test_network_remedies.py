"""What refusals of models and adapters tell the user to do, done."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.model.adapter_folder import HEAD, load_tensors
from rlft.plan.roles import targets_of
from rlft.types import UserError
from tests.helpers import model_folders

FEW = ["prompts_per_step=2", "group_size=2", "steps=1", "data.size=8", "eval.every=0"]


def planned(*words: str) -> str | None:
    """What the plan of this run is refused for; None if it is not."""
    try:
        resolve(compose([*FEW, *words])).plan()
    except UserError as error:
        return str(error)
    return None


def with_remedies(*words: str) -> list[str]:
    """What a plan is refused for, and again with each remedy, of the form `set <key>=<value> ..`, until it is not."""
    said = []
    while (problem := planned(*words)) is not None:
        said.append(problem)
        assert len(said) < 6, said
        written = re.search(r"; set (.*?)(, or .*|; .*)?$", problem)
        assert written is not None, problem
        new = shlex.split(written[1]) if "'" not in written[1] else [written[1]]
        keys = {word.partition("=")[0] for word in new}
        words = (*(word for word in words if word.partition("=")[0] not in keys), *new)
    return said


def adapter(folder: Path, tiny_path: Path, **fields: Any) -> Path:
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    get_peft_model(base, LoraConfig(**{**settings, **fields})).save_pretrained(str(folder))
    return folder


def test_an_adapter_as_the_model_goes_on_its_base(tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path)
    said = with_remedies(f"model.path={folder}")
    assert said[0].startswith("model.path: that folder holds an adapter, not a model")
    assert f"set model.path={tiny_path} lora.path={folder} lora.rank=3 lora.alpha=5" in said[0]
    shutil.copy(tiny_path / "config.json", folder)  # from which transformers would load the base, with the adapter
    assert planned(f"model.path={folder}") == said[0]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"{}", b'{"r": null}'])
def test_a_damaged_adapter_in_the_place_of_a_model_is_refused_all_the_same(content, tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path)
    (folder / "adapter_config.json").write_bytes(content)
    said = planned(f"model.path={folder}")
    assert said is not None
    assert said.startswith("model.path: that folder holds an adapter, not a model")
    assert "None" not in said


def test_a_pickled_adapter_is_written_by_the_command_of_its_refusal(tiny_path, tmp_path, monkeypatch):
    folder = adapter(tmp_path / "it's", tiny_path)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save(weights, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    words = ["lora.rank=3", "lora.alpha=5", "lora.target_modules=[q_proj,v_proj]", f'lora.path="{folder}"']
    said = planned(*words)
    assert said is not None
    python, option, code, path = shlex.split(said.partition("write them as adapter_model.safetensors: ")[2])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", ["-c", path])
    exec(code, {})
    assert planned(*words) is None
    assert all(torch.equal(weights[name], t) for name, t in load_file(folder / "adapter_model.safetensors").items())


PARTS: list[dict[str, Any]] = [
    {"layers_to_transform": [1, 3]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 2], "layers_pattern": "layers", "target_modules": ["up_proj", "o_proj"]},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"exclude_modules": r".*layers\.[01]\..*"},
    {"target_modules": r".*layers\.(1|2)\.mlp\.(up|down)_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj"]},
]


@pytest.mark.parametrize("fields", PARTS, ids=str)
def test_an_adapter_of_some_layers_starts_a_run_with_the_keys_that_its_refusals_name(fields, tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path, **fields)
    said = with_remedies(f"lora.path={folder}", "lora.target_modules=[k_proj]")
    assert any("set lora.target_modules=" in problem for problem in said)


def test_the_targets_of_an_adapter_stand_for_its_modules_and_for_no_others():
    names = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.1.w1", "mlp.experts.12.w1"]
    chance, seen = random.Random(0), set()
    for _ in range(300):
        layers = [f"model.layers.{n}.{name}" for n in range(chance.randint(1, 12)) for name in names] + ["lm_head"]
        kinds = chance.sample(names, chance.randint(1, len(names)))
        modules = {name for name in layers if name.endswith(tuple(kinds)) and chance.random() < chance.choice((0.5, 1))}
        modules |= {"lm_head"} if chance.random() < 0.2 or not modules else set()
        targets = targets_of(modules, layers)
        seen.add(type(targets))
        if isinstance(targets, str):
            found = {name for name in layers if re.fullmatch(targets, name)}
        else:
            found = {name for name in layers if f".{name}".endswith(tuple(f".{target}" for target in targets))}
        assert found == modules, targets
    assert seen == {str, list}


def test_an_adapter_with_modules_of_the_base_is_merged_by_its_remedy(tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path, modules_to_save=["norm"])
    said = planned(f"lora.path={folder}")
    assert said is not None
    assert "its modules_to_save changes the base" in said
    assert "merge_and_unload(), and set model.path to the result" in said
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    PeftModel.from_pretrained(base, str(folder)).merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path / "merged")
    assert planned(f"model.path={tmp_path / 'merged'}") is None


def test_code_of_a_folder_runs_with_the_key_that_its_refusal_names(tmp_path):
    folder = model_folders.llama(tmp_path / "own")
    fields = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "an_own_llama", "auto_map": own}))
    config = "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'an_own_llama'\n"
    model = "from transformers import LlamaForCausalLM\nfrom .own_config import OwnConfig\n"
    (folder / "own_config.py").write_text(config)
    (folder / "own_model.py").write_text(
        f"{model}class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    said = planned(f"model.path={folder}")
    assert said is not None
    assert said.startswith("model.path: the model needs code of its own")
    assert said.endswith("read that code, then set model.trust_remote_code=true")
    assert planned(f"model.path={folder}", "model.trust_remote_code=true") is None
    weights = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in weights.items() if "up_proj" not in name}, folder / "model.safetensors")
    said = planned(f"model.path={folder}", "model.trust_remote_code=true")
    assert str(said).startswith("model.path: its files lack model.layers.0.mlp.up_proj.weight and 1 other tensor")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "own_config.py").write_text(f"import no_such_library\n{config}")
    said = str(planned(f"model.path={other}", "model.trust_remote_code=true"))
    assert "no_such_library" in said
    assert said.endswith("install what its code imports, or use another model")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_of_an_adapter_or_a_head_that_is_not_finite_is_named_by_tensor_and_key(value, tmp_path):
    tensors = {"base.a.weight": torch.ones(2, 3), "base.b.weight": torch.ones(4)}
    for file, words in (("adapter_model.safetensors", "the adapter"), (HEAD, "the scalar head")):
        for name in tensors:
            broken = {n: t.clone() for n, t in tensors.items()}
            broken[name].view(-1)[-1] = value
            save_file(broken, tmp_path / file)
            with pytest.raises(UserError, match=rf"^lora\.path: {words} holds NaN or infinity in {name}, got"):
                load_tensors(tmp_path, "lora.path", file)
