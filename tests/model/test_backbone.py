import shutil
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from in_one_test import each
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import nn
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rlft.model import roles as roles_module
from rlft.model.backbone import (
    BaseWeights,
    bit_sum,
    check_sentence,
    decoder_layers,
    fingerprint,
    ids_without_token,
    layer_weights,
    load_backbone,
    load_tokenizer,
    read_backbone,
    read_config,
    resolve_path,
    set_training_mode,
    silence_dropout,
    switched_modules,
)
from rlft.model.forward import choose
from rlft.model.kernels.attention import NAME
from rlft.model.roles import POLICY
from rlft.tokens.text import RunTokenizer, render, turn_ends
from rlft.types import UserError


@pytest.fixture
def saved(random_model, tmp_path, tiny_path):
    """Writes a random model to a folder, with the embedded tokenizer, and gives its path."""

    def save(kind, **keys):
        folder = tmp_path / kind
        random_model(kind, **keys).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_text((tiny_path / name).read_text())
        return str(folder)

    return save


def test_a_path_may_be_an_embedded_model_a_hub_id_or_a_folder_also_in_the_users_home(tiny_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert resolve_path("embedded:tiny-arithmetic") == str(tiny_path)
    assert resolve_path("org/model") == "org/model"
    assert resolve_path("~/model") == "/somewhere/model"
    known = ", ".join(f"embedded:tiny-{name}" for name in ("arithmetic", "caller", "chains", "shapes", "student"))
    with pytest.raises(UserError, match=rf"^model\.path: .*, got embedded:nope; use {known}, a folder"):
        resolve_path("embedded:nope")


def test_a_broken_config_or_tokenizer_is_refused_by_its_key(tmp_path, tiny_path, model_config):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match=r"^model\.path: the model cannot be read"):
        read_config(model_config(path=str(tmp_path)))
    shutil.copy(tiny_path / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"^model\.path: its tokenizer cannot be read"):
        load_tokenizer(model_config(path=str(tmp_path)))


def test_tokens_beyond_the_embedding_are_refused_unless_no_text_has_them(tiny_path, tmp_path, model_config):
    rows = AutoConfig.from_pretrained(tiny_path).vocab_size
    for named, token in (
        ("the end of a turn", AddedToken("<|im_end|>", special=True)),
        ("a word", AddedToken("plus", special=False)),
        ("a block", AddedToken("<plan>", special=True)),
        ("a pad", AddedToken("<pad>", special=True)),
    ):
        folder = shutil.copytree(tiny_path, tmp_path / named)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        fill = [AddedToken(f"<unused{i}>", special=True) for i in range(rows - len(tokenizer))]
        tokenizer.add_tokens([*fill, token, *([AddedToken("</plan>", special=True)] if named == "a block" else [])])
        if named == "the end of a turn":  # under an id beyond the embedding
            tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|end_of_it|>")
            tokenizer.add_tokens([AddedToken("<|end_of_it|>", special=True)])
        if named == "a pad":  # which no text has
            tokenizer.pad_token = "<pad>"
        tokenizer.save_pretrained(folder)
        if named == "a pad":
            assert len(load_tokenizer(model_config(path=str(folder)))) == rows + 1
            continue
        problem = rf"^model\.path: its embedding has {rows} rows, which lacks [12] of the tok"
        with pytest.raises(UserError, match=problem):
            load_tokenizer(model_config(path=str(folder)))


