"""What a forward keeps for its backward: counted from the config, and found in the autograd graph."""

from dataclasses import replace

import attention_families
import pytest
import torch
from in_one_test import each
from slow_cases import slow, slow_but
from transformers import AutoConfig

from rlft.config.model import KernelChoice
from rlft.model.activations import (
    AdapterLayers,
    FlashRows,
    LayerModules,
    LayerSizes,
    activation_bytes,
    is_checkpointed,
    layer_modules,
    layer_sizes,
    set_checkpointing,
)
from rlft.model.backbone import decoder_layers, load_backbone
from rlft.model.critic import ScalarHead
from rlft.model.text_model import empty_model

ROWS, PROMPT, COMPLETION = 16, 20, 60
TOKENS = {True: ROWS * (PROMPT + COMPLETION), False: 4 * PROMPT + ROWS * COMPLETION}
"""{plain: tokens of a forward}: padded rows hold each prompt once a row, packed ones once a group of four."""


def kept_bytes(forward, weights):
    """Of all tensors with a row for each token that the forward keeps for its backward, each storage once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() % (PROMPT + COMPLETION) == 0:
            storages[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert forward().requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("choice", KernelChoice)
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("use_dora", slow_but(False, [False, True]))
@pytest.mark.parametrize("dropout", slow_but(0.1, [0.0, 0.1]))
def test_the_count_is_what_the_forward_keeps(choice, dtype, use_dora, dropout, make_roles, make_batch, model_config):
    plain = choice is KernelChoice.plain
    backbone = load_backbone.__wrapped__(model_config(kernels=choice, dtype=dtype))
    roles = make_roles(backbone=backbone, use_dora=use_dora, dropout=dropout)
    roles.model.train()
    dice = torch.Generator().manual_seed(0)
    completions = torch.randint(1, 200, (ROWS, COMPLETION), generator=dice).tolist()
    batch = make_batch([(row // 4, [row // 4 + 1] * PROMPT, ids) for row, ids in enumerate(completions)])
    assert roles.forward.packed != plain
    weights = {p.untyped_storage().data_ptr() for p in roles.model.parameters()}
    # A plain forward's logits, which are of every token, are counted elsewhere.
    head = ScalarHead(128, roles.model.device, torch.float32)
    kept = kept_bytes(lambda: roles.forward.values(batch, head), weights)
    shapes = {name: tuple(tensor.shape) for name, tensor in roles.weights("policy").items()}
    layers = AdapterLayers.of(shapes, dropout=dropout > 0, dora=use_dora)
    itemsize = backbone.model.dtype.itemsize
    adapter = layers.bytes_of_a_token(itemsize, "cpu", plain=plain)
    is_fused = backbone.kernels.decision.fused_layers and layers.serves_fused(plain=plain)
    how = {"plain": plain, "is_fused": is_fused, "adapter": adapter}
    counted = activation_bytes(backbone.model.config, TOKENS[plain], itemsize, **how)
    assert counted == pytest.approx(kept, rel=0.05)


def test_layers_that_read_the_same_input_share_it_where_nothing_is_dropped():
    shapes = {}
    for name, (rows, columns) in {"attn.q": (8, 8), "attn.k": (8, 4), "mlp.down": (24, 8)}.items():
        shapes[f"layers.0.{name}.lora_A.weight"] = (2, rows)
        shapes[f"layers.0.{name}.lora_B.weight"] = (columns, 2)
    layers = AdapterLayers.of(shapes, dropout=True, dora=True)
    assert (layers.inputs, layers.shared_inputs, layers.outputs) == (8 + 8 + 24, 8 + 24, 8 + 4 + 8)
    assert layers.bytes_of_a_norm(4) == 4 * (24 * 24 + 3 * 24 * 8)
    assert layers.bytes_of_a_norm(2) == 4 * (24 * 24 + 4 * 24 * 8)
    # On a GPU dropout keeps a byte of each input, on a CPU its noise in float32.
    on = {device: layers.bytes_of_a_token(2, device, plain=True) for device in ("cpu", "cuda")}
    assert on["cpu"] - on["cuda"] == 3 * (8 + 8 + 24)
    low = AdapterLayers.of(shapes, dropout=False, dora=False).bytes_of_a_token(2, "cpu", plain=False)
    assert low == 2 * 3 * 2, "three ranks of 2, in the dtype of the base"


def test_a_model_says_whether_it_is_checkpointed(model_config, recwarn):
    model = load_backbone.__wrapped__(model_config()).model
    found = []
    for on in (True, False):
        set_checkpointing(model, on)
        found.append(is_checkpointed(model))
    assert found == [True, False]
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_layers_have_the_sizes_that_config_json_gives_each_of_them():
    # 4 heads of 32 / 4 = 8 queries each, 2 heads of keys
    same = [LayerSizes(queries=32, keys=16, mlp=40, heads=4)] * 2
    no_attention = [LayerSizes(queries=64, keys=0, mlp=128, state=32 * 46)] * 2
    wider = [LayerSizes(queries=64, keys=32, mlp=40, heads=4)] * 2
    for model_type, keys, expected in (
        ("llama", SIZES, same),
        ("qwen3", SIZES | {"head_dim": 16}, wider),
        ("gemma3", {"text_config": SIZES | {"head_dim": 16}}, wider),
        ("qwen2_5_vl", {"text_config": SIZES}, same),
        # no width of an MLP: four hidden states; no heads of keys: as many as of queries
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, [LayerSizes(queries=32, keys=32, mlp=128, heads=4)] * 2),
        ("mamba2", {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2}, no_attention),
    ):
        assert layer_sizes(AutoConfig.for_model(model_type, **keys)) == expected, model_type


def test_what_flash_attentions_backward_makes_of_a_row():
    """12 heads of 128, 2 of keys, hidden size 1000, a prompt of 100 tokens with two completions of 450."""
    size = LayerSizes(queries=1536, keys=256, mlp=1, heads=12)
    row = FlashRows(tokens=1000, predicted=900, prompts=1, completions=2)
    # Completions over their prompt: 11 splits for 12 heads, and 33 for the 4 heads of one of three ranks.
    of_prompts = 4 * (900 + 128) * 12 * (11 * 128 + 1) + 2 * 2 * 100 * 1536 + 2 * (900 * 1536 + 2 * 100 * 256)
    assert size.flash_gradients(1000, row, 1, 132) == 2 * 1000 * (1000 + 2 * 1536 + 2 * 256) + of_prompts
    of_prompts = 4 * (900 + 128) * 4 * (33 * 128 + 1) + 2 * 2 * 100 * 512 + 2 * (900 * 512 + 2 * 100 * 128)
    ranks = replace(size, keys=384)  # a head of keys for each rank
    assert ranks.flash_gradients(1000, row, 3, 132) == 2 * 1000 * (333 + 2 * 512 + 2 * 128) + of_prompts
    for other in (LayerSizes(queries=1024, keys=1024, mlp=1, heads=2), LayerSizes(queries=60, keys=60, mlp=1, heads=3)):
        assert other.flash_gradients(1000, row, 1, 132) == 0, "heads of 512, and of 20, are not flash's"


def test_unlike_layers_have_sizes_of_their_own():
    config = AutoConfig.for_model("gemma3n_text", **SIZES | {"head_dim": 8, "intermediate_size": [40, 56]})
    assert [layer.mlp for layer in layer_sizes(config)] == [40, 56]
    sizes = SIZES | {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}
    config = AutoConfig.for_model("gemma4_text", **sizes)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    assert set(local) == {True, False}
    assert [layer.queries for layer in layer_sizes(config)] == [4 * 8 if is_local else 4 * 16 for is_local in local]


@each(("kind", "fields", "expected"), [
    ("qwen2", {}, LayerModules()),
    ("qwen3", {}, LayerModules(kept_twice="kq")),
    ("gemma", {}, LayerModules(gate="other")),
    ("gemma2", {}, LayerModules(norms=4, gate="other")),
    ("gemma3_text", {}, LayerModules(norms=4, kept_twice="kq", gate="other")),
    ("olmo2", {}, LayerModules(kept_twice="kq")),
    ("phi3", {}, LayerModules(kept_twice="kq", gate="other")),
    ("starcoder2", {}, LayerModules(gate="none")),
    ("gpt2", {}, LayerModules(gate="none", activation=5)),
    ("phi", {}, LayerModules(gate="none", activation=5)),  # a formula in single operations
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, LayerModules(gate="none", activation=1)),  # its result
    ("gpt_oss", attention_families.EXPERTS, LayerModules()),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, LayerModules()),
])  # fmt: skip
def test_what_layers_consist_of_is_seen_in_their_modules(kind, fields, expected):
    config = AutoConfig.for_model(kind, **attention_families.SIZES | fields)
    assert layer_modules(decoder_layers(empty_model(config, trust_remote_code=False))) == expected
