"""Every loaded network has all its tensors, or is refused by name, from the headers of its files.

The folders here have headers whose files have no numbers (holes), so that each case takes some milliseconds; what is
right is known by how a case is made: which tensor is left out, which is changed, and what it begins with.
"""

import json
import random
import re
import shutil
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_cases import slow
from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config, LlamaConfig
from transformers.utils.quantization_config import QuantizationMethod

from rlft.model.backbone import check_weights, read_backbone, read_config, source
from rlft.model.images import network_of_tower
from rlft.model.network_files import DEQUANTIZED, Network, check_files
from rlft.model.reward_model import check_classifier, load_classifier
from rlft.model.text_model import network_of
from rlft.types import UserError
from tests.helpers import model_folders
from tests.helpers.model_folders import settings
from tests.model.family_models import model_folder

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A new copy of a folder of this family; each is made once."""
    top, number = tmp_path_factory.mktemp("families"), iter(range(10**6))

    @cache
    def made(kind):
        if kind == "llama_untied":
            return model_folders.llama(top / kind)
        if kind in ("gemma3", "qwen3_5"):
            return model_folders.with_vision(top / kind, kind)
        return model_folder(kind, top / kind)

    def copied(kind):
        return Path(shutil.copytree(made(kind), top / f"{kind}-{next(number)}"))

    return copied


def shapes_of(folder):
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}


def write(file, shapes):
    """A whole safetensors file of these float32 tensors, whose numbers are a hole in it."""
    header, place = {}, 0
    for name, shape in shapes.items():
        end = place + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + place)


def refusal(check):
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def of_network(network):
    return refusal(lambda: check_files(network()))


def of_base(folder):
    return refusal(lambda: check_weights(settings(folder)))


def configure(folder, **fields):
    """Changes these fields of its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def named(said, name, words=""):
    """Whether this refusal names the tensor, or the stacked experts that it is of."""
    block = name.partition(".experts.")[0] + ".experts." if ".experts." in name else name
    return said is not None and re.sub(r"^((language_)?model\.)+", "", block) in said and words in said


# -- a base, its tower, its export -------------------------------------------------------------------------------------
FAMILIES = {"llama_untied": False, "gpt2": True, "qwen3_moe": False, "mamba": True, "gemma3": True, "qwen3_5": False}
"""{family: whether its output head is its embedding}."""
FEW = 6


def is_of_tower(name):
    return "vision" in name or "visual" in name or "multi_modal" in name


OTHERS = [kind for kind in FAMILIES if kind not in ("qwen3_moe", "gemma3")]


@pytest.mark.parametrize(
    ("kind", "how_many"),
    [("qwen3_moe", FEW), ("gemma3", FEW), *(slow(kind, FEW) for kind in OTHERS), *(slow(k, None) for k in FAMILIES)],
)
def test_a_tensor_that_is_missing_or_has_another_shape_is_refused_by_its_name(kind, how_many, folder_of):
    folder = folder_of(kind)
    shapes, config = shapes_of(folder), settings(folder)
    assert any("lm_head" in name for name in shapes) is not FAMILIES[kind]
    assert of_base(folder) is None
    read, where = read_config(config), source(config)
    whole = Network(loader=network_of(read, where).loader, config=read, source=where, key="as")
    names = sorted(shapes, key=lambda name: random.Random(name).random())[:how_many]
    if how_many is not None and kind in ("gemma3", "qwen3_5"):
        names += [name for name in sorted(shapes) if is_of_tower(name)][:FEW]
    for name in names:
        write(folder / WEIGHTS, {n: shape for n, shape in shapes.items() if n != name})
        of_export = of_network(lambda: whole)
        assert named(of_export, name), (name, of_export)
        if is_of_tower(name):
            assert of_base(folder) is None
            assert named(of_network(lambda: network_of_tower(read, where)), name.rpartition("model.")[2])
            continue
        assert named(of_base(folder), name), name
        if kind in ("gemma3", "qwen3_5"):
            assert of_network(lambda: network_of_tower(read, where)) is None
        write(folder / WEIGHTS, {**shapes, name: (shapes[name][0] + 1, *shapes[name][1:])})
        assert named(of_base(folder), name), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_of_a_head_and_an_embedding_that_are_one_either_is_enough(kind, folder_of):
    folder = folder_of(kind)
    configure(folder, tie_word_embeddings=True)
    shapes = {name: shape for name, shape in shapes_of(folder).items() if "lm_head" not in name}
    [embedding] = [name for name in shapes if name.endswith(("wte.weight", "embed_tokens.weight"))]
    shape, head = shapes.pop(embedding), "lm_head.weight"
    for names in ([embedding], [head], [embedding, head], []):
        write(folder / WEIGHTS, shapes | dict.fromkeys(names, shape))
        assert (of_base(folder) is None) is bool(names), names


