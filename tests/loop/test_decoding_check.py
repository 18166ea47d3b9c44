"""Decoding that does not give the log-probs of the trainer's forward is stopped before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid_models
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlft import cli
from rlft.config.model import KernelChoice
from rlft.data.prompts import PromptSet
from rlft.generation import repeated_cache
from rlft.generation.engine import Generator
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator, Weights
from rlft.loop import session
from rlft.loop.freshness import LIMITS_IN_16_BITS, LIMITS_IN_32_BITS, Limits, _probes, check_decoding
from rlft.model.activations import set_checkpointing
from rlft.model.backbone import Backbone
from rlft.model.kernels import selection
from rlft.model.roles import Roles
from rlft.types import Adapter, Prompt, Sampling, UserError

CONFIG = SimpleNamespace(
    generation=SimpleNamespace(max_tokens=20), prompts=SimpleNamespace(max_tokens=64), token_budget=256
)
TOKENS = [tuple(3 + (7 * i + 5 * k) % 200 for k in range(9 + 4 * i)) for i in range(3)]
PROMPTS = PromptSet(
    prompts=[Prompt(id=str(i), messages=(), answer="", token_ids=tokens) for i, tokens in enumerate(TOKENS)],
    num_tokens=[len(tokens) for tokens in TOKENS],
    fingerprint="",
    notes=(),
)


@pytest.fixture
def opened(backbone: Backbone, make_roles: Callable[..., Roles]) -> Callable[..., tuple[TransformersGenerator, Roles]]:
    """The transformers engine and roles on this model, or on the embedded one, with an adapter that does something."""

    def build(model: Any = None, **keys: Any) -> tuple[TransformersGenerator, Roles]:
        cpu = torch.device("cpu")
        mine = backbone
        if model is not None:
            plain = selection.install(model, KernelChoice.plain, own_attention=False)
            mine = Backbone(model=model, tokenizer=backbone.tokenizer, device=cpu, path="a folder", kernels=plain)
        roles = make_roles(backbone=mine, noise=0.05, **keys)
        generator = TransformersGenerator(roles, mine.tokenizer, cpu, 16, weights=Weights.apart)
        generator.load(roles.publish(3))
        return generator, roles

    return build


def check(generator: Any, roles: Roles, limits: Limits = LIMITS_IN_32_BITS) -> float | None:
    return check_decoding(generator, roles, PROMPTS, CONFIG, limits)


def test_right_decoding_passes_with_dropout_of_the_adapter_and_leaves_no_trace(opened) -> None:
    generator, roles = opened(dropout=0.5)
    seeds, sampling = [5, 9, 11], Sampling(max_tokens=6, temperature=1.0)
    before, state = generator.sample(PROMPTS.prompts, 2, seeds, sampling), torch.random.get_rng_state()
    gap = check(generator, roles)
    assert gap is not None
    assert 0 < gap < 1e-4
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in roles.model.modules())
    assert generator.sample(PROMPTS.prompts, 2, seeds, sampling) == before


def test_a_gap_that_the_models_own_roundings_explain_passes(opened) -> None:
    """The gap of decoding is a few roundings, and a limit below those of the model in 16 bits is no fault."""
    generator, roles = opened()
    below = Limits(mean=1e-12)
    gap = check(generator, roles, below)
    assert gap is not None
    assert gap > below.mean
    with pytest.raises(UserError, match=r"^model\.path: decoding does not give .* by up to 1 nats"):
        check(Shifted(generator, 1.0, first_only=False), roles, below)


def test_a_run_is_the_same_with_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "steps=1 prompts_per_step=2 group_size=2 generation=transformers generation.max_tokens=8 lora.dropout=0.1 "
    words += (
        "lora.rank=2 data.size=16 data.held_out_size=4 eval.every=1 model.device=cpu scoring.workers=0 console=null"
    )
    checked: list[float | None] = []

    def run(folder: Path) -> list[bytes]:
        assert cli.run(["train", *words.split(), f"hydra.run.dir={folder}"]) == 0
        files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
        return [file.read_bytes() for file in sorted(files)]

    def counted(*args: Any) -> None:
        checked.append(check_decoding(*args))

    monkeypatch.setattr(session, "check_decoding", counted)
    with_it = run(tmp_path / "a")
    assert [gap < 1e-4 for gap in checked if gap is not None] == [True]
    monkeypatch.setattr(session, "check_decoding", lambda *args: None)
    assert run(tmp_path / "b") == with_it


def test_prompts_of_unlike_lengths_within_the_limits_are_made_of_any_data() -> None:
    for tokens in ([(1,)], [(1, 2)], TOKENS):
        prompts = [Prompt(id="", messages=(), answer="", token_ids=ids) for ids in tokens]
        probes = _probes(replace(PROMPTS, prompts=prompts), 20, 8)
        assert [len(probe.token_ids) for probe in probes] == [20, 5, 18]
        assert [Sampling(max_tokens=8, temperature=1.0).tokens_of(probe) for probe in probes] == [4, 8, 8]
        # A prefix cache would give a prompt of the run what was computed here.
        assert len(tokens[0]) == 1 or probes[0].token_ids[0] == tokens[0][1]


def reversed_rows(cache: Any, rows: torch.Tensor) -> None:
    cache.reorder_cache(rows.flip(0))


def forgotten(keep: Callable[..., None]) -> Callable[..., None]:
    """`keep` that leaves the rows of the cache as many, but not those that are kept."""
    return lambda self, rows: keep(self, (rows - 1).clamp(min=0))


@pytest.mark.parametrize("wrong", ["prefill", "later"])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_a_cache_with_wrong_rows_is_stopped(wrong, kind, opened, monkeypatch) -> None:
    generator, roles = opened(hybrid_models.random_model(kind))
    assert check(generator, roles) is not None
    if wrong == "prefill":
        monkeypatch.setattr(repeated_cache, "take_rows", reversed_rows)
    else:
        monkeypatch.setattr(RepeatedCache, "keep", forgotten(RepeatedCache.keep))
    with pytest.raises(UserError, match=r"^model\.path: decoding does not give the log-probs of the trainer's forward"):
        check(generator, roles)


def test_a_state_that_padding_leaks_into_is_stopped(opened, monkeypatch) -> None:
    """A model that ignores the mask, as one does whose recurrent layers read what stands before a short prompt."""
    model = hybrid_models.random_model("lfm2")
    plain = model.forward
    generator, roles = opened(model)

    def forward(*args: Any, attention_mask: torch.Tensor | None = None, **keys: Any) -> Any:
        left_padded = attention_mask is not None and not attention_mask[:, 0].all()
        return plain(*args, attention_mask=None if left_padded else attention_mask, **keys)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(repeated_cache, "forward_arguments", lambda model: ("position_ids", "past_key_values"))
    with pytest.raises(UserError, match=r"^model\.path: decoding does not give"):
        check(generator, roles)


def test_a_model_that_reads_tokens_behind_is_stopped(opened) -> None:
    fields = hybrid_models.SIZES | {"head_dim": 8, "use_bidirectional_attention": True}
    config = AutoConfig.for_model("gemma3_text", **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").requires_grad_(False).eval()
    with pytest.raises(UserError, match=r"^model\.path: decoding .* gemma3_text: log-probs of \d+ sampled tokens"):
        check(*opened(model))


def test_what_is_random_in_training_alone_is_stopped_and_named(opened) -> None:
    """OPT's layers, which are recomputed in updates, call dropout by their config's number, which loading sets to 0."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("opt", vocab_size=272, num_attention_heads=4, dropout=0.1, init_std=0.2, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    set_checkpointing(model, True)
    generator, roles = opened(model)
    state = torch.random.get_rng_state()
    with pytest.raises(UserError, match=r"for a opt in training mode, and not otherwise \(its dropout"):
        check(generator, roles)
    assert torch.equal(torch.random.get_rng_state(), state)


