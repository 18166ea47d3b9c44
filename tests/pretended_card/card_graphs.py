"""What decoding in CUDA graphs gives on the pretended card, next to the same steps without them."""

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import four_bits
import torch
from card_decoding import LAYERED, TOKENS
from card_peaks import CONVOLUTIONS, MOE, Case, planned, planned_with_images
from pretended_card import COUNTS
from recorded_graphs import CUDAGraph, Stream
from torch.utils._pytree import tree_leaves

from rlft.generation import graphs
from rlft.generation.decoding import READ_EVERY
from rlft.generation.graphs import MOST_WAYS, Graphs
from rlft.generation.memory import Decoding, When
from rlft.generation.transformers import TransformersGenerator
from rlft.loop.parts import open_roles
from rlft.model.backbone import load_backbone
from rlft.model.kernels.fixed_keys import FixedKeys
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.kernels.prefix_cache import FlashPrefixCache
from rlft.plan.fit import planned_here
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import rehearse_decoding
from rlft.types import Group, NextTurn, Prompt, Sampling

SAMPLES, SEEDS = 4, range(100, 600, 100)
PLAIN = Sampling(max_tokens=20, temperature=1.0)
SHORT = replace(PLAIN, max_tokens=11)
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
        shown = fields.pop("shown", None)
        self.plan = (
            planned(Case(**usual | fields), folder)
            if shown is None
            else planned_with_images(shown, folder / "model", 24)
        )
        first = self.plan.train_prompts.prompts[:5]
        cut = [replace(p, token_ids=p.token_ids[0 if p.images else n :]) for n, p in enumerate(first)]
        self.prompts: list[Prompt] = [*cut[:4], replace(cut[4], next_turn=NextTurn(turn=1, seed=0, max_tokens=9))]

    @contextmanager
    def opened(self) -> Iterator[None]:
        with open_roles(self.plan.config, None) as self.roles:
            self.versions = [self._changed(version) for version in range(2)]
            yield

    def _changed(self, version: int) -> Any:
        adapter, random = self.roles.publish(version), torch.Generator().manual_seed(version)
        weights = {k: (0.2 * torch.randn(x.shape, generator=random)).to(x) for k, x in adapter.weights.items()}
        return replace(adapter, weights=weights)

    def load(self, engines: Sequence[Any], version: int) -> None:
        """The engines sample from this version; one of all weights is in the model itself."""
        if self.plan.config.lora is None:
            random = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in self.roles.model.parameters():
                    parameter.add_((0.02 * torch.randn(parameter.shape, generator=random)).to(parameter))
        for engine in engines:
            engine.load(self.versions[version])

    def engine(self, batch_size: int = 12, *, records: bool = True, ends: Sequence[int] = range(12)) -> Any:
        """One that decodes in graphs, or computes the same steps without them."""
        backbone, weights = self.roles.backbone, self.plan.config.generation.named("transformers").weights
        made = TransformersGenerator(
            self.roles, backbone.tokenizer, backbone.device, batch_size, weights=weights, ends=tuple(ends),
            in_graphs=True, decodings=tuple(self.plan.decodings),
        )  # fmt: skip
        if not records:
            made._graphs.problem = "its steps are to be computed one by one"
        return made

    def sampled(self, engine: Any, sampling: Sampling = PLAIN) -> list[Any]:
        groups: list[Group] = engine.sample(self.prompts, SAMPLES, list(SEEDS), sampling)
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        return [(c.token_ids, c.logprobs, str(c.finish_reason)) for c in completions]

    def record(self, engine: Any, sampling: Sampling) -> None:
        """Three tokens of each row, with room for as many as usual: a step is recorded, and another one compared."""
        few = NextTurn(turn=1, seed=0, max_tokens=3)
        engine.sample([replace(prompt, next_turn=few) for prompt in self.prompts], SAMPLES, list(SEEDS), sampling)


@contextmanager
def opened(fields: dict[str, Any]) -> Iterator[Model]:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder) / "model", dict(fields))
        with model.opened():
            yield model


