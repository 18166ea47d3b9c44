from __future__ import annotations

from transformers import AutoConfig

from rlft.model.activations import LayerSizes, layer_sizes

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_layers_have_the_sizes_that_config_json_gives_each_of_them() -> None:
    # 4 heads of 32 / 4 = 8 queries each, 2 heads of keys
    same = [LayerSizes(queries=32, keys=16, mlp=40)] * 2
    no_attention = [LayerSizes(queries=64, keys=0, mlp=128)] * 2
    wider = [LayerSizes(queries=64, keys=32, mlp=40)] * 2
    for model_type, keys, expected in (
        ("llama", SIZES, same),
        ("qwen3", SIZES | {"head_dim": 16}, wider),
        ("gemma3", {"text_config": SIZES | {"head_dim": 16}}, wider),
        ("qwen2_5_vl", {"text_config": SIZES}, same),
        # no width of an MLP: four hidden states; no heads of keys: as many as of queries
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, [LayerSizes(queries=32, keys=32, mlp=128)] * 2),
        ("mamba2", {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2}, no_attention),
    ):
        assert layer_sizes(AutoConfig.for_model(model_type, **keys)) == expected, model_type


def test_unlike_layers_have_sizes_of_their_own() -> None:
    config = AutoConfig.for_model("gemma3n_text", **SIZES | {"head_dim": 8, "intermediate_size": [40, 56]})
    assert [layer.mlp for layer in layer_sizes(config)] == [40, 56]
    config = AutoConfig.for_model(
        "gemma4_text", **SIZES | {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}
    )
    local = [kind == "sliding_attention" for kind in config.layer_types]
    assert set(local) == {True, False}
    assert [layer.queries for layer in layer_sizes(config)] == [4 * 8 if is_local else 4 * 16 for is_local in local]
