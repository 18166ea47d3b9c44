"""What learns depends on the machine, and notes about adapter folders: whose base and template, what they change.

The rules of the config alone are in test_refusals.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_one_test import each
from safetensors.torch import save_file
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.model import ModelConfig
from rlft.config.resolved import resolve
from rlft.generation.vllm.engine import VLLM
from rlft.plan.identity import fingerprints
from rlft.plan.roles import Use, notes_of_adapters
from rlft.types import UserError

OWN = "embedded:tiny-arithmetic"
NAMES = {
    None: False, "": False, OWN: False, "tiny-arithmetic": False, "org/Tiny-Arithmetic": False,
    "/moved/to/tiny-arithmetic": False, "org/other": True, "/elsewhere/tiny": True,
}  # fmt: skip
"""{base_model_name_or_path: whether it is another base}."""
TEMPLATES = {
    "none": False,
    "own": False,
    "own in tokenizer_config": False,
    "other": True,
    "other in tokenizer_config": True,
}
"""{the chat template among the adapter's files: whether it is another one}."""
TENSORS = {"random": False, "last B only": False, "all B zero": True, "all B zero, DoRA": False}
"""{the adapter's tensors: whether it changes nothing}."""


@pytest.fixture(scope="module")
def base(model_config: Callable[..., ModelConfig]) -> tuple[ModelConfig, dict[str, str]]:
    return model_config(), fingerprints(model_config())


def write(folder: Path, name: str | None, template: str, tensors: str, own: str) -> Path:
    folder.mkdir(parents=True)
    fields: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1}
    fields |= {"target_modules": ["q_proj"], "base_model_name_or_path": name, "use_dora": "DoRA" in tensors}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    text = own if template.startswith("own") else "{{ messages }}"
    if template in ("own", "other"):
        (folder / "chat_template.jinja").write_text(text)
    elif template != "none":
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    b = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_B.weight": torch.zeros(4, 1) for n in range(3)}
    if "zero" not in tensors:
        b[max(b)] += 1
    if tensors == "random":
        b = {key: torch.ones(4, 1) for key in b}
    a = {key.replace("lora_B", "lora_A"): torch.ones(1, 4) for key in b}
    save_file(a | b, folder / "adapter_model.safetensors")
    return folder


@each("name, template, tensors", [*itertools.product(NAMES, TEMPLATES, TENSORS)][::3])
def test_what_is_odd_about_an_adapter_is_noted_and_nothing_else(
    name: str | None,
    template: str,
    tensors: str,
    base: tuple[ModelConfig, dict[str, str]],
    tiny_path: Path,
    tmp_path: Path,
) -> None:
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    folder = write(place, name, template, tensors, (tiny_path / "chat_template.jinja").read_text())
    use = Use(key="lora.path", path=str(folder))
    said = notes_of_adapters([use], *base)
    expected = {"chat template": TEMPLATES[template], "names the base": NAMES[name], "are 0": TENSORS[tensors]}
    for words, is_noted in expected.items():
        assert any(words in note for note in said) is is_noted, (words, said)
    assert len(said) == sum(expected.values())
    assert all(note.startswith("lora.path: ") for note in said)
    if not any(expected.values()):
        return
    (folder / "rlft.json").write_text(json.dumps({"role": "policy", **base[1]}))  # then its base is known
    assert not any("names the base" in note for note in notes_of_adapters([use], *base))


@pytest.mark.parametrize("words", ["train +recipe=grpo_arithmetic", slow("sft +recipe=sft_arithmetic")])
def test_all_weights_are_float32_where_auto_would_be_16_bits_on_a_gpu(words: str) -> None:
    command, recipe = words.split()
    for device in ("cpu", "cuda"):
        keys = [recipe, "eval.every=0", f"model.device={device}"]
        of_adapter, of_all = (
            resolve(compose([*keys, *more], command=command)).config.model.dtype for more in ([], ["lora=null"])
        )
        assert (of_adapter, of_all) == ("auto", "float32")
        with pytest.raises(UserError, match="small updates are lost in the rounding of bfloat16 weights") as refused:
            resolve(compose([*keys, "lora=null", "model.dtype=bfloat16"], command=command))
        assert refused.value.key == "model.dtype"


@pytest.mark.parametrize("words", ["train +recipe=grpo_arithmetic", slow("sft +recipe=sft_arithmetic")])
def test_an_engine_that_takes_adapters_alone_does_not_serve_all_weights(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, recipe = words.split()
    config = compose([recipe, "lora=null", "eval.every=0", "generation=vllm"], command=command)
    resolve(config).plan(runs_here=False)
    rounded = compose([recipe, "lora=null", "generation.transformers.weights=merged_int8"], command=command)
    with pytest.raises(UserError, match="rounds the sum of base and adapter, and lora=null has none, got merged_int8"):
        resolve(rounded).plan(runs_here=False)
    with monkeypatch.context() as patched:  # `auto` on a GPU
        patched.setattr("rlft.plan.model_rules.choose_engine", lambda *_, **__: ("vllm", "installed, with a GPU"))
        assert resolve(rounded).plan(runs_here=False).engine == "vllm", "whose keys these are not"
    monkeypatch.setattr(VLLM, "serves_whole_models", False)
    with pytest.raises(UserError, match="is given adapters only, and lora=null has none, got vllm; use tr") as refused:
        resolve(config).plan(runs_here=False)
    assert refused.value.key == "generation.engine"
