"""What the real vLLM holds of an adapter is read back and compared with what was published, in float32 and bfloat16."""

from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each
from slow_cases import slow

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP
from rlft.generation.vllm import slots
from rlft.generation.vllm.generator import VLLMGenerator
from rlft.generation.vllm.slots import read_slots
from rlft.loop.freshness import Freshness, StaleAdapterError, limits_of
from rlft.types import Adapter, Prompt, Sampling
from tests.generation.vllm.test_generator import MODEL, Trainer, new_generator

SEQUENCES = [list(range(10, 20)), list(range(70, 75))]


@dataclass
class Bench:
    generator: VLLMGenerator
    trainer: Trainer
    freshness: Freshness
    notes: list[str]
    published: Adapter

    def step(self):
        """The next version, after a step of Adam with a learning rate of 1e-6."""
        dice = torch.Generator().manual_seed(self.published.version)
        for parameter in (p for p in self.trainer.model.parameters() if p.requires_grad):
            parameter.data += 1e-6 * (2 * torch.rand(parameter.shape, generator=dice).round() - 1)
        return replace(self.published, version=self.published.version + 1, weights=self.trainer.weights())

    def publish(self, loaded=lambda new, old: new):
        """Publishes the next version, checks it; the engine loads what `loaded` makes of it and of the one before."""
        new = self.step()
        old, self.published = self.published, new
        adapter = loaded(new, old)
        if adapter is not None:
            self.generator.load(adapter)
        self.check(new)

    def check(self, *published, version=None):
        version = published[0].version if version is None else version
        return self.freshness.check(version, self.generator, self.trainer, *published)


@pytest.fixture(scope="module", params=[slow("float32"), "bfloat16"])
def engine(request):
    with closing(new_generator(dtype=request.param)) as generator:
        yield generator, getattr(torch, request.param)


@pytest.fixture
def bench(engine):
    (generator, dtype), trainer, notes = engine, Trainer(MODEL), list[str]()
    freshness = Freshness(SEQUENCES, limits_of(dtype), 1, notes.append)
    made = Bench(generator, trainer, freshness, notes, trainer.adapter(0))
    for _ in range(3):  # a healthy engine
        made.publish()
    return made


def swapped(new, first, second):
    """With the names of two modules exchanged."""
    names = {name: name.replace(first, "~").replace(second, first).replace("~", second) for name in new.weights}
    return replace(new, weights={names[name]: tensor for name, tensor in new.weights.items()})


def only(adapter, *parts):
    return {name: tensor for name, tensor in adapter.weights.items() if any(part in name for part in parts)}


def without(adapter, part):
    return {name: tensor for name, tensor in adapter.weights.items() if part not in name}


def with_old(new, old, part):
    return replace(new, weights={**new.weights, **only(old, part)})


FAULTS = {
    "a load that was lost": (lambda new, old: None, r"56 of the 56 tensors .*; it still holds version V \("),
    "old weights": (lambda new, old: replace(old, version=new.version), "; it still holds version V "),
    "a wrong scale": (lambda new, old: replace(new, config={**new.config, "lora_alpha": 24}),
                      r"28 of the 56 tensors .*lora_B with a norm of .* instead of .*, 2 times"),
    "rsLoRA's scale": (lambda new, old: replace(new, config={**new.config, "use_rslora": True}), "28 of the 56"),
    "layers exchanged": (lambda new, old: swapped(new, "layers.0.", "layers.1."),
                         r"28 of the 56 tensors .* which is that of model\.layers\.[01]\."),
    "k and v exchanged": (lambda new, old: swapped(new, "k_proj", "v_proj"),
                          r"16 of the 56 tensors .* which is that of .*[kv]_proj"),
    "a module left out": (lambda new, old: replace(new, weights=without(new, "layers.1.mlp.up_proj")),
                          r"2 of the 56 tensors .*layers\.1\.mlp\.up_proj"),
    "one layer of the version before": (lambda new, old: with_old(new, old, "layers.2"),
                                        r"14 of the 56 .*layers\.2.*; it still holds version V"),
}  # fmt: skip


@each("fault", FAULTS)
def test_an_engine_that_loads_something_else_is_stopped_at_a_learning_rate_of_1e_6(bench, fault):
    loaded, said = FAULTS[fault]
    said = said.replace("version V", "version " + str(bench.published.version))
    with pytest.raises(StaleAdapterError, match=rf"^freshness: the engine does not hold policy version \d+: .*{said}"):
        bench.publish(loaded)
    bench.publish()
    assert not bench.notes


def test_log_probs_alone_do_not_see_the_version_before(bench):
    """What the comparison of bits is for; the other faults of an adapter this large show in float32."""
    assert bench.check(version=bench.step().version) is not None


