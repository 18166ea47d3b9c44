"""Roles and their folders: what learns on which machine, notes about adapters, and remedies of refusals, done.

The rules of the config alone are in test_refusals.py.
"""

import itertools
import json
import random
import re
import shlex
import shutil
import sys

import pytest
import torch
from in_one_test import each
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.vllm.engine import VLLM
from rlft.model.adapter_folder import HEAD, load_tensors
from rlft.plan.identity import fingerprints
from rlft.plan.roles import Use, notes_of_adapters, targets_of
from rlft.types import UserError
from tests.helpers import model_folders

OWN = "embedded:tiny-arithmetic"
NAMES = {
    None: False, "": False, OWN: False, "tiny-arithmetic": False, "org/Tiny-Arithmetic": False,
    "/moved/to/tiny-arithmetic": False, "org/other": True, "/elsewhere/tiny": True,
}  # fmt: skip
"""{base_model_name_or_path: whether it is another base}."""
TEMPLATES = {"none": False, "own": False, "own in tokenizer_config": False, "other": True,
             "other in tokenizer_config": True}  # fmt: skip
"""{the chat template among the adapter's files: whether it is another one}."""
TENSORS = {"random": False, "last B only": False, "all B zero": True, "all B zero, DoRA": False}
"""{the adapter's tensors: whether it changes nothing}."""


@pytest.fixture(scope="module")
def base(model_config):
    return model_config(), fingerprints(model_config())


def write(folder, name, template, tensors, own):
    folder.mkdir(parents=True)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1}
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
def test_what_is_odd_about_an_adapter_is_noted_and_nothing_else(name, template, tensors, base, tiny_path, tmp_path):
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
def test_all_weights_are_float32_where_auto_would_be_16_bits_on_a_gpu(words):
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
def test_an_engine_that_takes_adapters_alone_does_not_serve_all_weights(words, monkeypatch):
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


# -- what refusals of models and adapters tell the user to do, done ----------------------------------------------------
FEW = ["prompts_per_step=2", "group_size=2", "steps=1", "data.size=8", "eval.every=0"]


def planned(*words):
    """What the plan of this run is refused for; None if it is not."""
    try:
        resolve(compose([*FEW, *words])).plan()
    except UserError as error:
        return str(error)
    return None


def with_remedies(*words):
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


def adapter(folder, tiny_path, **fields):
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(**{**settings, "task_type": "CAUSAL_LM", **fields})
    get_peft_model(base, config).save_pretrained(str(folder))
    return folder


def test_an_adapter_as_the_model_goes_on_its_base(tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path)
    said = with_remedies(f"model.path={folder}")
    assert said[0].startswith("model.path: that folder holds an adapter, not a model")
    assert f"set model.path={tiny_path} lora.path={folder} lora.rank=3 lora.alpha=5" in said[0]
    shutil.copy(tiny_path / "config.json", folder)  # from which transformers would load the base, with the adapter
    assert planned(f"model.path={folder}") == said[0]


def test_a_damaged_adapter_in_the_place_of_a_model_is_refused_all_the_same(tiny_path, tmp_path):
    folder = adapter(tmp_path / "adapter", tiny_path)
    for content in (b"{", b"[]", b"\xff", b"{}", b'{"r": null}'):
        (folder / "adapter_config.json").write_bytes(content)
        said = str(planned(f"model.path={folder}"))
        assert said.startswith("model.path: that folder holds an adapter, not a model")
        assert "None" not in said


def test_a_pickled_adapter_is_written_by_the_command_of_its_refusal(tiny_path, tmp_path, monkeypatch):
    folder = adapter(tmp_path / "it's", tiny_path)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save(weights, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    words = ["lora.rank=3", "lora.alpha=5", "lora.target_modules=[q_proj,v_proj]", f'lora.path="{folder}"']
    said = str(planned(*words))
    python, option, code, path = shlex.split(said.partition("write them as adapter_model.safetensors: ")[2])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", ["-c", path])
    exec(code, {})
    assert planned(*words) is None
    assert all(torch.equal(weights[name], t) for name, t in load_file(folder / "adapter_model.safetensors").items())


PARTS = [
    {"layers_to_transform": [1, 3]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 2], "layers_pattern": "layers", "target_modules": ["up_proj", "o_proj"]},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"exclude_modules": r".*layers\.[01]\..*"},
    {"target_modules": r".*layers\.(1|2)\.mlp\.(up|down)_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj"]},
]
"""Fields of adapters of some layers."""


@pytest.mark.parametrize("fields", [part if part in PARTS[2:6:3] else slow(part) for part in PARTS], ids=str)
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
    said = str(planned(f"lora.path={folder}"))
    assert "its modules_to_save changes the base" in said
    assert "merge_and_unload(), and set model.path to the result" in said
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
    said, trusting = str(planned(f"model.path={folder}")), "model.trust_remote_code=true"
    assert said.startswith("model.path: the model needs code of its own")
    assert said.endswith("read that code, then set model.trust_remote_code=true")
    assert planned(f"model.path={folder}", trusting) is None
    weights = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in weights.items() if "up_proj" not in name}, folder / "model.safetensors")
    said = str(planned(f"model.path={folder}", trusting))
    assert said.startswith("model.path: its files lack model.layers.0.mlp.up_proj.weight and 1 other tensor")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "own_config.py").write_text(f"import no_such_library\n{config}")
    said = str(planned(f"model.path={other}", trusting))
    assert "no_such_library" in said
    assert said.endswith("install what its code imports, or use another model")


@each("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_of_an_adapter_or_a_head_that_is_not_finite_is_named_by_tensor_and_key(value, tmp_path):
    tensors = {"base.a.weight": torch.ones(2, 3), "base.b.weight": torch.ones(4)}
    for file, words in (("adapter_model.safetensors", "the adapter"), (HEAD, "the scalar head")):
        for name in tensors:
            broken = {n: t.clone() for n, t in tensors.items()}
            broken[name].view(-1)[-1] = value
            save_file(broken, tmp_path / file)
            with pytest.raises(UserError, match=rf"^lora\.path: {words} holds NaN or infinity in {name}, got"):
                load_tensors(tmp_path, "lora.path", file)
