"""Adapter folders, rlft's and others': what is read and refused; each field of PEFT's LoraConfig is decided."""

import copy
import dataclasses
import json
from functools import partial
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch
from peft import EvaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from rlft.batch import score_sequences
from rlft.config.model import LoraSettings
from rlft.model.adapter_folder import (
    ANOTHER_FUNCTION,
    CHANGING_THE_BASE,
    HEAD,
    OF_THE_FUNCTION,
    VALUES,
    WITHOUT_EFFECT,
    check_adapter_folder,
    check_fields,
    check_head,
    check_shape,
    load_tensors,
    read_record,
    tensor_shapes,
)
from rlft.model.backbone import Backbone
from rlft.model.kernels.selection import Decision, KernelChoice, Kernels
from rlft.model.roles import POLICY, REFERENCE, policy_alone
from rlft.types import UserError

FIELDS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0}


@pytest.fixture
def folder(tmp_path):
    """A whole folder: two tensors of an adapter, a head, a record."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(FIELDS))
    tensors = {"a.lora_A.weight": torch.arange(6.0).view(2, 3), "a.lora_B.weight": torch.ones(5, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    save_file({"weight": torch.full((1, 3), 0.5), "bias": torch.tensor([0.25])}, tmp_path / "head.safetensors")
    (tmp_path / "rlft.json").write_text('{"role": "critic", "base_fingerprint": "ab"}')
    return tmp_path


def test_tensors_and_shapes_are_read_as_they_were_saved(folder):
    adapter, head = load_tensors(folder, "lora.path"), load_tensors(str(folder), "critic.init", HEAD)
    saved = {"a.lora_A.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "a.lora_B.weight": [[1.0, 1.0]] * 5}
    assert {n: t.tolist() for n, t in adapter.items()} == saved
    assert {n: t.tolist() for n, t in head.items()} == {"weight": [[0.5, 0.5, 0.5]], "bias": [0.25]}
    assert tensor_shapes(folder, "lora.path") == {"a.lora_A.weight": (2, 3), "a.lora_B.weight": (5, 2)}
    assert tensor_shapes(folder, "critic.init", HEAD) == {"weight": (1, 3), "bias": (1,)}


def test_a_config_that_names_no_kind_is_a_loras(folder):
    (folder / "adapter_config.json").write_text('{"r": 2}')
    assert check_adapter_folder(folder, "lora.path") == {"r": 2}


def test_a_folder_may_stand_in_the_users_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    path = f"~/{folder.name}"
    assert check_adapter_folder(path, "lora.path") == FIELDS
    assert set(load_tensors(path, "lora.path")) == set(tensor_shapes(path, "lora.path"))
    assert set(load_tensors(path, "critic.init", HEAD)) == set(tensor_shapes(path, "critic.init", HEAD))
    assert read_record(path, "lora.path")["role"] == "critic"
    check_head(path, "critic.init")


def lost(name):
    return lambda folder: (folder / name).unlink()


def cut_short(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def written(name, text):
    return lambda folder: (folder / name).write_bytes(text.encode("latin-1"))


def pickled(folder):
    (folder / ADAPTER).rename(folder / "adapter_model.bin")


CONFIG, ADAPTER, RECORD = "adapter_config.json", "adapter_model.safetensors", "rlft.json"
NO_JSON = ('{"r": 2', "[1, 2]", "\xff")
SPOILED = [
    *((lost(name), check_adapter_folder, f"there is no {name} in that folder, got") for name in (CONFIG, ADAPTER)),
    (lost(HEAD), check_head, f"there is no {HEAD} in that folder, got"),
    (written(CONFIG, '{"peft_type": "IA3"}'), check_adapter_folder,
     "holds an adapter of the kind IA3, got .*; point it at a LoRA"),
    *((written(CONFIG, text), check_adapter_folder, rf"{CONFIG} cannot be read \(.+\), got ") for text in NO_JSON),
    *((written(RECORD, text), read_record, rf"{RECORD} cannot be read \(.+\), got ") for text in NO_JSON),
    *((cut_short(ADAPTER), read, r"the adapter cannot be read \(.+\)") for read in (load_tensors, tensor_shapes)),
    *((cut_short(HEAD), partial(read, name=HEAD), r"the scalar head cannot be read \(.+\)")
      for read in (load_tensors, tensor_shapes)),
    (pickled, check_adapter_folder, r".*its weights are pickled, in adapter_model\.bin"),
    (pickled, load_tensors, "the adapter cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "read", "said"), SPOILED)
def test_a_folder_that_is_not_whole_is_refused_by_key_and_by_what_it_lacks(spoil, read, said, folder):
    spoil(folder)
    with pytest.raises(UserError, match=rf"^some\.key: ({said})"):
        read(folder, "some.key")


IDS = [3, 17, 5, 99, 42, 8, 61, 2]
CPU = torch.device("cpu")
TARGETS = ["q_proj", "down_proj"]

TAKEN = (True, False, "gaussian", "eva", "orthogonal", "mica")
REFUSED = ("olora", "pissa", "pissa_niter_2", "corda", "loftq", "lora_ga")
OF_A_NEEDED_PASS = ("corda", "loftq", "lora_ga")
"""Initialisations for which PEFT wants a pass over data, or scipy, first."""


@pytest.fixture
def base(random_model):
    return random_model("llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True)


@pytest.fixture
def save(base, tmp_path):
    """Saves a LoRA adapter that PEFT has made on a copy of the base, and that some training has moved."""

    def make(**keys):
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | keys)
        torch.manual_seed(1)
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += 0.05 * torch.randn_like(parameter)
        folder = tmp_path / f"adapter_{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(str(folder), save_embedding_layers=False)
        return folder

    return make


@pytest.fixture
def roles_on(base):
    """Roles on a copy of the base, computed by PEFT's own layers."""

    def make(reference=None, path=None):
        kernels = Kernels(decision=Decision(choice=KernelChoice.plain, reason=""))
        model, tokenizer = copy.deepcopy(base), cast(Any, None)
        backbone = Backbone(model=model, tokenizer=tokenizer, device=CPU, path="", kernels=kernels)
        start = None if path is None else str(path)
        lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules=TARGETS, path=start)
        return policy_alone(backbone, lora, token_budget=99, seed=0, reference=str(reference or "none"))

    return make