def case(name: str) -> dict[str, Any]:
    """What `same` and `counted` find of a model."""
    with opened(LAYERED[name]) as model:
        return {"same": same(model), "counted": counted(model)}


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
        model.prompts[4] = replace(model.prompts[4], next_turn=None)
        model.record(engine, replace(PLAIN, max_tokens=2 * READ_EVERY + TOKENS))
        counts = []
        for tokens in (2 * READ_EVERY, 2 * READ_EVERY + TOKENS):
            COUNTS.clear()
            model.sampled(engine, replace(PLAIN, max_tokens=tokens))
            counts.append([Counter(COUNTS.launches), Counter(COUNTS.waits), Counter(COUNTS.uploads)])
        found[name] = [dict(more - less) for less, more in zip(*counts, strict=True)]
    return found


# -- kinds of models ---------------------------------------------------------------------------------------------------
YES = "yes", "a launch for a token of all rows"
NOT_FLASH = "no", "its keys and values are not those of flash kernels"
HOOKS = "no", "hooks of its modules have to run"
MOVES = "completions move through a sliding window"
KINDS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "adapters": ({}, YES),
    "DoRA": ({"words": "lora.use_dora=true"}, YES),
    "all weights": ({"words": "lora=null", "dtype": "float32"}, NOT_FLASH),
    "4 bits": ({"words": "model.quantization=4bit"}, YES),
    "attention sinks": ({"kind": "gpt_oss", **MOE, "head_dim": 64, "sliding_window": 128}, HOOKS),
    "experts": ({"kind": "olmoe", **MOE}, HOOKS),
    "images": ({"shown": "qwen2_5_vl"}, YES),
    "a window": (LAYERED["a window"], ("no", MOVES)),
    "a window that some rows exceed": (LAYERED["a window"] | {"sliding_window": 50}, ("for some rows", MOVES)),
    "short convolutions": ({"kind": "lfm2", "layers": 4, **CONVOLUTIONS}, NOT_FLASH),
    "float32": ({"dtype": "float32"}, NOT_FLASH),
    "plain kernels": ({"words": "model.kernels=plain"}, NOT_FLASH),
}
"""{kind: (fields of a Case, whether it has graphs and why, as the start-up table says it)}"""
QUICK_KINDS = "4 bits", "experts", "a window that some rows exceed", "float32", "images", "all weights"


def kinds(*names: str) -> dict[str, Any]:
    """{kind: [what the start-up table says, whether results are the steps', replays, problem, what is not covered]}"""
    found = {}
    for name in names:
        with four_bits.stand_in() if name == "4 bits" else nullcontext(), opened(KINDS[name][0]) as model:
            found[name] = of_a_kind(model)
    return found


def of_a_kind(model: Model) -> list[Any]:
    engines = model.engine(), model.engine(records=False)
    [[_, *row]], same, replays = engines[0].facts.rows, [], 0
    for version in range(2):
        model.load(engines, version)
        COUNTS.clear()
        rows = model.sampled(engines[0], SHORT)
        replays += COUNTS.launches["graph"]
        same.append(rows == model.sampled(engines[1], SHORT))
    return [row, all(same), replays, engines[0]._graphs.problem, uncovered(engines[0]._graphs)]


def uncovered(graphs: Graphs) -> int:
    """How many storages replays find that are neither among those that are asked for nor the engine's own."""
    own = [x.data_ptr() for x in tree_leaves(vars(graphs)) if isinstance(x, torch.Tensor)]
    places = {*graphs._addresses, *own}
    ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for graph in graphs._recorded.values() for x in graph.read]
    return sum(not any(start <= place < end for place in places) for start, end in ranges)


def stand_in() -> list[list[float]]:
    """Two results in memory of one pool: at first, after a replay of each graph, and when the first graph is gone."""
    x, pool, stream = torch.ones(1, device="cuda"), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    found, results, held = [], [], []
    for factor in (2, 3):
        held.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(held[-1], pool=pool, stream=stream, capture_error_mode="thread_local"):
            results.append(x * factor)
    for number in (None, 0, 1, 0, -1):
        if number == -1:
            held.clear()
        elif number is not None:
            held[number].replay()
        found.append([min(float(result), 9.0) for result in results])
    return found


