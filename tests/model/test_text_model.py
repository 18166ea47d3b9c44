"""The text model of a folder with a vision tower is trained alone, and its adapters are the folder's own class's."""

import json
import re
from dataclasses import replace

import model_folders
import pytest
import torch
import vision_folders
from model_folders import settings, with_noise
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationMixin, Qwen2VLConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlft.batch import score_sequences
from rlft.config.model import LoraSettings
from rlft.model.backbone import read_backbone, read_config, source
from rlft.model.roles import POLICY, REFERENCE, policy_alone
from rlft.model.text_model import INSIDE, causal_class, empty_model, load_model, names_of, own_class
from rlft.types import UserError

KINDS = ("qwen3_5", "gemma3", "mistral3", "llava")
IDS = [[10 + (7 * row + i) % 90 for i in range(12)] for row in range(2)]
LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear", path=None)
CPU = torch.device("cpu")


def by_own_class(folder, adapter):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
        assert not [n for n, _ in model.named_parameters() if "lora_" in n and "language_model" not in n]
    with torch.no_grad():
        return [score_sequences(model.eval(), [ids], CPU)[0] for ids in IDS]


def gap(a, b):
    return max(abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", slow_but("qwen3_5", KINDS))
def test_a_published_adapter_is_the_own_classs_and_is_read_back(kind, written, tmp_path):
    folder = model_folders.with_vision(tmp_path / kind, kind)
    backbone = read_backbone(settings(folder))
    assert not [name for name, _ in backbone.model.named_parameters() if "vision" in name or "visual" in name]
    roles = with_noise(policy_alone(backbone, LORA, token_budget=512, seed=0))
    published, scores = roles.publish(1), roles.score(IDS)
    roles.close()
    theirs = written(published)
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in published.weights)
    base = by_own_class(folder, None)
    # Both compute in float32, with other kernels; seen: 1e-5.
    assert gap(scores, by_own_class(folder, theirs)) < 1e-4
    assert gap(scores, base) > 0.1

    older = tmp_path / "older"  # as rlft has written it before: with the names of the trained model
    older.mkdir()
    names = names_of(backbone.model)
    save_file(names.all_inside(load_file(theirs / "adapter_model.safetensors")), older / "adapter_model.safetensors")
    fields = json.loads((theirs / "adapter_config.json").read_text())
    fields["target_modules"] = [names.inside(name) for name in fields["target_modules"]]
    (older / "adapter_config.json").write_text(json.dumps(fields))
    for path in (theirs, older):
        again = policy_alone(backbone, replace(LORA, path=str(path)), token_budget=512, seed=0, reference=str(path))
        for role in (POLICY, REFERENCE):
            with torch.no_grad(), again.using(role):
                assert again.score(IDS) == scores
        assert again.weights(POLICY).keys() == again.weights(REFERENCE).keys() == published.weights.keys()
        again.close()


def test_an_adapter_that_peft_has_saved_for_the_own_class_is_read(tmp_path):
    folder = model_folders.with_vision(tmp_path / "model", "qwen3_5")
    targets = r"model\.language_model\..*\.(q_proj|down_proj)"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    model.save_pretrained(str(tmp_path / "theirs"))
    backbone = read_backbone(settings(folder))
    roles = policy_alone(backbone, LORA, token_budget=512, seed=0, reference=str(tmp_path / "theirs"))
    with torch.no_grad(), roles.using(REFERENCE) as reference:
        found = [score_sequences(reference, [ids], CPU)[0] for ids in IDS]
    roles.close()
    expected = by_own_class(folder, tmp_path / "theirs")
    assert gap(found, expected) < 1e-4
    assert gap(expected, by_own_class(folder, None)) > 0.1


def test_a_text_model_without_a_class_of_its_own_is_refused_before_weights_are_read(tmp_path):
    Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"]).save_pretrained(tmp_path)
    refusal = rf"^model\.path: .* for a qwen2_vl_text, the text model of a qwen2_vl, got .*{re.escape(str(tmp_path))}"
    with pytest.raises(UserError, match=refusal):
        read_config(settings(tmp_path))


def test_a_model_that_is_not_inside_another_keeps_its_names(tmp_path):
    config = read_config(settings(model_folders.llama(tmp_path / "llama")))
    assert own_class(config) is None
    assert not names_of(empty_model(config, trust_remote_code=False)).prefixes


@pytest.mark.parametrize("kind", INSIDE)
def test_a_text_model_that_is_only_inside_another_gets_a_head(kind):
    text = AutoConfig.for_model(kind.removesuffix("_text")).get_text_config()
    assert type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING
    made = causal_class(text)
    assert made is causal_class(text)
    assert made.config_class is type(text)
    assert issubclass(made, GenerationMixin)


@pytest.mark.parametrize("kind", INSIDE)
def test_the_config_of_such_a_text_model_is_one_of_a_model_of_texts(kind, tmp_path):
    """A run asks for the shapes of the model that it trains, and may have saved it."""
    vision = kind.removesuffix("_text")
    config = read_config(settings(vision_folders.folder_of(tmp_path / "whole", vision)))
    inside = empty_model(config, trust_remote_code=False)
    alone = empty_model(inside.config, trust_remote_code=False)
    assert {n: p.shape for n, p in alone.named_parameters()} == {n: p.shape for n, p in inside.named_parameters()}
    alone.to_empty(device="cpu")
    for parameter in alone.parameters():
        parameter.data.normal_()
    alone.save_pretrained(tmp_path / "text")
    read = load_model(read_config(settings(tmp_path / "text")), source(settings(tmp_path / "text")))
    saved = dict(alone.named_parameters())
    assert all(torch.equal(p, saved[n]) for n, p in read.named_parameters())