def test_an_untied_head_that_is_missing_is_tied_by_the_remedy(folder_of):
    folder = folder_of("llama_untied")
    write(folder / WEIGHTS, {name: shape for name, shape in shapes_of(folder).items() if name != "lm_head.weight"})
    assert "set tie_word_embeddings to true in config.json" in str(of_base(folder))
    configure(folder, tie_word_embeddings=True)
    assert of_base(folder) is None


# -- tensors that nobody reads -----------------------------------------------------------------------------------------
ADDED = {
    "model.layers.1.self_attn.{}_proj.bias": ("qkvo", (128,)),
    "model.layers.1.mlp.{}_proj.weight_scale": (("gate", "up", "down"), (1,)),
    "model.layers.0.self_attn.{}_norm.weight": ("qk", (32,)), "model.layers.{}.input_layernorm.weight": ("27", (64,)),
    "model.layers.1.self_attn.{}_proj.lora_A.weight": ("qkvo", (4, 64)),
    "model.layers.1.self_attn.{}_proj.lora_B.default.weight": ("qkvo", (64, 4)),
    "model.layers.0.{}_norm.weight": (("pre", "post"), (64,)),
}  # fmt: skip
"""{names of tensors that say that the network is another one: what stands in them, their shape}."""
HARMLESS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": (16,), "model.layers.1.self_attn.masked_bias": (),
    "model.layers.1.self_attn.bias": (1, 1, 512, 512), "v_head.summary.weight": (1, 64), "score.weight": (1, 64),
    "mtp.layers.0.mlp.up_proj.weight": (96, 64), "model.mtp.norm.weight": (64,),
}  # fmt: skip
"""Buffers of older releases, heads for other tasks, and layers that predict later tokens."""


def test_a_tensor_that_says_that_the_network_is_another_one_is_refused(folder_of):
    folder = folder_of("llama_untied")
    shapes = shapes_of(folder)
    for pattern, (values, shape) in ADDED.items():
        for name in map(pattern.format, values):
            write(folder / WEIGHTS, {**shapes, name: shape})
            said = of_base(folder)
            assert named(said, name), (name, said)
            assert ("merge_and_unload" in str(said)) is (".lora_" in name)
    write(folder / WEIGHTS, {**shapes, **HARMLESS})
    assert of_base(folder) is None


def test_layers_that_predict_later_tokens_may_follow_the_last_one(folder_of):
    folder = folder_of("llama_untied")
    write(folder / WEIGHTS, {**shapes_of(folder), "model.layers.2.eh_proj.weight": (64, 128)})
    assert named(of_base(folder), "model.layers.2.eh_proj.weight")
    configure(folder, num_nextn_predict_layers=1)
    assert of_base(folder) is None


# -- names that wrappers give ------------------------------------------------------------------------------------------
PREFIXES = ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "_orig_mod.module.", "pretrained_model.",
            "_fsdp_wrapped_module.", "policy.", "actor.module."]  # fmt: skip
INSIDE = [("layers.0.", "layers.0._orig_mod."), ("mlp.", "_fsdp_wrapped_module.mlp._checkpoint_wrapped_module."),
          ("layers.1.", "_orig_mod.layers._orig_mod.1._checkpoint_wrapped_module.")]  # fmt: skip


WRAPPED = ("llama_untied", "gpt2", "qwen3_moe", "gemma3")


