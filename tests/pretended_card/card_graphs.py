"""What decoding in CUDA graphs gives on the pretended card, next to the same steps without them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from card_decoding import LAYERED, TOKENS
from card_peaks import Case, planned
from pretended_card import COUNTS
from recorded_graphs import CUDAGraph

from rlft.generation.decoding import READ_EVERY
from rlft.generation.graphs import MOST_WAYS, Graphs
from rlft.generation.memory import When
from rlft.generation.transformers import TransformersGenerator
from rlft.loop.parts import open_roles
from rlft.model.backbone import load_backbone
from rlft.model.kernels.fixed_keys import FixedKeys
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.kernels.prefix_cache import FlashPrefixCache
from rlft.plan.fit import planned_here
from rlft.plan.memory_parts import parts
from rlft.types import Group, NextTurn, Prompt, Sampling

SAMPLES, SEEDS = 4, range(100, 600, 100)
PLAIN = Sampling(max_tokens=24, temperature=1.0)
SHORT = replace(PLAIN, max_tokens=13)
WAYS = {
    "plain": PLAIN,
    "greedy, shorter": replace(PLAIN, temperature=0.0, max_tokens=14),
    "stopped, truncated": replace(
        PLAIN, top_k=50, top_p=0.9, min_p=1e-9, stop=("5", "ab"), stop_token_ids=(40, 41, 42)
    ),
}


class Model:
    """A model of a case with two versions of an adapter, and prompts of different lengths."""

    def __init__(self, folder: Path, fields: dict[str, Any]) -> None:
        load_backbone.cache_clear()
        folder.mkdir(parents=True)
        usual = {"completion": 40, "prompt": 16, "vocabulary": 512, "layers": 2}
        self.plan = planned(Case(**usual | fields), folder)
        first = self.plan.train_prompts.prompts[:5]
        cut = [replace(prompt, token_ids=prompt.token_ids[n:]) for n, prompt in enumerate(first)]
        self.prompts: list[Prompt] = [*cut[:4], replace(cut[4], next_turn=NextTurn(turn=1, seed=0, max_tokens=11))]

    @contextmanager
    def opened(self) -> Iterator[None]:
        with open_roles(self.plan.config, None) as self.roles:
            self.versions = [self._changed(version) for version in range(2)]
            yield

    def _changed(self, version: int) -> Any:
        adapter, random = self.roles.publish(version), torch.Generator().manual_seed(version)
        weights = {k: (0.2 * torch.randn(x.shape, generator=random)).to(x) for k, x in adapter.weights.items()}
        return replace(adapter, weights=weights)

    def engine(self, batch_size: int = 12, *, records: bool = True, ends: Sequence[int] = range(12)) -> Any:
        """One that decodes in graphs, or computes the same steps without them."""
        backbone, weights = self.roles.backbone, self.plan.config.generation.named("transformers").weights
        made = TransformersGenerator(
            self.roles, backbone.tokenizer, backbone.device, batch_size, weights=weights, ends=tuple(ends),
            in_graphs=True,
        )  # fmt: skip
        if not records:
            made._graphs.problem = "its steps are to be computed one by one"
        return made

    def sampled(self, engine: Any, sampling: Sampling = PLAIN) -> list[Any]:
        groups: list[Group] = engine.sample(self.prompts, SAMPLES, list(SEEDS), sampling)
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        return [(c.token_ids, c.logprobs, str(c.finish_reason)) for c in completions]


def main(what: str, *names: str) -> dict[str, Any]:
    """{case: what `same` or `counted` found}"""
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for case in names:
            model = Model(Path(name) / case, LAYERED[case])
            with model.opened():
                found[case] = {"same": same, "counted": counted}[what](model)
        return found


def same(model: Model) -> dict[str, Any]:
    """{batch size, version, way: (whether graphs give the steps' bits, numbers of tokens, replays, problem)}"""
    found = {}
    short = {"plain": PLAIN}
    for batch_size, first in ((12, WAYS), (20, short)):
        engines = model.engine(batch_size), model.engine(batch_size, records=False)
        for version in model.versions if first is WAYS else model.versions[:1]:
            for way, sampling in (short if version.version else first).items():
                rows, replays = [], 0
                for engine in engines:
                    engine.load(version)
                    COUNTS.clear()
                    rows.append(model.sampled(engine, sampling))
                    replays = max(replays, COUNTS.launches["graph"])
                lengths = sorted({len(ids) for ids, *_ in rows[0]})
                problem = engines[0]._graphs.problem
                found[f"{batch_size}, {version.version}, {way}"] = [rows[0] == rows[1], lengths, replays, problem]
    return found


def counted(model: Model) -> dict[str, Any]:
    """Launches and waits of TOKENS tokens more, in graphs and without."""
    found = {}
    for name, in_graphs in (("graphs", True), ("without", False)):
        engine = model.engine(64, records=in_graphs, ends=())
        engine.load(model.versions[0])
        counts = []
        for tokens in (2 * READ_EVERY + TOKENS, 2 * READ_EVERY, 2 * READ_EVERY + TOKENS):  # the first one records
            COUNTS.clear()
            model.prompts[4] = replace(model.prompts[4], next_turn=None)
            model.sampled(engine, replace(PLAIN, max_tokens=tokens))
            counts.append([Counter(COUNTS.launches), Counter(COUNTS.waits), Counter(COUNTS.uploads)])
        found[name] = [dict(more - less) for less, more in zip(*counts[1:], strict=True)]
    return found


# -- planted faults ------------------------------------------------------------------------------------------------
def faults() -> dict[str, Any]:
    """{fault: [whether results are the steps' nevertheless, what the engine says]}"""
    with tempfile.TemporaryDirectory() as name:
        model = Model(Path(name) / "model", LAYERED["qwen2"])
        with model.opened():
            right = model.engine(records=False)
            right.load(model.versions[1])
            rows = model.sampled(right, SHORT)
            return {fault: planted(model, rows, *how) for fault, how in FAULTS.items()}


def planted(
    model: Model, right: list[Any], fault: Callable[[], Any], between: Callable[[Model, Any], None], trusts: bool
) -> list[Any]:
    """trusts: whether the comparison of the first replay is left out."""
    engine = model.engine()
    compared = mock.patch.object(Graphs, "_compare", trusting) if trusts else nullcontext()
    with fault(), compared:
        engine.load(model.versions[0])
        model.sampled(engine, SHORT)
        between(model, engine)
        engine.load(model.versions[1])
        return [model.sampled(engine, SHORT) == right, engine._graphs.problem]


def trusting(graphs: Graphs, run: Any, key: Any, place: int) -> None:
    graphs._compared.add(key)
    graphs._recorded[key].replay()


def place_of_the_host() -> Any:
    """A step whose place is a number of the host, which counts on."""
    advance, place = FlashPrefixCache.advance, [0]

    def counting(cache: FlashPrefixCache, token_R: Any) -> Any:
        fixed: Any = cache._fixed
        if CUDAGraph.captured is None:
            place[0] = int(fixed.place)
        fixed.place.fill_(place[0])
        return advance(cache, token_R)

    return mock.patch.object(FlashPrefixCache, "advance", counting)


def new_copies() -> Any:
    """The adapter's 16-bit copies are made anew for each version, as they were before there were graphs."""
    copies = LoraLinear._copies

    def anew(layer: LoraLinear, role: str, dtype: Any) -> Any:
        known = layer.copies.get(role)
        if known is not None and any(x._version != v for x, v in zip(known[1], known[2], strict=True)):
            kept.append(layer.copies.pop(role))
        return copies(layer, role, dtype)

    return mock.patch.object(LoraLinear, "_copies", anew)


def unwatched(fault: Callable[[], Any] = nullcontext) -> Any:
    """The fault, where nobody asks whether something has moved."""

    @contextmanager
    def both() -> Iterator[None]:
        with fault(), mock.patch.object(FlashPrefixCache, "addresses", return_value=()):
            yield

    return both()


def no_memory() -> Any:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return mock.patch.object(torch.cuda, "graph", mock.Mock(side_effect=error))


def waiting() -> Any:
    advance = FlashPrefixCache.advance

    def reading(cache: FlashPrefixCache, token_R: Any) -> Any:
        assert int(token_R[0]) >= 0
        return advance(cache, token_R)

    return mock.patch.object(FlashPrefixCache, "advance", reading)


def nothing(model: Model, engine: Any) -> None: ...


def move_keys(model: Model, engine: Any) -> None:
    keys: FixedKeys = engine._graphs._keys
    kept.append(keys.own)
    keys.own = [(k.clone(), v.clone()) for k, v in keys.own]


def more_room(model: Model, engine: Any) -> None:
    """Longer completions than there is room for, the first time without the memory for them."""
    longer = replace(SHORT, max_tokens=30)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with mock.patch.object(Graphs, "_make_room", side_effect=error), suppress(torch.OutOfMemoryError):
        model.sampled(engine, longer)
    model.sampled(engine, longer)


def other_ways(model: Model, engine: Any) -> None:
    """More temperatures than graphs are held of."""
    for temperature in range(1, MOST_WAYS + 2):
        model.sampled(engine, replace(SHORT, max_tokens=2, temperature=0.1 * temperature))
    assert len(engine._graphs._ends) <= MOST_WAYS


def move_weights(model: Model, engine: Any) -> None:
    for parameter in engine.slot.backbone.model.parameters():
        kept.append(parameter.data)
        parameter.data = parameter.data.clone()


kept: list[Any] = []
"""What was moved, else its memory would be used again."""

FAULTS: dict[str, tuple[Callable[[], Any], Callable[[Model, Any], None], bool]] = {
    "none": (nullcontext, nothing, False),
    "a place of the host": (place_of_the_host, nothing, False),
    "a place of the host, trusted": (place_of_the_host, nothing, True),
    "keys that moved": (nullcontext, move_keys, False),
    "keys that moved, unwatched": (unwatched, move_keys, False),
    "more room": (nullcontext, more_room, False),
    "other ways": (nullcontext, other_ways, False),
    "weights that moved": (nullcontext, move_weights, False),
    "copies that move": (new_copies, nothing, False),
    "copies that move, unwatched": (lambda: unwatched(new_copies), nothing, False),
    "no memory": (no_memory, nothing, False),
    "a step that waits": (waiting, nothing, False),
}


# -- memory --------------------------------------------------------------------------------------------------------
def memory() -> dict[str, Any]:
    """{part: [planned, counted]} of what graphs hold after a rehearsal."""
    with tempfile.TemporaryDirectory() as name:
        model = Model(Path(name) / "model", {"vocabulary": 8192, "completion": 64, "prompt": 48, "rows": (6, 4)})
        found = planned_here(model.plan)
        assert found is not None
        sizes, demand, _ = found
        of_graphs = [part for part in parts(sizes, demand, 0) if part.key == "generation.transformers.graphs"]
        assert all(part.when is When.always for part in of_graphs)
        with model.opened():
            engine = model.engine(256)
            engine.load(model.versions[0])
            engine.score([[1, 2, 3, 4]])
            before = COUNTS.live
            engine.rehearse([range(48)] * 6, 4, 64)
            return {"planned": {part.name: part.bytes for part in of_graphs}, "counted": COUNTS.live - before}
