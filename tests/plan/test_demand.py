"""What a plan counts of a vision tower is what its pass makes, without computing it."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import vision_folders
from model_folders import settings
from plans import bytes_by_part, bytes_of, counted, planned
from slow_cases import slow

from rlft.data.shapes import drawing
from rlft.generation.memory import When
from rlft.model.backbone import read_backbone
from rlft.model.images import KEPT_BYTES, read_image
from rlft.plan.demand import LiveBytes, TowerDemand
from rlft.plan.memory_parts import parts
from rlft.tokens.images import EXACT, processor_of

MEMORY = [("qwen2_5_vl", 1.0), ("idefics3", 0.0), ("idefics3", float("nan"))]
"""Whatever memory holds that is not written to: idefics3 and smolvlm leave out the parts that are all zeros."""


@pytest.mark.parametrize(
    ("kind", "memory_holds"),
    [*MEMORY, *(slow(*case) for case in product(EXACT, (0.0, 1.0, float("nan"))) if case not in MEMORY)],
)
def test_a_pass_without_numbers_takes_the_bytes_of_one_with_numbers(kind, memory_holds, tmp_path, monkeypatch):
    empty = torch.empty_strided

    def filled(*args, **keywords):
        memory = empty(*args, **keywords)
        return memory.fill_(memory_holds if memory.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty_strided", filled)
    backbone = read_backbone(settings(vision_folders.folder_of(tmp_path / kind, kind)))
    tower, found = backbone.images._load(), {}
    given = processor_of(backbone.tokenizer).tensors(drawing("9-b6bec288be"))
    for hollow in (False, True):
        with torch.no_grad(), LiveBytes(hollow=hollow) as alive:
            found[hollow] = read_image(tower, given, torch.device("cpu")).vectors.shape
        found[hollow] = (*found[hollow], alive.peak)
    assert found[True] == found[False]


WORDS = ("+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "model.device=cpu")


def test_the_tower_and_the_images_are_parts_of_a_plan():
    plan = planned(*WORDS, "model.dtype=float32", "steps=5", "eval.num_prompts=8")
    found = {part.name: (part.bytes, part.when) for part in parts(*counted(plan), 0)}
    # 29,232 weights, 3 frequencies and these once more; 9 vectors of 48 numbers of an image.
    assert found["vision tower"] == (4 * (29_232 + 6), When.always)
    assert plan.tower.vectors == 9 * 48 * 4
    assert found["an image in the tower"] == (plan.tower.reading, When.reading)
    assert found["vectors of images"] == (4 * 9 * 48 * 4, When.updating)
    # Of 20 prompts in 5 steps and 8 held out, and of the 4 of a step once more.
    assert found["vectors that are kept"] == ((20 + 8 + 4) * 9 * 48 * 4, When.always)
    assert planned("+recipe=grpo_arithmetic", "data.size=40").tower is None, "texts alone take none"


def test_engines_in_other_processes_on_the_same_device_have_towers_of_their_own():
    sizes = [bytes_of(*WORDS, f"cluster.engines={engines}") for engines in (0, 1)]
    for name in ("vision tower", "an image in the tower"):
        assert sizes[1][name] == 2 * sizes[0][name]
    assert sizes[1]["vectors of images"] == sizes[0]["vectors of images"]


def test_no_more_vectors_are_kept_than_there_is_room_for():
    demand = TowerDemand(weights=1, reading=2, vectors=2**20, num_prompts=1000)
    *_, kept = demand.parts("cpu", prompts_per_step=3, trained_at_once=2, sampled_at_once=2)
    assert kept.bytes == KEPT_BYTES + 3 * 2**20


def test_vectors_of_prompts_that_are_decoded_together_are_on_a_gpu():
    demand, number = TowerDemand(weights=1, reading=2, vectors=1000, num_prompts=8), {"prompts_per_step": 3}
    number |= {"trained_at_once": 2, "sampled_at_once": 5}
    for device, trained, sampled in (("cuda", 4000, 5000), ("cpu", 2000, 0)):
        found = {part.name: part.bytes for part in demand.parts(device, **number)}
        assert [found["vectors of images"], found["vectors of images that are sampled from"]] == [trained, sampled]
    plan = planned(*WORDS, "group_size=2", "generation=transformers", "generation.transformers.batch_size=6")
    model, counts = counted(plan)
    most = max(min(each.num_prompts, 6 // each.samples) for each in counts.work.decodings)
    on_a_gpu = bytes_by_part(model, replace(counts, device="cuda"))
    assert on_a_gpu["vectors of images that are sampled from"] == most * counts.tower.vectors > 0