@pytest.mark.parametrize(
    ("kind", "how_many"), [("gemma3", 4), *(slow(kind, 4) for kind in WRAPPED[:3]), *(slow(k, None) for k in WRAPPED)]
)
def test_names_that_begin_with_a_wrappers_are_understood(kind, how_many, folder_of):
    folder = folder_of(kind)
    shapes = shapes_of(folder)
    without = min(name for name in shapes if name.endswith(("norm.weight", "ln_1.weight")))
    ways = list(product(PREFIXES, [("", ""), *INSIDE]))
    for prefix, (old, new) in random.Random(kind).sample(ways, how_many or len(ways)):
        wrapped = {name: prefix + (name.replace(old, new, 1) if old else name) for name in shapes}
        write(folder / WEIGHTS, {wrapped[name]: shape for name, shape in shapes.items()})
        assert of_base(folder) is None, (prefix, new)
        write(folder / WEIGHTS, {wrapped[name]: shape for name, shape in shapes.items() if name != without})
        assert named(of_base(folder), without, "lack"), (prefix, new)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_base_with_a_wrappers_names_is_the_same_and_is_saved_without_them(suffix, folder_of, tmp_path):
    folder = folder_of("llama_untied")
    weights = load_file(folder / WEIGHTS)
    wrapped = {
        "module._orig_mod." + n.replace("mlp.", "_checkpoint_wrapped_module.mlp."): t for n, t in weights.items()
    }
    if suffix == "bin":
        (folder / WEIGHTS).unlink()
        torch.save(wrapped, folder / "pytorch_model.bin")
    else:
        save_file(wrapped, folder / WEIGHTS)
    model = read_backbone(settings(folder)).model
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / WEIGHTS)
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_two_models_in_one_file_are_refused_by_what_their_names_begin_with(folder_of):
    folder = folder_of("llama_untied")
    shapes = shapes_of(folder)
    for first, second in (("student.", "teacher."), ("module.", "ema."), ("a.b.", "a.c.")):
        write(folder / WEIGHTS, {prefix + name: s for name, s in shapes.items() for prefix in (first, second)})
        assert f"2 times: {min(first, second)}, {max(first, second)}" in str(of_base(folder))
    write(folder / WEIGHTS, {prefix + name: s for name, s in shapes.items() for prefix in ("", "_orig_mod.")})
    assert "one tensor twice, as _orig_mod." in str(of_base(folder))


def test_another_parts_tensor_does_not_stand_in_for_one_that_is_missing(folder_of):
    folder = folder_of("llama_untied")
    shapes = shapes_of(folder)
    for name in ("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        write(folder / WEIGHTS, {(f"mtp.{n}" if n == name else n): shape for n, shape in shapes.items()})
        assert named(of_base(folder), name, "lack")


# -- files that are not whole ------------------------------------------------------------------------------------------
def sharded(folder, suffix, size="100KB"):
    """The shards of this folder, written as transformers does, or as torch did."""
    model = read_backbone(settings(folder)).model
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size=size)
    shards = sorted(folder.glob("model-*.safetensors"))
    if suffix == "safetensors":
        return shards
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model.safetensors.index.json").unlink()
    for shard in shards:
        torch.save(load_file(shard), folder / shard.name.replace(".safetensors", ".bin"))
        shard.unlink()
    places = {name: place.replace(".safetensors", ".bin") for name, place in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index | {"weight_map": places}))
    return sorted(folder.glob("model-*.bin"))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_that_is_cut_off_anywhere_is_refused_by_its_name(suffix, folder_of):
    folder, chance = folder_of("llama_untied"), random.Random(suffix)
    shards = sharded(folder, suffix)
    assert len(shards) > 3
    assert of_base(folder) is None
    for shard in (shards[0], shards[-1]):
        content = shard.read_bytes()
        for length in {0, 1, 7, 8, 9, len(content) - 1, *(chance.randrange(len(content)) for _ in range(3))}:
            shard.write_bytes(content[:length])
            assert f"{shard.name} " in str(of_base(folder)), length
        shard.write_bytes(content)
    assert of_base(folder) is None


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_that_is_not_of_these_shards_is_refused(suffix, folder_of):
    folder = folder_of("llama_untied")
    shards = sharded(folder, suffix)
    [file] = folder.glob("*.index.json")
    index = json.loads(file.read_text())
    places = index["weight_map"]

    def said(weight_map):
        file.write_text(json.dumps(index | {"weight_map": weight_map}))
        return str(of_base(folder))

    for shard in shards:
        without = {name: place for name, place in places.items() if place != shard.name}
        assert named(said(without), min(places.keys() - without.keys()), "lack")
        moved = shard.rename(folder / "elsewhere")
        assert f"names {shard.name}, which is not there" in said(places)
        moved.rename(shard)
    assert "says that model.more is in" in said(places | {"model.more": shards[0].name})
    assert "index.json cannot be read" in said([])
    assert said(places) == "None"
    file.unlink()
    assert of_base(folder) is None  # a plan needs none
    assert "neither model.safetensors nor pytorch_model.bin" in str(refusal(partial(read_backbone, settings(folder))))


# -- quantised weights -------------------------------------------------------------------------------------------------
def test_weights_that_are_quantised_are_refused_by_their_method(folder_of):
    folder = folder_of("llama_untied")
    methods = sorted({method.value for method in QuantizationMethod} - set(DEQUANTIZED))
    assert len(methods) > 20
    for method in methods:
        configure(folder, quantization_config={"quant_method": method})
        words = f"model.path: its weights are quantised (quantization_config in its config.json: {method})"
        for check in (check_weights, read_backbone):
            assert str(refusal(partial(check, settings(folder)))).startswith(words)


