"""The last layer on predicting positions: the same log-probs and gradients, fewer rows; other layers are left alone."""

from __future__ import annotations

import pytest
import torch

from rlft.model import fused, last_layer
from rlft.model.forward import packed_forward
from rlft.model.packing import pack

SERVED = {"llama": 1e-12, "llama_one_kv_head": 1e-12, "qwen2": 1e-12, "qwen3": 1e-12, "mistral": 1e-12, "gemma": 1e-5}
"""How near: Gemma's norms are in float32 whatever the model is."""


def weighted(logprobs):
    """A loss in which every token has its own weight, so that no error can cancel another."""
    dice = torch.Generator().manual_seed(3)
    return (torch.randn(logprobs.shape, generator=dice, dtype=torch.float64) * logprobs).sum()


def results(model, batch, parameters):
    """Log-probs and gradients of the packed forward, which tests/model/test_forward.py holds to rows run one by one."""
    outputs = packed_forward(model, batch, 1.0, False)
    return outputs.logprobs.detach(), torch.autograd.grad(weighted(outputs.logprobs), parameters)


@pytest.mark.parametrize(("kind", "tolerance"), SERVED.items())
def test_log_probs_and_gradients_are_those_of_all_layers_on_all_positions(
    kind, tolerance, random_model, with_lora, awkward_batch
):
    whole, narrowed = (random_model(kind, dtype=torch.float64) for _ in range(2))
    for model in (whole, narrowed):
        fused.install(model)
    last_layer.install(narrowed)
    assert last_layer.is_installed(narrowed)
    assert not last_layer.is_installed(whole)
    expected, found = (results(model, awkward_batch, with_lora(model)) for model in (whole, narrowed))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_its_mlp_sees_the_predicting_positions_alone(random_model, awkward_batch):
    model = random_model("llama")
    last_layer.install(model)
    rows = []
    for layer in model.base_model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    packed_forward(model, awkward_batch, 1.0, False)
    tokens, predicting = pack(awkward_batch).num_tokens, len(pack(awkward_batch).predictor)
    assert predicting < tokens
    assert rows == [tokens, tokens, predicting]


@pytest.mark.parametrize("kind", ["granite", "gemma2_full", "gpt_oss", "gpt2", "falcon"])
def test_layers_that_do_more_are_left_as_they_are(kind, random_model):
    model = random_model(kind)
    last_layer.install(model)
    assert not last_layer.is_installed(model)


def test_without_a_packed_row_the_layer_is_its_own(random_model):
    model, ids = random_model("qwen2"), torch.tensor([[3, 17, 5, 99]])
    expected = model(input_ids=ids).logits
    last_layer.install(model)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_with_gradient_checkpointing_it_is_the_same(random_model, with_lora, awkward_batch):
    model = random_model("llama", dtype=torch.float64)
    fused.install(model)
    last_layer.install(model)
    parameters = with_lora(model)
    expected = results(model, awkward_batch, parameters)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    model.train()
    torch.testing.assert_close(results(model, awkward_batch, parameters), expected, rtol=1e-12, atol=1e-12)