# -- planted faults ------------------------------------------------------------------------------------------------
def faults(*names: str) -> dict[str, Any]:
    """{fault: [whether results are the steps' nevertheless, what the engine says, whether streams race, whether
    the allocator believes that a capture goes on, or keeps memory for graphs that are gone]}"""
    Stream.watched = True
    with opened(LAYERED["qwen2"]) as model:
        right = model.engine(records=False)
        right.load(model.versions[1])
        rows = model.sampled(right, SHORT)
        return {name: planted(model, rows, FAULTS[name]) for name in names}


@dataclass(frozen=True)
class Fault:
    """What is wrong, what happens between two versions, and what must become of it, in the words of `faults`.

    trusts: whether the comparison of the first replay is left out.
    """

    fault: Callable[[], Any] = nullcontext
    between: Callable[[Model, Any], None] = lambda model, engine: None
    trusts: bool = False
    same: bool = True
    said: str | None = None
    races: bool = False
    left: bool = False


def planted(model: Model, right: list[Any], fault: Fault) -> list[Any]:
    gc.collect()
    engine = model.engine()
    Stream.races.clear()
    compared = mock.patch.object(Graphs, "_compare", trusting) if fault.trusts else nullcontext()
    with fault.fault(), compared, mock.patch.object(graphs, "say") as say:
        engine.load(model.versions[0])
        model.record(engine, SHORT)
        fault.between(model, engine)
        engine.load(model.versions[1])
        same, problem = model.sampled(engine, SHORT) == right, engine._graphs.problem
        assert say.call_count == (problem is not None), "it is said once"
    del engine
    gc.collect()
    left = bool(CUDAGraph.underway or +CUDAGraph.bytes_of_pools)
    CUDAGraph.underway.clear()
    CUDAGraph.bytes_of_pools.clear()
    return [same, problem, bool(Stream.races), left]


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


@contextmanager
def waiting(release: str = "2.12", *, ends: bool = True) -> Iterator[None]:
    """A step that cannot be captured, with torch's allocator of this release."""
    ending = nullcontext() if ends else mock.patch.object(graphs, "_end_capture")
    with ending, mock.patch.object(CUDAGraph, "release", release), reading_a_token():
        yield


def reading_a_token() -> Any:
    advance = FlashPrefixCache.advance

    def reading(cache: FlashPrefixCache, token_R: Any) -> Any:
        logits = advance(cache, token_R)
        assert int(token_R[0]) >= 0
        return logits

    return mock.patch.object(FlashPrefixCache, "advance", reading)


def without_a_wait(of_the_side: bool) -> Any:
    """A stream does not wait for the other one: the one on which steps are recorded, or the usual one."""
    wait = Stream.wait_stream

    def wait_stream(stream: Stream, other: Stream) -> None:
        if (stream is torch.cuda.default_stream()) is of_the_side:
            wait(stream, other)

    return mock.patch.object(Stream, "wait_stream", wait_stream)


def rescale(model: Model, engine: Any) -> None:
    """Graphs are recorded with another scale of the adapter, a number of the host, before it is the usual one again."""
    layers = [layer for layer in engine.slot.model.modules() if isinstance(layer, LoraLinear)]
    for factor in (2.0, 0.5):
        for layer in layers:
            layer.scaling = {role: factor * scale for role, scale in layer.scaling.items()}
        if factor > 1:
            engine._graphs._forget()
            model.record(engine, SHORT)


def move_keys(model: Model, engine: Any) -> None:
    keys: FixedKeys = engine._graphs._keys
    kept.append(keys.own)
    keys.own = [(k.clone(), v.clone()) for k, v in keys.own]


def more_room(model: Model, engine: Any) -> None:
    """Longer completions than there is room for, the first time without the memory for them."""
    longer = replace(SHORT, max_tokens=30)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with mock.patch.object(Graphs, "_make_room", side_effect=error), suppress(torch.OutOfMemoryError):
        model.record(engine, longer)
    model.record(engine, longer)


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