def of_role(roles, role):
    with torch.no_grad(), roles.using(role):
        return score_sequences(roles.model, [IDS], CPU)[0]


def edit(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def is_unchanged(model, base):
    """Whether the model's weights, which may have adapters on them, are those of the base, bit for bit."""
    now = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items() if "lora_" not in name}
    before = base.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


def test_every_field_and_every_initialisation_of_the_installed_peft_is_decided():
    decided = {*OF_THE_FUNCTION, *WITHOUT_EFFECT, *VALUES, *CHANGING_THE_BASE, *ANOTHER_FUNCTION}
    assert {field.name for field in dataclasses.fields(LoraConfig)} == decided
    offered = [v for kind in get_args(get_type_hints(LoraConfig)["init_lora_weights"]) for v in get_args(kind)]
    named = {"pissa_niter_[number of iters]": "pissa_niter_2"}
    # PEFT takes lora_ga without naming it in the annotation.
    assert {named.get(v, v) for v in offered} | {"lora_ga", True, False} == {*TAKEN, *REFUSED}


def test_initialisations_that_change_the_base_are_refused_by_name(base, save):
    for init in REFUSED:
        if init in OF_A_NEEDED_PASS:
            folder = save()
            edit(folder, init_lora_weights=init)
        else:
            folder = save(init_lora_weights=init)
            loaded = copy.deepcopy(base)
            PeftModel.from_pretrained(loaded, str(folder))
            assert not is_unchanged(loaded, base), f"PEFT no longer changes the base for {init}"
        fields = json.loads((folder / "adapter_config.json").read_text())
        with pytest.raises(UserError, match=rf"^lora\.path: init_lora_weights={init} has changed the base") as error:
            check_fields(fields, folder, "lora.path")
        assert ("path_initial_model_for_weight_conversion" in str(error.value)) == (init != "loftq")
        assert "model.path" in str(error.value)
    for init in ("PiSSA", "OLoRA", "brand_new", 2, ["pissa"]):
        with pytest.raises(UserError, match=r"^k: init_lora_weights="):
            check_fields({"init_lora_weights": init}, "folder", "k")