class Shifted(Generator):
    """An engine whose log-probs are off by this much, in the first token of a completion alone or in all."""

    def __init__(self, generator: TransformersGenerator, by: float, *, first_only: bool) -> None:
        self.generator, self.by, self.first_only = generator, by, first_only

    def load(self, adapter: Adapter) -> None:
        self.generator.load(adapter)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.generator.score(sequences)

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> Any:
        groups, first = self.generator.sample(prompts, n, seeds, sampling), True
        shifted = []
        for group in groups:
            rollouts = []
            for rollout in group.rollouts:
                logprobs = [p + self.by * (first or not self.first_only) for p in rollout.completion.logprobs[:1]]
                logprobs += [p + self.by * (not self.first_only) for p in rollout.completion.logprobs[1:]]
                first = False
                completion = replace(rollout.completion, logprobs=tuple(logprobs))
                rollouts.append(replace(rollout, completion=completion))
            shifted.append(replace(group, rollouts=tuple(rollouts)))
        return shifted


def test_in_16_bits_the_mean_decides_and_in_float32_every_token(opened) -> None:
    generator, roles = opened()
    exact, rounded = LIMITS_IN_32_BITS, LIMITS_IN_16_BITS
    for by, first_only, limits, is_right in [
        (2e-3, True, exact, False),  # one token above the threshold
        (5e-4, False, exact, True),
        (1.0, True, rounded, True),  # of some 60 tokens: 0.02 on average
        (0.2, False, rounded, False),  # 0.2 on average; no token differs by more
        (float("nan"), True, rounded, False),
    ]:
        shifted = Shifted(generator, by, first_only=first_only)
        if is_right:
            assert check(shifted, roles, limits) is not None
            continue
        with pytest.raises(UserError, match=r"^model\.path: decoding .* freshness\.threshold=<nats> loosens the check"):
            check(shifted, roles, limits)


def test_an_engine_without_weights_is_not_compared(backbone, make_roles) -> None:
    assert check(ScriptedGenerator({"*": ["1"]}, backbone.tokenizer), make_roles()) is None
