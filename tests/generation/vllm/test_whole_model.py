"""All weights of a model in the real vLLM engine: loaded in place, read back bit for bit; which faults are seen."""

from contextlib import ExitStack, closing
from pathlib import Path

import model_folders
import pytest
import torch
from real_engines import open_vllm
from slow_cases import slow

import rlft
from rlft.generation.vllm import generator as vllm_generator, whole_model
from rlft.loop.freshness import Freshness, StaleAdapterError
from rlft.model.backbone import read_backbone
from rlft.model.full_weights import WholeModel

ASSETS = Path(rlft.__file__).parent / "assets"
TEXTS = [list(range(5, 30)), list(range(40, 52))]
TOLERANCE = 1e-4
"""Nats; both sides compute in float32 with other kernels; seen: 8e-6."""


@pytest.fixture(scope="module")
def engine():
    """A model whose output head is tied to its embeddings."""
    with closing(open_vllm(ASSETS / "tiny-arithmetic", lora_rank=None)) as generator:
        yield generator


@pytest.fixture
def make_policy(run_config):
    return lambda path: WholeModel(read_backbone(run_config(f"model.path={path}", "model.device=cpu").model))


@torch.no_grad()
def moved(policy, seed):
    """What an update might do, and zeros of either sign."""
    noise = torch.Generator().manual_seed(seed)
    for _, parameter in policy.named_parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
        parameter.view(-1)[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0])


def fresh(notes=None):
    return Freshness(TEXTS, TOLERANCE, 1, [].append if notes is None else notes.append)


@pytest.mark.parametrize("head", ["tied", slow("of its own")])
def test_its_weights_are_loaded_in_place_and_read_back_bit_for_bit(head, engine, make_policy, tmp_path):
    with ExitStack() as stack:
        if head == "tied":
            folder, generator = ASSETS / "tiny-arithmetic", engine
        else:
            folder = model_folders.llama(tmp_path / "llama")
            generator = stack.enter_context(closing(open_vllm(folder, lora_rank=None)))
        policy, notes = make_policy(folder), list[str]()
        freshness = fresh(notes)
        for version in (1, 2):
            moved(policy, version)
            adapter = policy.publish(version)
            generator.load(adapter)
            gap = freshness.check(version, generator, policy, adapter)
            assert gap < TOLERANCE
            found = generator.loaded_adapter()
            assert found.tensors.keys() == adapter.weights.keys()
            assert found.unread == found.faults == ()
        assert notes == []
        [model] = generator._llm.apply_model(vllm_generator._itself)
        assert not hasattr(model, "lora_manager"), "no room is kept for adapters"


QUERY, DOWN_0, DOWN_1 = (
    f"model.layers.{name}.weight" for name in ("0.self_attn.q_proj", "0.mlp.down_proj", "1.mlp.down_proj")
)
FAULTS = {
    "one bit": (lambda load, llm, w: load(llm, w | {QUERY: torch.nextafter(w[QUERY], torch.tensor(9.0))}),
                r"1 of the 50 tensors that it was given are others, such as model\.layers\.0\.self_attn\.q_proj with"),
    "exchanged layers": (lambda load, llm, w: load(llm, w | {DOWN_0: w[DOWN_1], DOWN_1: w[DOWN_0]}),
                         r"2 of the 50 .*, which is that of"),
    "a lost tensor": (lambda load, llm, w: load(llm, {k: v for k, v in w.items() if k != "model.norm.weight"}),
                      r"1 of the 50 .* model\.norm .*; it still holds version 1"),
    "a lost load": (lambda *_: None, r"50 of the 50 tensors .*; it still holds version 1"),
    "a tied head that multiplies with the weights of before":
        (lambda load, llm, w: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(w.items())}),
         "lm_head multiplies with other weights than it holds"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_other_weights_than_were_published_are_seen(fault, engine, make_policy, monkeypatch):
    """A version is loaded soundly and the next one with the fault, which the freshness check then tells."""
    (spoil, said), load = FAULTS[fault], whole_model.load_whole
    policy, freshness = make_policy(ASSETS / "tiny-arithmetic"), fresh()
    for version in (1, 2):
        moved(policy, 10 + version)
        adapter = policy.publish(version)
        if version == 2:
            monkeypatch.setattr(vllm_generator, "load_whole", lambda llm, weights: spoil(load, llm, dict(weights)))
        engine.load(adapter)
        if version == 1:
            assert freshness.check(version, engine, policy, adapter) is not None
    with pytest.raises(StaleAdapterError, match=said):
        freshness.check(2, engine, policy, adapter)
