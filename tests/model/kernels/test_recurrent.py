"""Recurrent layers over packed rows: what transformers computes of each row by itself."""

import importlib.machinery
import inspect
import sys
from types import ModuleType, SimpleNamespace

import hybrid_models
import pytest
import torch
from in_one_test import each
from slow_cases import slow
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlft.config.model import KernelChoice
from rlft.model.activations import set_checkpointing
from rlft.model.forward import choose, packed_forward, padded_forward
from rlft.model.kernels import recurrent, selection, split_attention
from rlft.model.packing import pack
from rlft.model.roles import POLICY

KINDS = [kind for kind in hybrid_models.known() if kind not in ("falcon_mamba", "jamba", "mamba", "zaya")]
QUICK = ["bamba", "lfm2", "qwen3_5_text"]
"""One of each kind of layer: Mamba-2, short convolutions, gated delta nets."""


@pytest.fixture
def build(on_base, make_roles):
    """A policy that differs from its random base, with these kernels."""

    def make(kind, choice):
        model = hybrid_models.random_model(kind)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # A state that decays by e^-16 at each token has lost 4 digits in transformers' sums over 64 tokens.
                parameter.data.clamp_(max=0)
        return make_roles(noise=0.05, backbone=on_base(model, choice))

    return make


@pytest.fixture
def batch(make_batch):
    """Prompts shorter than a convolution and longer than a chunk, completions of one and of no token."""
    dice = torch.Generator().manual_seed(0)

    def tokens(n):
        return torch.randint(3, hybrid_models.VOCABULARY, (n,), generator=dice).tolist()

    one, two, three = tokens(70), tokens(2), tokens(1)
    rows = [(5, one, 3), (2, two, 1), (5, one, 67), (5, one, 1), (2, two, 0), (9, three, 5), (2, two, 9)]
    return make_batch([(group, prompt, tokens(n)) for group, prompt, n in rows])


@pytest.fixture
def results(weighted):
    """(log-probs, gradients of the policy)."""

    def compute(roles, run):
        with roles.training():
            logprobs = run()
            weighted(logprobs).backward()
        roles.check_gradients()
        gradients = {name: p.grad for name, p in roles.named_parameters(POLICY) if p.grad is not None}
        roles.model.zero_grad(set_to_none=True)
        return logprobs.detach(), gradients

    return compute


def check(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=5e-5)
    largest = max(g.abs().max() for g in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name] / largest, gradient / largest, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in KINDS])
def test_packed_rows_have_the_logprobs_and_gradients_of_rows_run_one_by_one(kind, build, plain, batch, results):
    roles = build(kind, KernelChoice.plain)
    expected = results(roles, lambda: plain(roles.model, batch)[0])
    roles = build(kind, KernelChoice.auto)
    assert roles.forward.packed, roles.forward.reason
    found = results(roles, lambda: roles.outputs(batch, entropy=False).logprobs)
    check(found, expected)
    set_checkpointing(roles.backbone.model, True)
    check(results(roles, lambda: roles.outputs(batch, entropy=False).logprobs), found)


@pytest.mark.parametrize("kind", QUICK)
def test_rows_with_branches_have_the_numbers_of_their_paths(kind, build, tree_batch, results, monkeypatch):
    trees, _, _ = tree_batch
    monkeypatch.setattr(split_attention, "SMALL_BLOCK", 0)  # runs of other lengths go through the layers apart
    roles = build(kind, KernelChoice.auto)
    expected = results(roles, lambda: padded_forward(roles.model, trees, 1.0, False).logprobs)
    for prompts_first in (False, True):
        layout = pack(trees, prompts_first=prompts_first)
        check(results(roles, lambda: roles.forward(trees, 1.0, layout=layout).logprobs), expected)  # noqa: B023


@each("bias", [True, False])
def test_padding_before_a_prompt_does_not_reach_its_state(bias, make_batch):
    """A projection with a bias makes inputs of the convolution from padding that are not 0."""
    model = hybrid_models.random_model("lfm2", conv_bias=bias)
    selection.install(model, KernelChoice.auto, own_attention=True)
    rows = [(1, [5, 9, 3, 8, 77], [4, 6]), (2, [13, 7], [31, 8])]
    both = packed_forward(model, make_batch(rows), 1.0, False).logprobs
    for row, found in zip(rows, both, strict=True):
        alone = packed_forward(model, make_batch([row]), 1.0, False).logprobs[0]
        torch.testing.assert_close(found[: len(alone)], alone, rtol=0, atol=1e-5)