def test_what_is_written_into_a_slot_is_seen_also_in_what_fills_up_the_rank(bench):
    """The adapter has rank 6, the slots 8."""
    [model] = bench.generator._llm.apply_model(lambda model: model)
    for part, stacked, place in (
        ("0.self_attn.qkv_proj", "lora_b_stacked", (1, 0, 0, 3, 2)),
        ("3.mlp.down_proj", "lora_a_stacked", (0, 0, 0, 5, 0)),
        ("2.mlp.gate_up_proj", "lora_a_stacked", (1, 0, 0, 7, 1)),
        ("1.self_attn.o_proj", "lora_b_stacked", (0, 0, 0, 4, 7)),
    ):
        bench.publish()
        tensor = getattr(model.lora_manager.modules[f"model.layers.{part}"], stacked)[place[0]]
        tensor[place[1:]] = tensor[place[1:]] * 1.01 + 1e-3
        with pytest.raises(StaleAdapterError, match=r"1 of the 56 tensors that it was given are others, such as model"):
            bench.check(bench.published)


def test_a_prefix_cache_of_an_earlier_version_is_seen(bench, monkeypatch):
    prompts = [Prompt(id="0", messages=(), answer="", token_ids=tuple(range(10, 80)))]
    bench.generator.sample(prompts, 2, [0], Sampling(max_tokens=2, temperature=1.0))
    with monkeypatch.context() as patched:
        patched.setattr(bench.generator._llm.llm_engine, "reset_prefix_cache", lambda *_: True)
        with pytest.raises(StaleAdapterError, match=r"version 4: its prefix cache has \d+ blocks? of an earlier ver"):
            bench.publish()
    bench.publish()


def test_adapters_on_some_layers_are_compared_on_these(bench):
    for names in (("q_proj",), ("v_proj", "up_proj"), ("down_proj", "o_proj", "gate_proj")):
        new = bench.step()
        adapter = replace(new, weights=only(new, *names))
        bench.published = new
        bench.generator.load(adapter)
        assert bench.freshness._accept_adapter(adapter, bench.generator.loaded_adapter()) is None
        bench.generator.load(replace(adapter, config={**adapter.config, "lora_alpha": 13}))
        problem = bench.freshness._accept_adapter(adapter, bench.generator.loaded_adapter())
        assert f"{len(names) * 4} of the {len(names) * 8}" in str(problem)


def test_a_vllm_that_keeps_adapters_in_another_way_is_said_once_and_judged_by_log_probs(bench, monkeypatch):
    [model] = bench.generator._llm.apply_model(lambda model: model)
    with monkeypatch.context() as patched:
        patched.delattr(model.lora_manager, "packed_modules")
        for _ in range(2):
            bench.check(bench.step())
    assert len(bench.notes) == 1
    assert bench.notes[0].startswith("freshness: log-probs alone prove what the engine holds")
    assert "packed_modules" in bench.notes[0]


def test_an_engine_whose_layers_are_divided_loads_files_and_is_never_asked_for_its_model(bench, monkeypatch):
    """Two processes; in reality each of them has a part."""
    llm, files = bench.generator._llm, bench.generator._files
    monkeypatch.setattr(llm.llm_engine.vllm_config.parallel_config, "world_size", 2)
    monkeypatch.setattr(llm, "apply_model", None)
    folders = files._count
    bench.publish()
    bench.publish()
    assert files._count == folders + 2
    [note] = bench.notes
    assert note.endswith("vLLM divides its layers among 2 processes")


def test_layers_that_cannot_be_read_are_said_once_and_the_others_are_compared(bench, monkeypatch):
    monkeypatch.setattr("rlft.generation.vllm.generator.EXPERTS", ".mlp.")
    monkeypatch.setattr(slots, "EXPERTS", ".mlp.")
    bench.publish()
    bench.publish(lambda new, old: with_old(new, old, ".mlp."))
    [note] = bench.notes
    assert note.startswith("freshness: log-probs alone prove what the engine holds where it is not read back: tensors ")
    with pytest.raises(StaleAdapterError, match="16 of the 32 tensors"):
        bench.publish(lambda new, old: swapped(new, "k_proj", "v_proj"))


class Stacked:
    """A layer of vLLM's whose first part has three slices and whose second part has one."""

    lora_a_stacked = (*[torch.ones(1, 1, 8, 5)] * 3, torch.zeros(1, 1, 8, 5))
    lora_b_stacked = tuple(torch.full((1, 1, n, 8), float(n)) for n in (4, 2, 2, 6))


class OneLayer(torch.nn.Module):
    lora_manager = SimpleNamespace(
        lora_index_to_id=[7], modules={"both": Stacked()}, packed_modules={"both": ["first", "second"]}
    )


def test_a_layer_whose_part_has_several_slices_is_read_as_one(monkeypatch):
    rows = {f"{PREFIX}first": 8, f"{PREFIX}second": 6}
    first_down, first_up, second_down, second_up = read_slots(OneLayer(), 7, rows).values()
    assert (first_down.sum(), first_up[:, 0].tolist()) == (40, [4.0] * 4 + [2.0] * 4)
    assert (second_down.sum(), second_up.shape) == (0, (6, 8))
    others = [torch.zeros(1, 1, 8, 5), torch.ones(1, 1, 8, 5), *Stacked.lora_a_stacked[2:]]
    monkeypatch.setattr(Stacked, "lora_a_stacked", others)  # its slices read by different projections
    assert list(read_slots(OneLayer(), 7, rows)) == [f"{PREFIX}second{end}" for end in (DOWN, UP)]
