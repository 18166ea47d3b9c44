"""The export of a folder with a vision tower is that folder with other weights in its text model: nothing is lost."""

import json
import shutil
from dataclasses import replace

import model_folders
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from rlft.batch import score_sequences
from rlft.commands.export.command import export
from rlft.commands.export.model_card import prepare
from rlft.model.backbone import read_backbone
from rlft.model.full_weights import WholeModel
from rlft.model.text_model import names_of
from rlft.runs import checkpoint, run_folder

IDS = [10 + (7 * i) % 90 for i in range(12)]
CPU = torch.device("cpu")
UNUSED = "mtp.fc.weight"
"""Qwen3.5's layers for predicting several tokens, which transformers leaves out."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = model_folders.with_vision(tmp_path_factory.mktemp("base") / "qwen3_5", "qwen3_5")
    tensors = {**load_file(folder / "model.safetensors"), UNUSED: torch.randn(4, 8)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    return folder


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def exported(place, out, kind):
    said = []
    return export(prepare(place, str(out), kind, None, said.append), said.append), said


def scored(folder, adapter=None):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return score_sequences(model.eval(), [IDS], CPU)[0]


def check_whole(out, base):
    """The same names as the base, and the same bits outside the text model's matrices."""
    found, own = tensors_of(out), tensors_of(base)
    assert found.keys() == own.keys()
    changed = {name for name in own if not torch.equal(found[name], own[name])}
    assert changed
    assert all(name.startswith("model.language_model.layers.") for name in changed)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == own.keys()
    assert all(name in load_file(out / file) for name, file in index.items())
    for name, keys in (("preprocessor_config.json", ["patch_size"]), ("config.json", ["architectures", "model_type"])):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (out, base))
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]
    card = (out / "README.md").read_text()
    assert "model = Qwen3_5ForConditionalGeneration.from_pretrained(base" in card
    assert "from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration" in card


def test_a_policy_is_merged_into_the_whole_folder_and_its_adapter_fits_the_own_class(
    base, make_roles, model_config, save_run, tmp_path
):
    backbone = read_backbone(model_config(path=str(base)))
    roles = make_roles(noise=0.1, backbone=backbone)
    weights, config, expected = roles.weights("policy"), roles.adapter_config(), roles.score([IDS])[0]
    assert max(abs(a - b) for a, b in zip(expected, scored(base), strict=True)) > 0.1
    names = names_of(backbone.model)
    older = {**config, "target_modules": [names.inside(name) for name in config["target_modules"]]}
    for name, saved, fields in (("run", weights, config), ("older", names.all_inside(weights), older)):
        place = save_run(f"model.path={base}", adapters={"policy": saved}, config=fields, name=name)
        out, said = exported(place, tmp_path / f"{name}_model", "model")
        assert said == []
        check_whole(out, base)
        assert scored(out) == pytest.approx(expected, abs=1e-4)  # W + B A is added before or after the product
        adapter, _ = exported(place, tmp_path / f"{name}_adapter", "adapter")
        assert scored(base, adapter) == pytest.approx(expected, abs=1e-4)


def test_a_text_model_that_was_trained_whole_is_put_back_into_its_folder(base, model_config, save_run, tmp_path):
    model = WholeModel(read_backbone(model_config(path=str(base))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.mul_(-1)
    place = save_run(f"model.path={base}", adapters={"policy": {}}, config={})
    [folder] = checkpoint.finished(run_folder.checkpoints(place.run))
    shutil.rmtree(folder / "policy")
    model.write(folder / "model")
    again = WholeModel(read_backbone(model_config(path=str(base))))
    again.restore_role(folder / "model")
    assert again.score([IDS]) == model.score([IDS])
    checkpoint._write_manifest(folder)
    out, said = exported(replace(place, config={**place.config, "lora": None}), tmp_path / "out", "model")
    assert said == []
    check_whole(out, base)
    assert scored(out) == pytest.approx(model.score([IDS])[0], abs=1e-4)


def test_a_tensor_that_no_class_is_said_to_leave_out_is_told(make_roles, model_config, save_run, tmp_path):
    folder = model_folders.llama(tmp_path / "llama")
    tensors = {**load_file(folder / "model.safetensors"), "extra.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    roles = make_roles(noise=0.1, backbone=read_backbone(model_config(path=str(folder))))
    saved = {"adapters": {"policy": roles.weights("policy")}, "config": roles.adapter_config()}
    _, said = exported(save_run(f"model.path={folder}", **saved), tmp_path / "out", "model")
    assert "left out, as the class of the export does not read it: extra.weight (of 1 such)" in said
