"""Ranks that share the tokens of packed rows, here in threads: together they compute what one does alone."""

import copy
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from threading import Lock
from typing import Any, cast

import hybrid_models
import pytest
import torch
import vision_folders
from attention_families import OTHERS, QUICK, random_model
from met_ranks import meeting, met, together
from mixtures import FAMILIES
from model_folders import settings
from slow_cases import slow, slow_but
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlft.config.model import KernelChoice
from rlft.model.activations import set_checkpointing
from rlft.model.backbone import read_backbone
from rlft.model.critic import ScalarHead
from rlft.model.experts import Routing, mixture_of
from rlft.model.forward import Forward, choose, possible_shares
from rlft.model.kernels import recurrent, selection
from rlft.model.kernels.recurrent import parts_of
from rlft.model.sequence import TokenShare, current_share, sharing_tokens
from rlft.trainer.ranks import LOOPBACK, open_store
from rlft.types import UserError
from tests.model.image_batches import of_two

LIMIT_S = 120
LOCK = Lock()
"""Held while a thread seeds torch's generator, and tries kernels."""


@pytest.fixture(scope="module")
def store():
    return open_store(LOOPBACK)


@pytest.fixture
def on_ranks(store, request):
    """Does the same work on so many ranks that share tokens; returns what each of them gives."""

    def on_ranks(ranks, work):
        def of_rank(rank, exchange):
            with sharing_tokens(TokenShare(rank=rank, ranks=ranks, exchange=exchange)), closing(exchange):
                return work()

        with met(meeting(store, request.node.name, ranks, sequence=ranks)) as exchanges:
            return together([partial(of_rank, rank, each) for rank, each in enumerate(exchanges)], LIMIT_S)

    return on_ranks


PROMPTS = [[3, 17, 5, 99, 42, 8, 23], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72], [73]], [[61, 80, 81, 82, 83, 84, 12, 13], [12, 13, 14, 15, 16]]]


