"""What does not go with images is refused by its key, before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vision_folders
from model_folders import with_vision

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.shapes import drawing
from rlft.plan.train_plan import TrainPlan
from rlft.types import Split, UserError

SMALL = ("+recipe=grpo_shapes", "data.size=40", "data.held_out_size=20", "prompts_per_step=4")


def planned(*words: str) -> TrainPlan:
    return resolve(compose([*SMALL, *words])).plan()


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as error:
        planned(*words)
    return str(error.value)


def test_prompts_with_images_are_planned_with_the_tokens_of_their_images() -> None:
    plan = planned()
    # 9 tokens of the image, 2 around it, 9 letters, and 6 of the template.
    assert {*plan.train_prompts.num_tokens} == {26}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.path=embedded:tiny-arithmetic"], "model.path: the data have images, and a qwen2 reads none"),
        (["generation=vllm"], "generation.engine: vLLM reads images with torchvision, which is not installed"),
        (["generation=scripted"], "generation.engine: the scripted engine does not sample prompts with images"),
        (["snapshot.teacher=embedded:tiny-arithmetic"], "snapshot.teacher: "),
        (["prompts.style=raw"], "prompts.style: "),
        (["lora=null"], "lora: a checkpoint of all weights would lack the vision tower of a qwen2_5_vl"),
        (["data=arithmetic", "lora=null"], "lora: a checkpoint of all weights would lack the vision tower"),
        (
            ["environment=game", "reward=null", "environment.factory=rlft.environment.oracle_game.OracleGame"],
            "environment: continues with texts alone, and the data have images",
        ),
    ],
)
def test_what_does_not_go_with_images_is_refused(words: list[str], expected: str) -> None:
    assert refusal(*words).startswith(expected)


def test_a_family_whose_images_are_not_read_exactly_is_refused_by_name(tmp_path: Path) -> None:
    folder = with_vision(tmp_path / "mistral3", "mistral3")
    found = refusal(f"model.path={folder}")
    assert found.startswith("model.path: the data have images, and those of a mistral3 are not read exactly")


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    folder = vision_folders.folder_of(tmp_path / "qwen3_5", "qwen3_5")
    (folder / "preprocessor_config.json").unlink()
    assert refusal(f"model.path={folder}").startswith("model.path: its processor of images cannot be read")


def test_vllm_on_a_cpu_is_refused_where_an_image_is_read_both_ways(tmp_path: Path) -> None:
    folder = vision_folders.folder_of(tmp_path / "gemma3", "gemma3")
    found = refusal(f"model.path={folder}", "generation=vllm", "prompts.max_tokens=128", "model.device=cpu")
    assert found.startswith("generation.engine: a gemma3 reads an image both ways, and vLLM's attention on a CPU ")


@pytest.mark.parametrize("split", Split)
def test_images_of_any_prompt_count(split: Split, tmp_path: Path) -> None:
    """The first prompt, and the longest one, have none."""
    picture = tmp_path / "a.png"
    picture.write_bytes(drawing("3-a").data)
    asked = {"train": ["is it so?" * 9, "is it?"], "held_out": ["is this so?" * 9, "is this?"]}
    for name, texts in asked.items():
        rows = [{"prompt": text, "images": [], "answer": "1"} for text in texts]
        rows[1]["images"] = [str(picture)] * 2 if name == split.value else []
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"data.path={tmp_path}/train.jsonl",
        f"data.held_out_path={tmp_path}/held_out.jsonl",
        "data.image_field=images",
        "prompts_per_step=1",
        "prompts.max_tokens=200",
    ]
    keys = ["+recipe=grpo_shapes", "data=jsonl", "eval.every=1", "eval.num_prompts=2", "reward=length", *words]
    plan: TrainPlan = resolve(compose(keys)).plan()
    assert plan.images == 2
    assert plan.tower is not None
    with pytest.raises(UserError, match="does not sample prompts with images"):
        resolve(compose([*keys, "generation=scripted"])).plan()
