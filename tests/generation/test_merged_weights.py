"""An adapter added to a shared base for sampling and taken back: exactly, whatever comes between."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from fused_engine import fused
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rlft.generation import merged_weights
from rlft.generation.loaded_adapter import LoadedAdapter, difference, published
from rlft.generation.merged_weights import MergedWeights, deltas_of
from rlft.generation.shared_base import SharedBaseError, share
from rlft.types import Adapter, UserError

CPU = torch.device("cpu")
SIZES = Qwen2Config(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
)  # fmt: skip
IDS = torch.arange(3, 23)[None]


class Bench:
    """A trainer's model on an engine's storage, an engine's model on the same, and adapters for both."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(SIZES, dtype=dtype).requires_grad_(False).eval()
        self.engine = fused(self.model, wrapped=False)
        self.shared = share(self.model, self.engine, CPU)
        self.merger = MergedWeights(self.shared, self.model)
        # A second model on the same storage, as vLLM's own graph would read it.
        self.reader = AutoModelForCausalLM.from_config(SIZES, dtype=dtype).requires_grad_(False).eval()
        self.reader.load_state_dict(self.model.state_dict())
        share(self.reader, self.engine, CPU)
        self.clean = self.bits()

    def bits(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.engine.parameters()]

    def is_clean(self) -> bool:
        return all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(self.bits(), self.clean, strict=True)
        )

    def adapter(self, seed: int, size: float = 0.02, **changes: Any) -> Adapter:
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes)
        with torch.device("meta"):
            peft = get_peft_model(AutoModelForCausalLM.from_config(SIZES), config)
        random = torch.Generator().manual_seed(seed)
        shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(peft).items()}
        weights = {name: torch.randn(shape, generator=random) * size for name, shape in shapes.items()}
        return Adapter(version=seed, weights=weights, config=peft.peft_config["default"].to_dict())


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def clean(bench: Bench) -> Iterator[None]:
    yield
    bench.merger.take_back()
    assert bench.is_clean()


def test_inside_the_engine_has_the_sums_rounded_once_and_afterwards_the_base(bench: Bench) -> None:
    adapter = bench.adapter(1)
    bench.merger.load(adapter)
    with bench.merger.merged():
        inside = bench.bits()
    bench.merger.take_back()
    assert bench.is_clean()
    assert {delta.scale for delta in deltas_of(adapter).values()} == {2.0}
    stem = "base_model.model.model.layers.1.self_attn.k_proj"
    up, down = adapter.weights[f"{stem}.lora_B.weight"], adapter.weights[f"{stem}.lora_A.weight"]
    names = [name for name, _ in bench.engine.named_parameters()]
    index = names.index("model.layers.1.self_attn.qkv_proj.weight")
    k = slice(32, 48)
    expected = (bench.clean[index][k].float() + 2.0 * (up @ down)).to(torch.bfloat16)
    assert torch.equal(inside[index][k], expected)
    assert torch.equal(inside[names.index("model.norm.weight")], bench.clean[names.index("model.norm.weight")])


def test_fifty_random_merges_come_back_bit_for_bit(bench: Bench) -> None:
    kept, total = [], sum(p.numel() for n, p in bench.model.named_parameters() if "_proj.weight" in n)
    for seed in range(50):
        bench.merger.load(bench.adapter(seed, size=(0.003, 0.02, 0.1, 1.0)[seed % 4]))
        with bench.merger.merged():
            assert not bench.is_clean()
            kept.append(sum(len(added.index) for added in bench.merger._added) / total)
        bench.merger.take_back()
        assert bench.is_clean()
    assert max(kept) > 0, "without the kept bits some would not have come back"
    assert sum(kept[0::4]) / len(kept[0::4]) < 0.05, "small adapters, as training makes them, keep little"


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(bench: Bench) -> None:
    assert {delta.scale for delta in deltas_of(bench.adapter(1, use_rslora=True)).values()} == {8 / 4**0.5}
    with pytest.raises(ValueError, match="only LoRA of one rank"):
        deltas_of(bench.adapter(1, rank_pattern={"k_proj": 2}))


@pytest.mark.parametrize("dtype", [torch.float16])
def test_it_is_exact_in_float16_too(dtype: torch.dtype) -> None:
    other = Bench(dtype)
    other.merger.load(other.adapter(3, 0.1))
    with other.merger.merged():
        assert not other.is_clean()
    other.merger.take_back()
    assert other.is_clean()


def test_the_trainer_cannot_compute_while_the_engine_samples_and_has_the_base_back_when_it_does(bench: Bench) -> None:
    before = bench.model(IDS).logits
    bench.merger.load(bench.adapter(1))
    with bench.merger.merged():
        with pytest.raises(SharedBaseError, match="while its base holds the policy's merged weights"):
            bench.model(IDS)
        inside = bench.reader(IDS).logits
    assert torch.equal(bench.reader(IDS).logits, inside), "the engine may sample again"
    assert torch.equal(bench.model(IDS).logits, before)
    assert bench.is_clean()
    assert not torch.equal(inside, before)