@pytest.fixture
def batch(make_batch):
    return make_batch([(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in COMPLETIONS[u]])


@pytest.fixture
def computed(with_lora):
    """Log-probs, entropy, values, log-probs of other tokens and a KL; the gradients of a loss over them.

    how: the gradient checkpointing of a model with an adapter; None: all weights of the model learn.
    """

    def compute(model, batch, how):
        model, share = copy.deepcopy(model), current_share()
        with sharing_tokens(None), LOCK:  # whether a model packs is found out by every rank alone
            installed = selection.install(model.requires_grad_(how is None), KernelChoice.auto, own_attention=True)
            if how is not None:
                with_lora(model, ours=True)
                set_checkpointing(model, how)
            forward = choose(model, installed)
            forward.model.train(bool(how))
        assert forward.packed, forward.reason
        head = ScalarHead(model.config.get_text_config().hidden_size, torch.device("cpu"), torch.float64)
        generator = torch.Generator().manual_seed(5)
        for weight in head.parameters():
            weight.data.normal_(generator=generator)
        asked = replace(batch, teacher_top_k_ids=(batch.token_ids[..., None] + torch.arange(3)) % 97)
        with sharing_tokens(share):
            layout = forward.layout(asked)
            anchor = forward.anchor(asked, 0.7, layout)
            anchor = anchor._replace(states=anchor.states.flip(1))
            outputs = forward(asked, 0.7, entropy=True, head=head, layout=layout, top_k=True, anchor=anchor)
        found = [outputs.logprobs, outputs.entropy, outputs.values, outputs.top_k_logprobs, outputs.kl]
        losses = [(torch.randn(x.shape, generator=generator, dtype=x.dtype) * x).sum() for x in found]
        torch.stack(losses).sum().backward()
        learning = [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad]
        return [*(x.detach() for x in found), *(torch.zeros_like(p) if p.grad is None else p.grad for p in learning)]

    return compute


@pytest.fixture
def check(on_ranks, computed):
    """Compares the numbers and the summed gradients of ranks with those of one alone."""

    def check(model, batch, ranks, how, bound=1e-9):
        expected = computed(model, batch, how)
        of_ranks = on_ranks(ranks, lambda: computed(model, batch, how))
        for found in of_ranks:
            for x, whole in zip(found[:5], expected[:5], strict=True):
                torch.testing.assert_close(x, whole, rtol=0, atol=bound)
        for *parts, whole in zip(*(found[5:] for found in of_ranks), expected[5:], strict=True):
            torch.testing.assert_close(sum(parts), whole, rtol=0, atol=bound * max(1.0, float(whole.abs().max())))

    return check


FUSED = {
    "llama": {}, "mistral": {"sliding_window": 4}, "qwen2": {}, "qwen3": {"head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ranks"),
    # With 4 there are fewer heads of keys than ranks.
    [case if case in (("qwen3", 4), ("mistral", 2)) else slow(*case) for case in product(FUSED, (2, 4))],
)
def test_ranks_compute_together_what_one_computes_alone(kind, ranks, batch, check):
    check(random_model(kind, FUSED[kind]).double(), batch, ranks, False)


def test_rows_that_are_padded_are_not_shared(batch):
    """A plan refuses models of which it knows that; others are found out when they are loaded."""
    padded = Forward(model=random_model("llama", {}), packed=False, reason="padded rows: something")
    share = TokenShare(rank=0, ranks=2, exchange=cast(Any, None))
    problem = r"^cluster\.sequence_ranks: divides packed rows, and this model has padded rows: something, got 2"
    with pytest.raises(UserError, match=problem), sharing_tokens(share):
        padded.layout(batch)


@pytest.mark.parametrize(("kind", "rows", "how"), [
    slow("llama", "usual", True),
    ("llama", "usual", "tiles"),  # recomputed layers exchange again
    ("qwen2", "with branches", False),
    ("llama", "a rank without a sampled token", False),
])  # fmt: skip
def test_any_rows_are_shared_however_layers_are_computed(kind, rows, how, batch, tree_batch, make_batch, check):
    alone = make_batch([(0, [5, 6, 7], [8])])
    of = {"usual": batch, "with branches": tree_batch[0], "a rank without a sampled token": alone}
    check(random_model(kind, {}).double(), of[rows], 2, how)


ALL = QUICK | OTHERS


@pytest.mark.parametrize(
    "kind", [kind if kind in ("gemma2", "gpt_oss", "deepseek_v3", "diffllama") else slow(kind) for kind in ALL]
)
def test_any_softmax_attention_is_shared(kind, batch, check):
    """Windows, caps and sinks, narrower heads of values; all weights learn. transformers' norms are float32."""
    model = random_model(kind, ALL[kind]).double()
    if mixture_of(model).stacked:  # the others have no float64
        model.set_experts_implementation("eager")
    check(model, batch, 2, None, bound=1e-6)


OTHER_STATES = ("qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2_moe")


class WithFloat64:
    """torch to a module that casts to float32 what its recurrent layers sum up."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def empty(kind, **fields):
    config = AutoConfig.for_model(kind, **hybrid_models.SIZES | hybrid_models.HYBRIDS[kind] | fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("ranks", slow_but(2, [2, 4]))
@pytest.mark.parametrize(("kind", "how"), [
    slow("qwen3_5_text", None),
    ("qwen3_5_text", True),
    ("lfm2", False),
    slow("qwen3_5_text", False),
    *(slow(kind, None) for kind in OTHER_STATES if kind in hybrid_models.known()),
])  # fmt: skip
def test_channels_and_heads_of_layers_with_a_state_are_shared(kind, how, ranks, batch, check, monkeypatch):
    assert ranks in possible_shares(empty(kind))[0]
    model = hybrid_models.random_model(kind).double()
    if mixture_of(model).stacked:
        model.set_experts_implementation("eager")
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", WithFloat64())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    check(model, batch, ranks, how)


def test_channels_and_heads_say_how_many_ranks_may_share_a_row():
    layer = empty("qwen3_5_text").model.layers[0].linear_attn
    # Channels of queries, keys and values; heads of values and of keys.
    assert parts_of(layer) == (2 * 2 * 8 + 4 * 8, 4, 2)
    assert parts_of(empty("lfm2").model.layers[0].conv) == (32, 0, 0)
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    words = "does not divide the attention of a qwen3_5_text "
    words += "(2 heads, 2 of keys and 4 heads, 2 of keys and 48 channels)"
    assert possible_shares(empty("qwen3_5_text", **heads)) == ([1, 2], words)
    heads = {"linear_num_value_heads": 6, "linear_num_key_heads": 3, "num_attention_heads": 6}
    assert possible_shares(empty("qwen3_5_text", hidden_size=36, **heads))[0] == [1, 6]
    for kind in ("bamba", "mamba", "mamba2", "nemotron_h"):
        refused = f"a {kind} has recurrent layers whose heads ranks cannot divide"
        assert possible_shares(empty(kind)) == ([1], refused)


@pytest.mark.parametrize(("kind", "replaced"), [("qwen3_5_text", "conv1d_fn"), ("lfm2", "no such")])
def test_a_function_that_would_see_the_tokens_of_one_rank_alone_is_an_error(
    kind, replaced, batch, on_ranks, computed, monkeypatch
):
    monkeypatch.setattr(recurrent, "is_over_tokens", lambda name: name.endswith(replaced))
    with pytest.raises(AssertionError, match="another one, which would see those of this rank alone"):
        on_ranks(2, lambda: computed(hybrid_models.random_model(kind).double(), batch, None))


@pytest.mark.parametrize("kind", [slow("qwen2_5_vl"), "qwen3_vl", slow("smolvlm"), "gemma3", slow("gemma4")])
def test_images_of_shared_rows_are_read_as_those_of_whole_rows(kind, check, tmp_path):
    """Positions in height and width, vectors that deeper layers add, and images that are read both ways."""
    backbone = read_backbone(settings(vision_folders.folder_of(tmp_path / kind, kind)))
    _, batch = of_two(backbone)
    assert (batch.images.positions is not None) == kind.startswith("qwen")
    assert (batch.images.deep is not None) == (kind == "qwen3_vl")
    assert (batch.images.masks is not None) == kind.startswith("gemma")
    vectors = batch.images.vectors.double()
    check(backbone.model.double(), replace(batch, images=replace(batch.images, vectors=vectors)), 2, None, bound=1e-6)


def test_experts_of_shared_rows_are_noted_imposed_and_counted_as_of_whole_rows(on_ranks, batch, random_moe):
    """Imposed are those of the pass that notes, but for some tokens."""
    model = random_moe("olmoe", FAMILIES["olmoe"][0]).double()
    model.set_experts_implementation("eager")

    def routed():
        share, own = current_share(), copy.deepcopy(model)
        with sharing_tokens(None), LOCK:
            forward = choose(own, selection.install(own, KernelChoice.auto, own_attention=True))
            routing = Routing(own, mixture_of(own))
            assert routing.check() is None
        with sharing_tokens(share):
            layout = forward.layout(batch)
            with torch.no_grad(), routing.noting() as noted:
                forward(batch, 1.0, layout=layout)
            experts = forward.experts_by_row(noted(), batch, layout)
            changed = experts.where(batch.token_ids[..., None, None] % 3 > 0, experts.flip(-1) ^ 1)
            replayed = replace(batch, experts=changed)
            with routing.imposing(*forward.experts_by_token(replayed, layout)):
                own.get_input_embeddings().weight.requires_grad_(True)
                logprobs = forward(replayed, 1.0, layout=layout).logprobs
                metrics = routing.metrics(int(batch.loss_mask.sum()))
                return experts, logprobs.detach(), {name: float(number) for name, number in metrics.items()}

    experts, logprobs, metrics = routed()
    assert 0 < metrics["router/replaced"] < metrics["router/replaced_tokens"] < 1 < metrics["router/load_max"]
    for found, found_logprobs, found_metrics in on_ranks(2, routed):
        assert torch.equal(found, experts)
        torch.testing.assert_close(found_logprobs, logprobs, rtol=0, atol=1e-6)
        assert found_metrics == pytest.approx(metrics, rel=1e-6)
