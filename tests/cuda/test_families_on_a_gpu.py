"""Packed rows and decoding of models of many kinds on a GPU, against the same models' own eager rows on a CPU."""

import attention_families
import hybrid_models
import pytest
import torch

from rlft.batch import to_device
from rlft.config.model import KernelChoice
from rlft.model.backbone import Backbone
from rlft.model.forward import choose, open_prefix_cache, padded_forward
from rlft.model.kernels import recurrent, selection

HYBRID = ("bamba", "lfm2", "mamba2", "olmo_hybrid", "qwen3_5_text", "qwen3_next")
SOFTMAX = {**attention_families.QUICK, "qwen2": {}, "olmoe": attention_families.EXPERTS}
KINDS = (*SOFTMAX, *HYBRID)
PROMPTS = [[3, 17, 5, 99, 42, 8, 23, 51, 64, 12, 7, 31], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72, 73, 74, 75]], [[61, 80, 81, 82, 83, 84], [12, 13, 14, 15, 16, 17]]]


def model_of(kind):
    """In which all experts are chosen, since the roundings of 16 bits may change a choice."""
    fields = hybrid_models.HYBRIDS[kind] if kind in HYBRID else SOFTMAX[kind]
    experts = {"num_experts_per_tok": 4} if "num_experts_per_tok" in fields else {}
    if kind in HYBRID:
        return hybrid_models.random_model(kind, **experts)
    return attention_families.random_model(kind, fields | experts)


@pytest.fixture
def batch(make_batch):
    several = [[*rows, rows[0][:1]] for rows in COMPLETIONS]
    return make_batch([(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in several[u]])


def pass_of(model, batch, choice):
    """(log-probs, the embedding's gradient, log-probs of decoding if packed), in float64 on a CPU."""
    recurrent.install_functions(model)
    weights = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1)).to(model.device)
    embedding = model.get_input_embeddings().weight.requires_grad_()
    if choice is KernelChoice.plain:
        logprobs = padded_forward(model, batch, 1.0, False).logprobs
    else:
        forward = choose(model, selection.install(model, choice, own_attention=True))
        assert forward.packed, forward.reason
        logprobs = forward(batch, 1.0).logprobs
    [gradient] = torch.autograd.grad((weights * logprobs).sum(), embedding)
    decoded = None
    if choice is not KernelChoice.plain:
        rows = torch.tensor([own for group in COMPLETIONS for own in group], device=model.device)
        with torch.no_grad():
            cache = open_prefix_cache(forward, PROMPTS, rows.shape[1])
            if cache is not None:
                logits = [cache.prefill(2), *(cache.step(tokens) for tokens in rows.t()[:-1])]
                decoded = torch.stack(logits, 1).float().log_softmax(-1).gather(-1, rows[..., None])[..., 0]
    results = (logprobs.detach(), gradient, decoded)
    return tuple(None if x is None else x.double().cpu() for x in results)


def sampled(logprobs):
    """Those of the tokens that are decoded, `[4, 6]`."""
    rows = logprobs[[0, 1, 3, 4]]
    return rows[rows != 0].view(4, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_and_decoding_have_the_numbers_of_a_cpu(kind, batch, gpu):
    expected, slope, _ = pass_of(model_of(kind), batch, KernelChoice.plain)
    found, gradient, decoded = pass_of(model_of(kind).to(gpu), to_device(batch, gpu), KernelChoice.auto)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient / slope.abs().max(), slope / slope.abs().max(), rtol=0, atol=1e-3)
    if decoded is not None:
        torch.testing.assert_close(decoded, sampled(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_they_are_as_near_to_32_bits_as_the_models_own_rows(kind, batch, gpu):
    """At most twice as far, since both are off by roundings of the same size that add up in another order."""
    rounded = model_of(kind).bfloat16()
    exact, slope, _ = pass_of(rounded.float(), batch, KernelChoice.plain)
    there = to_device(batch, gpu)
    own, own_slope, _ = pass_of(model_of(kind).bfloat16().to(gpu), there, KernelChoice.plain)
    found, gradient, decoded = pass_of(model_of(kind).bfloat16().to(gpu), there, KernelChoice.auto)
    print(
        f"{kind}: log-probs {(found - exact).norm() / (own - exact).norm():.2f} of transformers' error, "
        f"gradient {(gradient - slope).norm() / (own_slope - slope).norm():.2f}, decoding "
        f"{'-' if decoded is None else f'{(decoded - sampled(exact)).norm() / (own - exact).norm():.2f}'}"
    )
    assert (found - exact).norm() <= 2 * (own - exact).norm()
    assert (gradient - slope).norm() <= 2 * (own_slope - slope).norm()
    if decoded is not None:
        assert (decoded - sampled(exact)).norm() <= 2 * (own - exact).norm()


@pytest.mark.parametrize("kind", ["gpt_oss", "olmoe"])
def test_adapters_of_experts_have_the_gradients_of_a_cpu(kind, batch, backbone, make_roles, gpu):
    found = []
    for device in (torch.device("cpu"), gpu):
        model = model_of(kind).to(device)
        kernels = selection.install(model, KernelChoice.auto, own_attention=True)
        base = Backbone(model=model, tokenizer=backbone.tokenizer, device=device, path="none", kernels=kernels)
        roles = make_roles(noise=0.05, backbone=base, experts=True, router=True)
        with roles.training():
            logprobs = roles.outputs(to_device(batch, device), entropy=False).logprobs
            logprobs.sum().backward()
        gradients = {name: p.grad.cpu() for name, p in roles.named_parameters() if p.grad is not None}
        found.append((logprobs.detach().cpu(), gradients))
    (expected, slopes), (logprobs, gradients) = found
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    largest = max(slope.abs().max() for slope in slopes.values())
    assert slopes.keys() == gradients.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(gradients[name] / largest, slope / largest, rtol=0, atol=1e-3, msg=name)