def test_a_published_version_is_added_checked_and_taken_back_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the engine computes between two passes of the trainer: a freshness check, an evaluation, turns.

    Checksums: of each sum, before it is taken back, and of what that gives; of the base once in a run.
    """
    calls: Counter[str] = Counter()
    for name in ("added_up", "_restore", "checksum"):
        work = getattr(merged_weights, name)
        counted = lambda *args, name=name, work=work: calls.update([name]) or work(*args)  # noqa: E731
        monkeypatch.setattr(merged_weights, name, counted)
    matrices = len(deltas_of(bench.adapter(1)))
    bench.merger._base_checksums.clear()
    for version in range(1, 4):
        calls.clear()
        bench.merger.load(bench.adapter(version))
        seen = []
        for _ in range(5):
            with bench.merger.merged():
                seen.append(bench.bits())
        assert all(torch.equal(a, b) for bits in seen[1:] for a, b in zip(seen[0], bits, strict=True))
        for _ in range(3):
            bench.model(IDS)
            assert bench.is_clean()
        of_base = matrices if version == 1 else 0
        assert calls == {"added_up": matrices, "_restore": matrices, "checksum": 3 * matrices + of_base}
    with bench.merger.merged():
        old = bench.bits()
    bench.merger.load(bench.adapter(1))
    assert bench.is_clean(), "another version is added to the base itself"
    with bench.merger.merged():
        assert not all(torch.equal(a, b) for a, b in zip(old, bench.bits(), strict=True))


def lines_run(work: Callable[[], Any], stop_at: int) -> tuple[int, BaseException | None]:
    """Runs the work, and raises KeyboardInterrupt before line `stop_at` of this module's source that is executed."""
    count, source = 0, inspect.getsourcefile(merged_weights)

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename == source else None

    sys.settrace(trace)
    try:
        work()
    except BaseException as error:
        return count, error
    finally:
        sys.settrace(None)
    return count, None


def test_an_interruption_at_any_line_leaves_the_base_exact(bench: Bench) -> None:
    bench.merger.load(bench.adapter(5, 0.1))

    def sample() -> None:
        with bench.merger.merged():
            bench.reader.model.embed_tokens.weight.sum()
        bench.merger.take_back()

    lines, error = lines_run(sample, 0)
    assert error is None
    assert lines > 500
    expected, at_once = bench.model(IDS).logits, 0
    # Every line of the first and the last matrices, and a sample of those between.
    points = [*range(1, 90), *range(90, lines - 90, 37), *range(lines - 90, lines + 1)]
    for stop_at in points:
        _, error = lines_run(sample, stop_at)
        assert isinstance(error, KeyboardInterrupt), stop_at
        at_once += bench.is_clean()
        bench.shared.check_content()  # what a checkpoint does; it takes back what the interruption has left
        assert bench.is_clean(), stop_at
        assert torch.equal(bench.model(IDS).logits, expected)
    assert at_once > 0.8 * len(points), "most of them need no second look"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_while_sampling_leaves_the_base_exact(error: type[BaseException], bench: Bench) -> None:
    bench.merger.load(bench.adapter(5, 0.1))
    with pytest.raises(error), bench.merger.merged():
        raise error
    assert bench.is_clean()


def test_whoever_writes_to_a_merged_matrix_is_found_out() -> None:
    bench = Bench()
    bench.merger.load(bench.adapter(5, 0.1))
    name = "model.layers.1.mlp.down_proj.weight"
    with bench.merger.merged():
        bench.shared.shared[name].engine.data[0, 0] += 1
    for _ in range(2):
        with pytest.raises(SharedBaseError, match=f"^{name} of the base cannot be brought back"):
            bench.model(IDS)
    with pytest.raises(SharedBaseError, match="cannot be brought back"):
        bench.shared.check_content()


def test_an_adapter_on_a_matrix_that_is_kept_apart_is_refused() -> None:
    bench = Bench()
    name = "model.layers.0.mlp.up_proj.weight"
    bench.shared.apart = {name: "different"}
    bench.shared.shared = {n: t for n, t in bench.shared.shared.items() if n != name}
    with pytest.raises(UserError, match=rf"^generation\.vllm\.weights: needs every .* {name} is kept apart \(differ"):
        bench.merger.load(bench.adapter(1))


def test_the_gap_between_merged_weights_and_the_adapter_apart_is_a_rounding(bench: Bench) -> None:
    """What the freshness check sees. An adapter of this size moves the log-probs themselves by far more."""
    adapter = bench.adapter(2, 0.05)
    bench.merger.load(adapter)
    with bench.merger.merged():
        merged = bench.reader(IDS).logits.float().log_softmax(-1)
    bench.merger.take_back()
    base = bench.reader(IDS).logits.float().log_softmax(-1)
    with bench.merger.merged():
        again = bench.reader(IDS).logits.float().log_softmax(-1)
    assert torch.equal(merged, again), "the same version gives the same numbers at every call"
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(SIZES, dtype=torch.bfloat16)
    apart = get_peft_model(own, config).eval()
    apart.load_state_dict(
        {n.replace(".weight", ".default.weight"): t for n, t in adapter.weights.items()}, strict=False
    )
    with torch.no_grad():
        expected = apart(IDS).logits.float().log_softmax(-1)
    gap, moved = (merged - expected).abs(), (expected - base).abs()
    assert gap.max() < 0.05
    assert gap.mean() < 0.1 * moved.mean()


def test_what_is_added_is_read_back_as_what_was_published_and_the_version_before_is_named(bench: Bench) -> None:
    old, new = bench.adapter(1, use_rslora=True), bench.adapter(2, use_rslora=True)
    earlier = {1: published(old, "float32")}
    for loaded, said in (
        (new, None),
        (old, "28 of the 28 tensors that it was given are others.*still holds version 1"),
    ):
        bench.merger.load(loaded)
        found = difference(2, LoadedAdapter.of(bench.merger.tensors()), published(new, "float32"), earlier)
        assert found is None if said is None else re.search(said, str(found))