def test_an_fp8_base_becomes_what_it_was_rounded_from_and_lacks_nothing(folder_of):
    folder = folder_of("llama_untied")
    weights, rounded = load_file(folder / WEIGHTS), {}
    for name, weight in weights.items():
        rounded[name] = weight
        if "proj" in name:
            scale = weight.abs().amax() / 448
            rounded[name] = (weight / scale).to(torch.float8_e4m3fn)
            rounded[f"{name}_scale_inv"] = scale.repeat(*(-(-size // 32) for size in weight.shape))
    save_file(rounded, folder / WEIGHTS)
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    configure(folder, quantization_config=fp8)
    assert of_base(folder) is None
    model = read_backbone(settings(folder)).model
    # e4m3 has 3 bits behind the first: a relative error of at most 2^-4, and 2^-10 of the scale's 448 where it is small
    for name, weight in model.named_parameters():
        bound = weights[name].abs() * 2**-4 + weights[name].abs().amax() * 2**-9 / 448
        assert ((weight - weights[name]).abs() <= bound * 1.01).all(), name
    write(folder / WEIGHTS, {n: tuple(t.shape) for n, t in rounded.items() if n != "model.layers.0.mlp.up_proj.weight"})
    assert named(of_base(folder), "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_quantised_numbers_without_a_config_that_says_so_are_refused(suffix, folder_of):
    """Someone has removed quantization_config, or renamed the tensors: the numbers would be taken as they are."""
    folder = folder_of("llama_untied")
    weights = load_file(folder / WEIGHTS)
    matrices = sorted(name for name, weight in weights.items() if weight.dim() > 1)
    for name, dtype in product(matrices[:4], (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64)):
        changed = {**weights, name: weights[name].to(dtype)}
        (folder / WEIGHTS).unlink(missing_ok=True)
        if suffix == "bin":
            torch.save(changed, folder / "pytorch_model.bin")
        else:
            save_file(changed, folder / WEIGHTS)
        assert named(of_base(folder), name, "quantised"), (name, dtype)


def test_a_models_tables_of_ids_are_no_quantised_numbers(tmp_path):
    """Such as DeepSeek-V4's of the experts of each token."""
    folder = model_folder("deepseek_v4", tmp_path)
    assert any(weight.dtype is torch.int64 and weight.dim() > 1 for weight in load_file(folder / WEIGHTS).values())
    refusal = of_base(folder)
    assert refusal.startswith("model.path: with a deepseek_v4, log-probs are not those of transformers' model"), refusal


# -- classifiers, and numbers ------------------------------------------------------------------------------------------
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
ONE_SCORE = {"num_labels": 1}
CLASSIFIERS = [
    LlamaConfig(**SMALL, intermediate_size=48, pad_token_id=0, **ONE_SCORE),
    slow(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, pad_token_id=0, **ONE_SCORE)),
    slow(BertConfig(**SMALL, intermediate_size=48, **ONE_SCORE)),
]


@pytest.mark.parametrize("config", CLASSIFIERS, ids=lambda config: config.model_type)
def test_a_reward_model_without_any_one_of_its_tensors_is_refused_by_its_name(config, tmp_path):
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    shapes, key = shapes_of(tmp_path), "reward.taste.path"
    assert refusal(lambda: check_classifier(str(tmp_path), key)) is None
    for name in shapes:
        write(tmp_path / WEIGHTS, {n: shape for n, shape in shapes.items() if n != name})
        said = refusal(lambda: check_classifier(str(tmp_path), key))
        assert named(said, name)
        assert str(said).startswith(f"{key}: its files lack {name}")


def test_a_number_that_is_not_finite_is_named_by_its_tensor(folder_of, tmp_path):
    folder = folder_of("llama_untied")
    weights = load_file(folder / WEIGHTS)
    for name in (min(weights), "model.norm.weight", "lm_head.weight"):
        for value in (torch.nan, torch.inf, -torch.inf):
            broken = weights[name].clone()
            broken.view(-1)[-1] = value
            save_file({**weights, name: broken}, folder / WEIGHTS)
            said = str(refusal(partial(read_backbone, settings(folder))))
            assert said.startswith(f"model.path: its tensor {name} holds NaN or infinity")
    classifier = model_folders.classifier_folder(tmp_path / "reward")
    weights = load_file(classifier / WEIGHTS)
    weights["score.weight"][0, 0] = torch.nan
    save_file(weights, classifier / WEIGHTS, metadata={"format": "pt"})
    load = partial(load_classifier, str(classifier), "reward.taste.path", torch.device("cpu"), torch.float32)
    assert str(refusal(load)).startswith("reward.taste.path: its tensor score.weight holds NaN or infinity")
