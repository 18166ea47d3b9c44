"""What a plan counts of a vision tower is what its pass makes, without computing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_folders
from model_folders import settings

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.shapes import drawing
from rlft.generation.memory import When
from rlft.model.backbone import read_backbone
from rlft.model.images import KEPT_BYTES, read_image
from rlft.plan.demand import LiveBytes, TowerDemand
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import sizes_of
from rlft.tokens.images import EXACT, processor_of


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("memory_holds", [0.0, 1.0, float("nan")])
def test_a_pass_without_numbers_takes_the_bytes_of_one_with_numbers(
    kind: str, memory_holds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory holds that is not written to: idefics3 and smolvlm leave out the parts that are all zeros."""
    empty = torch.empty_strided

    def filled(*args: Any, **keywords: Any) -> torch.Tensor:
        memory = empty(*args, **keywords)
        return memory.fill_(memory_holds if memory.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty_strided", filled)
    backbone = read_backbone(settings(vision_folders.folder_of(tmp_path / kind, kind)))
    assert backbone.images is not None
    tower, found = backbone.images._load(), {}
    given = processor_of(backbone.tokenizer).tensors(drawing("9-b6bec288be"))
    for hollow in (False, True):
        with torch.no_grad(), LiveBytes(hollow=hollow) as alive:
            found[hollow] = read_image(tower, given, torch.device("cpu")).vectors.shape
        found[hollow] = (*found[hollow], alive.peak)
    assert found[True] == found[False]


def test_the_tower_and_the_images_are_parts_of_a_plan() -> None:
    words = ["+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "model.dtype=float32"]
    plan = resolve(compose([*words, "steps=5", "model.device=cpu", "eval.num_prompts=8"])).plan()
    model = sizes_of(plan.config.model, plan.config.lora)
    demand = plan.demand(model, False)
    assert demand is not None
    found = {part.name: (part.bytes, part.when) for part in parts(model, demand, 0)}
    # 29,232 weights, 3 frequencies and these once more; 9 vectors of 48 numbers of an image.
    assert found["vision tower"] == (4 * (29_232 + 6), When.always)
    assert plan.tower is not None
    assert plan.tower.vectors == 9 * 48 * 4
    assert found["an image in the tower"] == (plan.tower.reading, When.reading)
    assert found["vectors of images"] == (4 * 9 * 48 * 4, When.updating)
    # Of 20 prompts in 5 steps and 8 held out, and of the 4 of a step once more.
    assert found["vectors that are kept"] == ((20 + 8 + 4) * 9 * 48 * 4, When.always)


def test_engines_in_other_processes_on_the_same_device_have_towers_of_their_own() -> None:
    words = ["+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "model.device=cpu"]
    sizes = []
    for engines in (0, 1):
        plan = resolve(compose([*words, f"cluster.engines={engines}"])).plan()
        model = sizes_of(plan.config.model, plan.config.lora)
        demand = plan.demand(model, False)
        assert demand is not None
        sizes.append({part.name: part.bytes for part in parts(model, demand, 0)})
    for name in ("vision tower", "an image in the tower"):
        assert sizes[1][name] == 2 * sizes[0][name]
    assert sizes[1]["vectors of images"] == sizes[0]["vectors of images"]


def test_no_more_vectors_are_kept_than_there_is_room_for() -> None:
    demand = TowerDemand(weights=1, reading=2, vectors=2**20, num_prompts=1000)
    *_, kept = demand.parts("cpu", prompts_per_step=3, trained_at_once=2, sampled_at_once=2)
    assert kept.bytes == KEPT_BYTES + 3 * 2**20


def test_vectors_of_prompts_that_are_decoded_together_are_on_a_gpu() -> None:
    demand = TowerDemand(weights=1, reading=2, vectors=1000, num_prompts=8)
    found = {
        device: {part.name: part.bytes for part in demand.parts(
            device, prompts_per_step=3, trained_at_once=2, sampled_at_once=5
        )}
        for device in ("cpu", "cuda")
    }  # fmt: skip
    assert [found["cuda"][f"vectors of images{which}"] for which in ("", " that are sampled from")] == [4000, 5000]
    assert [found["cpu"][f"vectors of images{which}"] for which in ("", " that are sampled from")] == [2000, 0]
    words = ["+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "group_size=2"]
    plan = resolve(compose([*words, "generation=transformers", "generation.transformers.batch_size=6"])).plan()
    model = sizes_of(plan.config.model, plan.config.lora)
    counted = plan.demand(model, False)
    assert counted is not None
    assert counted.tower is not None
    on_a_gpu = {part.name: part.bytes for part in parts(model, replace(counted, device="cuda"), 0)}
    most = max(min(each.num_prompts, 6 // each.samples) for each in counted.work.decodings)
    assert on_a_gpu["vectors of images that are sampled from"] == most * counted.tower.vectors > 0


def test_a_run_that_samples_alone_has_a_tower() -> None:
    words = ["model.path=embedded:tiny-shapes", "data=shapes", "data.size=40", "data.held_out_size=8"]
    plan = resolve(compose([*words, "generation=transformers"], command="sample")).plan()
    demand = plan.demand(sizes_of(plan.config.model, plan.lora), False)
    assert demand is not None
    assert demand.tower == plan.tower
    assert demand.tower.vectors == 9 * 48 * 4


def test_texts_alone_take_no_tower() -> None:
    assert resolve(compose(["+recipe=grpo_arithmetic", "data.size=40"])).plan().tower is None