def test_an_adapter_that_peft_has_converted_from_pissa_is_taken(base, tmp_path, roles_on):
    trained = copy.deepcopy(base)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = get_peft_model(trained, config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "untrained"))
    model.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    expected = score_sequences(model.eval(), [IDS], CPU)[0]
    model.save_pretrained(str(tmp_path / "new"), path_initial_model_for_weight_conversion=str(tmp_path / "untrained"))
    roles = roles_on(reference=tmp_path / "new")
    assert of_role(roles, REFERENCE) == pytest.approx(expected, abs=1e-4)
    assert is_unchanged(roles.backbone.model, base)


FUNCTIONS = [
    {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    {"layers_to_transform": [1], "layers_pattern": "layers"}, {"layers_to_transform": 0},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]}, {"target_modules": r".*layers\.0\..*_proj"},
    {"target_modules": ["q_proj", "lm_head"]},
]  # fmt: skip
IDLE = [
    {"eva_config": EvaConfig(), "init_lora_weights": "eva"}, {"lora_dropout": 0.5}, {"ensure_weight_tying": True},
    {"fan_in_fan_out": True}, {"task_type": None},
]  # fmt: skip


def test_the_fields_that_are_taken_mean_what_they_mean_to_peft(base, save, roles_on):
    """Initialisations that leave the base alone among them."""
    initialised = [{"init_lora_weights": init} for init in TAKEN]
    for keys in (*FUNCTIONS, *IDLE, *initialised):
        folder = save(**keys)
        if keys in IDLE:
            edit(folder, runtime_config={"ephemeral_gpu_offload": True}, revision="main", qalora_group_size=8)
        with torch.no_grad():
            theirs = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
            expected = score_sequences(theirs, [IDS], CPU)[0]
        assert expected != score_sequences(base, [IDS], CPU)[0]
        start = {POLICY: {"path": folder}, REFERENCE: {"reference": folder}}
        for role in (POLICY, REFERENCE) if keys in initialised else (REFERENCE,):
            roles = roles_on(**start[role])
            assert of_role(roles, role) == expected, (keys, role)
            assert is_unchanged(roles.backbone.model, base), (keys, role)


SOMETHING = {
    "bias": "lora_only", "layer_replication": [[0, 2], [1, 3]], "modules_to_save": ["lm_head"],
    "trainable_token_indices": {"embed_tokens": [1]}, "alora_invocation_tokens": [5, 6], "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4}, "megatron_config": {"a": 1}, "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2}, "use_qalora": True, "velora_config": {"num_groups": 64}, "peft_type": "ADALORA",
    "task_type": "SEQ_CLS", "a_field_of_a_newer_peft": 0, "enable_lora": [True, False],
}  # fmt: skip


def test_other_fields_are_refused_by_name_unless_they_say_nothing(save):
    assert {*CHANGING_THE_BASE, *ANOTHER_FUNCTION} < SOMETHING.keys()
    plain = json.loads((save() / "adapter_config.json").read_text())
    check_fields(plain, "folder", "k")
    for name, value in SOMETHING.items():
        with pytest.raises(UserError, match=rf"^k: .*({name}|of the kind ADALORA).*, got folder; \S"):
            check_fields(plain | {name: value}, "folder", "k")
        for neutral in (None, False, [], {}):
            check_fields(plain | {name: neutral}, "folder", "k")


def test_rank_alpha_and_targets_must_be_there_and_be_what_they_are():
    good = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
    check_shape(good, "folder", "k")
    check_shape(good | {"target_modules": ".*q_proj"}, "folder", "k")
    for name, bad in (
        *((name, None) for name in good),
        *(("r", value) for value in ("4", 0, -1, 4.0, True)),
        *(("lora_alpha", value) for value in ("8", [8], True)),
        *(("target_modules", value) for value in ([], "", [1], {"q_proj": 1}, "(")),
    ):
        with pytest.raises(UserError, match=rf"^k: adapter_config\.json has (no )?{name}"):
            check_shape(good | {name: bad}, "folder", "k")
