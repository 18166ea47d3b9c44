"""Launches and waits of decoding on the pretended card, for a token and for a layer, and waits of a publish."""

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from card_peaks import CONVOLUTIONS, MOE, Case, planned
from given_drafts import GivenDrafts
from pretended_card import COUNTS

from rlft.generation.decoding import READ_EVERY
from rlft.generation.loaded_adapter import difference, published
from rlft.generation.memory import Decoding, Load
from rlft.generation.transformers import TransformersGenerator
from rlft.loop.parts import open_roles
from rlft.model.backbone import load_backbone
from rlft.model.roles import Roles
from rlft.plan.sizes import sizes_of
from rlft.types import NextTurn, Prompt, Sampling

TOKENS = READ_EVERY
"""How many tokens are counted, after as many as the host reads at once."""

FEW, MANY = 1, 5
"""Siblings of each of the two prompts."""

VOCABULARY = 2**14
"""A CPU sums up the probabilities of eight rows of so many at a time."""

OWN_SIZES: dict[str, Any] = {"intermediate_size": 768, "head_dim": 64}
LAYERED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "no biases": {"kind": "llama", "intermediate_size": 768},
    "norms over heads": {"kind": "qwen3", **OWN_SIZES},
    "a window": {"kind": "mistral", "sliding_window": 6, **OWN_SIZES},
    "few adapters": {"words": "lora.target_modules=[q_proj,v_proj,gate_proj]"},
}
"""Whose layers are known: {name: fields of a Case}."""
OTHERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "plain kernels": {"words": "model.kernels=plain"},
    "experts": {"kind": "olmoe", **MOE},
    "short convolutions": {"kind": "lfm2", **CONVOLUTIONS},
}


def counted(name: str) -> dict[str, Any]:
    """Launches of a layer and token (only of layers that are known), launches of TOKENS tokens for few and many rows,
    waits for them in several ways of sampling, and those of a publish for few and many layers; all by line."""
    fields = (LAYERED | OTHERS)[name]
    found = of_tokens({"layers": 4 if "layer_types" in fields else 2, **fields})
    if name in LAYERED:
        many_layers = of_tokens({"layers": 4, **fields}, ways=False)
        shallow, deep = found["launches"][0], many_layers["launches"][0]
        found["published"] = [found["published"], many_layers["published"]]
        layer = {line: (deep[line] - shallow[line]) / 2 / TOKENS for line in deep if deep[line] > shallow[line]}
        found["layer"] = layer
    return found


def of_tokens(fields: dict[str, Any], *, ways: bool = True) -> dict[str, Any]:
    load_backbone.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(Case(**{"completion": 8, "prompt": 16, "vocabulary": VOCABULARY, **fields}), Path(folder))
        return of_plan(plan, ways=ways)


def of_plan(plan: Any, *, ways: bool) -> dict[str, Any]:
    with open_roles(plan.config, None) as roles:
        backbone, weights = roles.backbone, plan.config.generation.named("transformers").weights
        engine = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 64, weights=weights, ends=())
        engine.load(roles.publish(0))
        prompts, plain = plan.train_prompts.prompts[:2], Sampling(max_tokens=1, temperature=1.0)
        engine.sample(prompts, FEW, [0, 1], replace(plain, max_tokens=READ_EVERY))  # the first one warms up
        few, waits = more_tokens(engine, prompts, FEW, plain)
        publish_waits = waits_of(lambda: publish(roles, engine))
        if not ways:
            return {"launches": [few], "published": publish_waits}
        many, waits_of_many = more_tokens(engine, prompts, MANY, plain)
        others = replace(plain, stop=("no such text",), top_k=50, top_p=0.9, min_p=1e-9)
        one_ends = [replace(prompts[0], next_turn=NextTurn(turn=1, seed=0, max_tokens=3)), prompts[1]]
        found = {
            "few rows": waits,
            "many rows": waits_of_many,
            "rows that leave, stop strings": more_tokens(engine, one_ends, FEW, others)[1],
        }
        engine.token_callback = lambda row, token: None
        found["a callback"] = more_tokens(engine, prompts, FEW, plain)[1]
    return {"launches": [few, many], "waits": found, "published": publish_waits}


def publish(roles: Roles, engine: TransformersGenerator) -> None:
    """As after a step: the engine computes with it, and then what it holds is read back and compared."""
    adapter = roles.publish(1)
    engine.load(adapter)
    engine.score([[1, 2, 3, 4]])
    held = engine.loaded_adapter()
    assert difference(1, held, published(adapter, held.dtype), {}) is None


def waits_of(call: Callable[[], None]) -> Counter[str]:
    """By line."""
    COUNTS.clear()
    COUNTS.by_line = True
    call()
    COUNTS.by_line = False
    return Counter(COUNTS.waits)  # the same object counts on


def more_tokens(
    engine: TransformersGenerator, prompts: Sequence[Prompt], n: int, sampling: Sampling
) -> tuple[Counter[str], Counter[str]]:
    """(launches, waits) of TOKENS tokens after the first READ_EVERY, by line."""
    counts = []
    for tokens in (READ_EVERY, READ_EVERY + TOKENS):
        COUNTS.clear()
        COUNTS.by_line = True
        engine.sample(prompts, n, [0, 1], replace(sampling, max_tokens=tokens))
        COUNTS.by_line = False
        counts.append((COUNTS.launches, COUNTS.waits))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


ROWS, LENGTH = (3, 4), 12


def widest() -> dict[str, list[int]]:
    """{rows that are sampled with drafts, or how else: [bytes of decoding that are planned, rehearsed, and taken by
    completions of full length whose passes have as many drafts as they may]}."""
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(Case(completion=LENGTH, prompt=16, vocabulary=VOCABULARY, layers=2, rows=ROWS), Path(folder))
        config, (prompts, group) = plan.config, ROWS
        asked = plan.train_prompts.prompts[:prompts]
        decoding = Decoding(num_prompts=prompts, samples=group, longest=asked[0].token_ids)
        load = Load(decodings=(decoding,), max_tokens=LENGTH, max_sequence_tokens=16 + LENGTH, device="cuda")
        settings = replace(config.generation.named("transformers"), graphs="off")
        sizes = sizes_of(config.model, config.lora)
        with open_roles(config, None) as roles:
            args = (roles, roles.backbone.tokenizer, roles.backbone.device, 64)
            engine, plain = TransformersGenerator(*args, ends=()), Sampling(max_tokens=LENGTH, temperature=1.0)
            engine.load(roles.publish(0))

            def peak_of(call: Callable[..., Any], *args: Any) -> int:
                gc.collect()
                before = COUNTS.peak = COUNTS.live
                call(*args)
                return COUNTS.peak - before

            engine.sample(asked, group, [0] * prompts, plain)  # the first one warms up
            found = {}
            truncated = replace(plain, temperature=0.7, top_p=0.9, min_p=1e-9)
            for name, rows, how in (("0", 0, plain), ("12", 12, plain), ("96", 96, plain), ("top_p", 0, truncated)):
                work = replace(load, draft_rows=rows, decodings=(replace(decoding, sampling=how),))
                parts = settings.memory(sizes, work).parts
                drafts = GivenDrafts(lambda key, said, most: [0] * most, rows) if rows else None
                rehearsed = peak_of(engine.rehearse, [decoding.longest] * prompts, group, LENGTH, rows, how)
                drawn = peak_of(engine.sample, asked, group, [0] * prompts, replace(how, drafts=drafts))
                found[name] = [sum(part.bytes for part in parts), rehearsed, drawn]
            return found
