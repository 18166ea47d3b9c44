"""Ranks that share the tokens of packed rows, here in threads: together they compute what one does alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from attention_families import OTHERS, QUICK, random_model
from peft import LoraConfig, get_peft_model
from slow_cases import slow
from torch import Tensor

from rlft.config.model import KernelChoice, Recompute
from rlft.model.activations import set_checkpointing
from rlft.model.critic import ScalarHead
from rlft.model.forward import choose
from rlft.model.kernels import lora_linear, selection
from rlft.model.sequence import TokenShare, current_share, sharing_tokens
from rlft.system.process.running_time import in_background
from rlft.types import Batch

LIMIT_S = 120
LOCK = Lock()
"""Held while a thread seeds torch's generator, and tries kernels."""


class InMemory:
    """The exchange of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = Barrier(ranks, timeout=LIMIT_S)
        self.given: list[Any] = [None] * ranks

    def of(self, rank: int, given: Any) -> list[Any]:
        self.barrier.wait()
        self.given[rank] = given
        self.barrier.wait()
        return list(self.given)


class End:
    def __init__(self, rank: int, shared: InMemory) -> None:
        self.rank, self.shared = rank, shared

    def all_to_all(self, sent: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        assert sent.is_contiguous() and sent.dtype == torch.uint8 and len(sent) == sum(sizes)
        parts = [of_rank[self.rank] for of_rank in self.shared.of(self.rank, sent.clone().split([*sizes]))]
        assert [len(part) for part in parts] == list(arriving)
        return torch.cat(parts)

    def add_up(self, tensor: Tensor) -> None:
        tensor.copy_(sum(self.shared.of(self.rank, tensor.clone())))


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's thread gives for `work(rank)`, inside of which tokens are shared."""
    shared = InMemory(ranks)

    def of_rank(rank: int) -> Any:
        try:
            with sharing_tokens(TokenShare(rank=rank, ranks=ranks, exchange=End(rank, shared))):
                return work(rank)
        except BaseException:
            shared.barrier.abort()
            raise

    futures = [in_background(lambda rank=rank: of_rank(rank)) for rank in range(ranks)]
    return [future.result(LIMIT_S) for future in futures]


PROMPTS = [[3, 17, 5, 99, 42, 8, 23], [11, 4, 9]]
COMPLETIONS = [[[9, 30, 31, 2, 55, 7], [70, 71, 72], [73]], [[61, 80, 81, 82, 83, 84, 12, 13], [12, 13, 14, 15, 16]]]


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    return make_batch([(u, prompt, own) for u, prompt in enumerate(PROMPTS) for own in COMPLETIONS[u]])


def with_adapter(model: Any, how: Recompute) -> tuple[Any, Any]:
    """(the model, the same with an adapter that does something, in our layers)."""
    installed = selection.install(model, KernelChoice.auto, own_attention=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
        lora_linear.install(config)
        get_peft_model(model, config, autocast_adapter_dtype=False)
    set_checkpointing(model, how)
    return model.train(bool(how)), installed


def computed(model: Any, batch: Batch, how: Recompute | None) -> list[Tensor]:
    """Log-probs, entropy, values and log-probs of other tokens; the gradients of a loss over them.

    how: the gradient checkpointing of a model with an adapter; None: all weights of the model learn.
    """
    model, share = copy.deepcopy(model), current_share()
    with sharing_tokens(None), LOCK:  # whether a model packs is found out by every rank alone
        if how is None:
            installed = selection.install(model.requires_grad_(True), KernelChoice.auto, own_attention=True)
        else:
            model, installed = with_adapter(model, how)
        forward = choose(model, installed)
        forward.model.train(bool(how))
    assert forward.packed, forward.reason
    head = ScalarHead(model.config.get_text_config().hidden_size, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(5)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    asked = replace(batch, teacher_top_k_ids=(batch.token_ids[..., None] + torch.arange(3)) % 97)
    with sharing_tokens(share):
        outputs = forward(asked, 0.7, entropy=True, head=head, layout=forward.layout(asked), top_k=True)
    found = [outputs.logprobs, outputs.entropy, outputs.values, outputs.top_k_logprobs]
    sum((torch.randn(x.shape, generator=generator, dtype=x.dtype) * x).sum() for x in found).backward()
    learning = [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad]
    return [*(x.detach() for x in found), *(torch.zeros_like(p) if p.grad is None else p.grad for p in learning)]


def assert_shared(model: Any, batch: Batch, ranks: int, how: Recompute | None, bound: float = 1e-9) -> None:
    expected = computed(model, batch, how)
    of_ranks = on_ranks(ranks, lambda rank: computed(model, batch, how))
    for found in of_ranks:
        for x, whole in zip(found[:4], expected[:4], strict=True):
            torch.testing.assert_close(x, whole, rtol=0, atol=bound)
    for *parts, whole in zip(*(found[4:] for found in of_ranks), expected[4:], strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=0, atol=bound * max(1.0, float(whole.abs().max())))


FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


@pytest.mark.parametrize("ranks", [2, 4])  # with 4 there are fewer heads of keys than ranks
@pytest.mark.parametrize(("kind", "fields"), FUSED.items(), ids=FUSED)
def test_ranks_compute_together_what_one_computes_alone(kind, fields, ranks, batch) -> None:
    assert_shared(random_model(kind, fields).double(), batch, ranks, False)


@pytest.mark.parametrize("how", [True, "tiles"])
def test_recomputed_layers_exchange_again(how, batch) -> None:
    assert_shared(random_model("llama", {}).double(), batch, 2, how)


def test_rows_with_branches_are_shared_too(tree_batch) -> None:
    [trees, *_] = tree_batch
    assert trees.previous is not None
    assert_shared(random_model("qwen2", {}).double(), trees, 2, False)


def test_a_rank_may_have_no_sampled_token(make_batch) -> None:
    assert_shared(random_model("llama", {}).double(), make_batch([(0, [5, 6, 7], [8])]), 2, False)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*QUICK.items(), *(slow(kind, fields) for kind, fields in OTHERS.items())],
    ids=[*QUICK, *OTHERS],
)
def test_any_softmax_attention_is_shared(kind, fields, batch) -> None:
    """Windows, caps and sinks, narrower heads of values; all weights learn. transformers' norms are float32."""
    model = random_model(kind, fields).double()
    if fields.get("num_experts"):  # the others have no float64
        model.set_experts_implementation("eager")
    assert_shared(model, batch, 2, None, bound=1e-6)