DIFFERS = "a replay of 16 rows differs from the step that was recorded"
WAITS = "operation not permitted when stream is capturing: _local_scalar_dense"
FAULTS = {
    "none": Fault(),
    "a place of the host": Fault(place_of_the_host, said=DIFFERS),
    "a place of the host, trusted": Fault(place_of_the_host, trusts=True, same=False),
    "keys that moved": Fault(between=move_keys),
    "a step that waits": Fault(waiting, said=WAITS),
    "more room": Fault(between=more_room),
    "other ways": Fault(between=other_ways),
    "no memory": Fault(no_memory, said="CUDA out of memory. Tried to allocate 2.00 GiB."),
    "a step that waits, not ended": Fault(partial(waiting, ends=False), said=WAITS, left=True),
    "weights that moved": Fault(between=move_weights),
    "copies that move, unwatched": Fault(lambda: unwatched(new_copies), same=False),
    "another scale": Fault(between=rescale),
    "no wait for what is read": Fault(partial(without_a_wait, of_the_side=False), races=True),
    "keys that moved, unwatched": Fault(unwatched, move_keys, same=False),
    "copies that move": Fault(new_copies),
    "a step that waits, torch 2.13": Fault(partial(waiting, "2.13"), said=WAITS),
    "a step that waits, torch 2.14": Fault(partial(waiting, "2.14"), said=WAITS),
    "a step that waits, torch 2.13, not ended": Fault(partial(waiting, "2.13", ends=False), said=WAITS, left=True),
    "no wait for what is written": Fault(partial(without_a_wait, of_the_side=True), races=True),
}
QUICK_FAULTS = [*FAULTS][:13]  # what makes streams race comes last, also of the others: it leaves its traces


# -- memory --------------------------------------------------------------------------------------------------------
OF_ALL = replace(PLAIN, temperature=0.7, top_p=0.9, top_k=50, min_p=1e-9)
DECODINGS: dict[str, list[tuple[int, int, int, Sampling]]] = {
    "plain": [(6, 4, 48, PLAIN)],
    "top_k": [(6, 4, 48, replace(PLAIN, top_k=50))],
    "top_p": [(6, 4, 48, replace(PLAIN, top_p=0.9))],
    "all": [(6, 4, 48, OF_ALL)],
    "an evaluation of more prompts": [(6, 4, 48, PLAIN), (32, 1, 56, replace(PLAIN, temperature=0.0))],
    "an evaluation of few rows that sorts": [(6, 4, 48, PLAIN), (6, 2, 48, OF_ALL)],
    "longer prompts later": [(24, 1, 64, PLAIN), (6, 4, 48, PLAIN)],
}
"""{name: (prompts, completions of each, tokens of a prompt, how they are drawn) of each decoding of a run, the last
first}"""


def memory(*names: str) -> dict[str, Any]:
    """{decodings: [{part: planned bytes}, counted bytes]} of what graphs hold after a rehearsal."""
    found = {}
    with opened({"vocabulary": 8192, "completion": 64, "prompt": 48, "rows": (6, 4)}) as model:
        sizes, usual, _ = cast(Any, planned_here(model.plan))
        for name in names:
            decodings = [
                Decoding(num_prompts=prompts, samples=samples, longest=tuple(range(length)), sampling=how)
                for prompts, samples, length, how in DECODINGS[name]
            ]
            demand = replace(usual, work=replace(usual.work, decodings=tuple(decodings)))
            of_graphs = [part for part in parts(sizes, demand, 0) if part.key == "generation.transformers.graphs"]
            assert all(part.when is When.always for part in of_graphs)
            engine = model.engine(256)
            engine.load(model.versions[0])
            engine.score([[1, 2, 3, 4]])
            gc.collect()
            before = COUNTS.live
            rehearse_decoding(engine, decodings, 64)
            found[name] = [{part.name: part.bytes for part in of_graphs}, COUNTS.live - before]
            del engine
            gc.collect()
    return found