def test_a_tokenizer_that_loses_the_spaces_of_a_sentence_is_refused():
    """As one that is loaded by another class does, because its folder has no config.json of its model."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    for decoder, is_right in ((decoders.Fuse(), True), (decoders.Replace(" ", ""), False)):
        backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
        setattr(backend, "decoder", decoders.Sequence([decoder, decoders.Fuse()]))  # noqa: B010
        tokenizer = RunTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        if is_right:
            check_sentence(tokenizer, "here")
            continue
        refusal = r"^model\.path: its tokenizer reads 'the sum of .*' as 'thesumof.*, got here"
        with pytest.raises(UserError, match=refusal):
            check_sentence(tokenizer, "here")


def test_a_template_that_is_one_of_several_is_the_default_one(tiny_path, tmp_path, model_config):
    folder = shutil.copytree(tiny_path, tmp_path / "several")
    plain = load_tokenizer(model_config(path=str(folder)))
    asked = [{"role": "user", "content": "2 + 3?"}]
    usual = render(plain, asked, start=True)
    plain.own.chat_template = {"default": plain.chat_template, "rag": "nothing"}
    plain = replace(plain)  # which forgets what it has found out of another template
    assert render(plain, asked, start=True) == usual
    assert turn_ends(plain, "chat").ids == turn_ends(load_tokenizer(model_config()), "chat").ids
    rows = read_config(model_config()).get_text_config().vocab_size
    known = ids_without_token(plain, rows)
    assert known == ids_without_token(plain, len(plain)) | set(range(len(plain), rows))


def test_jobs_that_ask_for_the_same_base_share_it(model_config):
    shared = load_backbone(model_config())  # not the fixture's: a run of a test before may have let that one go
    assert load_backbone(model_config()) is shared
    assert load_backbone(model_config(dtype="bfloat16")) is not shared


def test_the_base_is_frozen_in_evaluation_mode_with_packed_attention(backbone):
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not any(m.training for m in backbone.model.modules())
    assert backbone.model.dtype == torch.float32
    assert choose(backbone.model).packed


@each("kind", ["llama", "granite", "gemma2", "gpt_oss"])
def test_models_of_every_kind_of_attention_are_loaded_with_ours_unless_the_user_names_one(kind, saved, model_config):
    for named in ("auto", "eager"):
        config = model_config(path=saved(kind), attn_implementation=named)
        model = load_backbone.__wrapped__(config).model
        assert model.config._attn_implementation == {"auto": NAME}.get(named, named)


@each(("kind", "matrices"), [("llama", 7), ("qwen3", 7), ("gpt2", 4), ("gemma2", 7)])
def test_the_layers_of_a_model_and_their_matrices_are_found(kind, matrices, random_model):
    """Queries, keys, values and outputs, and three of a gated MLP; GPT-2 has one for the first three, and two."""
    model = random_model(kind)
    layers = decoder_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    assert [len(layer_weights(layer)) for layer in layers] == [matrices] * len(layers)
    if kind == "llama":  # layers with weights in common are none to divide
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        assert decoder_layers(model) == []


def test_a_base_is_not_random_in_updates(saved, model_config):
    """Whether by a module, by a function with a number of the module, or by one that reads the config in each pass."""
    drops = {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    drops |= {"residual_dropout": 0.5, "embedding_dropout": 0.5, "hidden_dropout": 0.5, "router_jitter_noise": 0.5}
    for kind in ("llama", "gpt2", "starcoder2", "falcon", "mixtral"):
        model = load_backbone.__wrapped__(model_config(path=saved(kind, **drops))).model
        ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
        calm = model.eval()(input_ids=ids).logits
        set_training_mode(switched_modules(model), recomputed=True, dropout=True)
        assert torch.equal(model(input_ids=ids).logits, calm)


def test_dropout_is_set_to_zero_in_nested_configs_too():
    config = LlamaConfig(attention_dropout=0.25, hidden_size=32)
    nested = LlamaConfig(resid_pdrop=0.5, layerdrop=0.5, router_jitter_noise=0.01, rms_norm_eps=1e-6, drop=True)
    config.text_config = nested
    silence_dropout(config)
    assert (config.attention_dropout, config.hidden_size) == (0.0, 32)
    assert (nested.resid_pdrop, nested.layerdrop, nested.router_jitter_noise, nested.rms_norm_eps) == (0, 0, 0.01, 1e-6)
    assert nested.drop is True, "a switch is no probability"


def test_only_models_that_predict_from_what_stands_before_are_read(model_config, tmp_path):
    causal = {"bert": {"is_decoder": True}, "gpt_neox": {}, "mamba2": {}, "qwen3_5_text": {}, "gpt2": {}}
    causal = {kind: fields for kind, fields in causal.items() if kind in CONFIG_MAPPING_NAMES}
    refused = {
        "is an encoder, which also reads": ("bert", "roberta", "electra", "bert-generation", "roformer"),
        "is an encoder-decoder, whose decoder reads more": ("bart", "t5", "whisper", "m2m_100"),
    }
    for kind, fields in causal.items():
        AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path / f"causal_{kind}")
        assert read_config(model_config(path=str(tmp_path / f"causal_{kind}"))).model_type == kind
    for problem, kind in ((problem, kind) for problem, kinds in refused.items() for kind in kinds):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        with pytest.raises(UserError, match=f"^model.path: a {kind} {problem}"):
            read_config(model_config(path=str(tmp_path / kind)))
    for kind in ("modernbert", "distilbert", "vit"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        with pytest.raises(UserError, match=rf"^model\.path: transformers has no class .* for a {kind}, got "):
            read_config(model_config(path=str(tmp_path / kind)))


def test_the_fingerprint_tells_bases_apart_also_from_themselves_trained_on(saved, model_config):
    config = model_config(path=saved("llama"))
    before = fingerprint(config)
    assert len(before) == 16
    assert before == fingerprint(replace(config, dtype="bfloat16"))
    assert before != fingerprint(model_config(path=saved("qwen2")))
    [weights] = Path(config.path).glob("*.safetensors")
    tensors = load_file(weights)
    tensors[min(tensors)] += 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    assert fingerprint(config) != before


def test_one_changed_bit_of_any_element_changes_the_sum():
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


def test_the_sum_is_the_same_wherever_the_tensor_lies():
    tensor = torch.arange(40, dtype=torch.bfloat16)
    assert bit_sum(tensor[1:12]) == bit_sum(tensor[1:12].clone())
    matrix = tensor.view(5, 8).t()
    assert bit_sum(matrix) == bit_sum(matrix.contiguous())
    assert bit_sum(torch.zeros(0)) == 0
    assert bit_sum(torch.tensor(2.0)) == bit_sum(torch.tensor([2.0]))


def test_the_fingerprint_sees_written_and_replaced_parameters_also_inside_pefts_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    weights = BaseWeights(model)
    peft.LoraModel(model, peft.LoraConfig(target_modules=["0", "1"]), "default")
    base = model[1].base_layer
    base.weight.data.zero_()  # to which 1 is added, and taken away again, without a rounding
    before = weights.fingerprint()
    assert sorted(before) == ["0.bias", "0.weight", "1.weight"]

    def changed():
        return [name for name, value in weights.fingerprint().items() if value != before[name]]

    assert changed() == []
    base.weight.data[3, 2] += 1
    assert changed() == ["1.weight"]
    base.weight.data[3, 2] -= 1
    own, base.weight = base.weight, nn.Parameter(base.weight.detach().clone())
    assert changed() == ["1.weight"]
    base.weight = own
    assert changed() == []


def test_an_adapter_whose_loading_changes_the_base_is_refused_whatever_its_config_says(
    adapter, make_roles, model_config, monkeypatch
):
    folder, _ = adapter
    shared = load_backbone(model_config())
    backbone = read_backbone(model_config())

    def rewriting(fields, model):
        targets = fields["target_modules"]
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="olora")

    monkeypatch.setattr(roles_module, "folder_config", rewriting)
    with pytest.raises(UserError, match=r"^snapshot\.reference: .*as the reference has changed 28 weights") as error:
        make_roles(backbone=backbone, reference=folder)
    assert f"got {folder};" in str(error.value)
    assert not any("lora" in name for name, _ in backbone.model.named_parameters())
    assert load_backbone(model_config()) is not shared, "no other job gets what may be the changed base"


def test_a_weight_that_is_written_while_the_policy_starts_from_a_folder_is_found(
    adapter, make_roles, model_config, monkeypatch
):
    backbone = read_backbone(model_config())
    real = roles_module.load_tensors

    def also_writes(path, key):
        backbone.model.model.embed_tokens.weight.data[7, 3] += 1e-3
        return real(path, key)

    monkeypatch.setattr(roles_module, "load_tensors", also_writes)
    with pytest.raises(UserError, match=rf"^lora\.path: loading it as the {POLICY} has changed [12] weights of the ba"):
        make_roles(backbone=backbone, path=adapter[0])