@each("kind", QUICK)
def test_no_token_of_a_prompt_is_computed_twice(kind, make_batch):
    model = hybrid_models.random_model(kind)
    selection.install(model, KernelChoice.auto, own_attention=True)
    mixer = next(m for m in model.modules() if any(isinstance(child, torch.nn.Conv1d) for child in m.children()))
    projection = next(child for child in mixer.children() if isinstance(child, torch.nn.Linear))
    tokens = []
    batch = make_batch([(1, [3, 4, 5, 6, 7, 8], [9, k]) for k in range(10, 14)])
    packed_forward(model, batch, 1.0, False)  # what is behind the head is found out by passes of their own
    projection.register_forward_hook(lambda module, args, output: tokens.append(args[0].shape[:-1].numel()))
    packed_forward(model, batch, 1.0, False)
    assert tokens == [6, 4 * 2]


@each("kind", sorted({"falcon_mamba", "jamba", "mamba", "zaya"}.intersection(hybrid_models.known())))
def test_a_layer_that_cannot_begin_with_a_state_is_named(kind):
    reason = recurrent.obstacle(hybrid_models.random_model(kind))
    assert str(reason).endswith("cannot begin several tokens with a given state"), kind


def test_a_residual_stream_in_float32_reaches_a_head_in_16_bits():
    model = hybrid_models.random_model("mamba2").to(torch.bfloat16)
    kernels = selection.install(model, KernelChoice.auto, own_attention=True)
    assert choose(model, kernels).packed


# -- where a package's functions crash or have no gradients, torch's take their place ----------------------------------
NAME = "torch_chunk_gated_delta_rule"
IDS = torch.tensor([[3, 17, 5, 99, 42]])


def on_a_gpu(query, *args, **kwargs):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


@pytest.fixture
def package(monkeypatch):
    """A flash-linear-attention that computes on a GPU alone, which transformers' Qwen3.5 has imported."""
    fla = ModuleType("fla")
    fla.chunk_gated_delta_rule = on_a_gpu
    fla.utils = SimpleNamespace(IS_NVIDIA_HOPPER=False, TRITON_ABOVE_3_4_0=True)
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setitem(sys.modules, "fla.utils", fla.utils)
    monkeypatch.setitem(sys.modules, "tilelang", None)  # not installed
    in_torch = inspect.unwrap(getattr(modeling_qwen3_5, NAME))
    wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(in_torch)
    monkeypatch.setattr(modeling_qwen3_5, NAME, wrapped)
    return fla


def test_on_a_cpu_a_hybrid_is_computed_in_torch_though_a_package_for_gpus_is_installed(package):
    model = hybrid_models.random_model("qwen3_5_text")
    with pytest.raises(ValueError, match="cpu tensor"):
        model(IDS)
    for choice in (KernelChoice.plain, KernelChoice.auto):  # a second time it changes nothing
        selection.install(model, choice, own_attention=False)
        assert model(IDS).logits.isfinite().all()
    chosen = getattr(modeling_qwen3_5, NAME)
    assert not isinstance(chosen.function, type(chosen))
    with pytest.raises(ValueError, match="cpu tensor"):  # a tensor on a GPU gets the package's
        chosen(SimpleNamespace(is_cpu=False))
    assert recurrent.obstacle_of_functions(model) is None


def test_where_the_package_refuses_gradients_it_is_torch_and_says_why(package, monkeypatch):
    package.utils.IS_NVIDIA_HOPPER = True
    model = hybrid_models.random_model("qwen3_5_text")
    recurrent.install_functions(model)
    chosen = getattr(modeling_qwen3_5, NAME)
    monkeypatch.setattr(chosen, "in_torch", lambda first: "in torch")
    assert chosen(SimpleNamespace(is_cpu=False)) == "in torch"
    assert "no right gradients on Hopper GPUs with this Triton" in recurrent.obstacle_of_functions(model)
    assert recurrent.obstacle_of_functions(hybrid_models.random_model("lfm2")) is None


def test_gradients_are_right_on_other_gpus_with_other_tritons_by_tilelang_and_without_the_package(package, monkeypatch):
    broken = {"IS_NVIDIA_HOPPER": True, "TRITON_ABOVE_3_4_0": True, "TRITON_ABOVE_3_7_1": False}
    for is_fixed in ({"IS_NVIDIA_HOPPER": False}, {"TRITON_ABOVE_3_4_0": False}, {"TRITON_ABOVE_3_7_1": True}):
        vars(package.utils).update(broken)
        assert recurrent.why_no_gradients() is not None
        vars(package.utils).update(is_fixed)
        assert recurrent.why_no_gradients() is None
    vars(package.utils).update(broken)
    with monkeypatch.context() as patch:
        tilelang = ModuleType("tilelang")
        tilelang.__spec__ = importlib.machinery.ModuleSpec("tilelang", None)
        patch.setitem(sys.modules, "tilelang", tilelang)
        assert recurrent.why_no_gradients() is None
    monkeypatch.delitem(sys.modules, "fla.utils")
    assert recurrent.why_no_gradients() is None
