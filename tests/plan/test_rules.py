"""The rule that needs the data: what does not go with images is refused by its key. The others: test_refusals.py."""

import json

import pytest
import vision_folders
from in_one_test import each
from model_folders import with_vision

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.shapes import drawing
from rlft.types import Split, UserError

SMALL = ("+recipe=grpo_shapes", "data.size=40", "data.held_out_size=20", "prompts_per_step=4")


def planned(*words):
    return resolve(compose([*SMALL, *words])).plan()


def test_prompts_with_images_are_planned_with_the_tokens_of_their_images():
    plan = planned()
    # 9 tokens of the image, 2 around it, 9 letters, and 6 of the template.
    assert {*plan.train_prompts.num_tokens} == {26}


def without_processor(folder):
    (vision_folders.folder_of(folder, "qwen3_5") / "preprocessor_config.json").unlink()
    return folder


FOLDERS = {
    "mistral3": lambda folder: with_vision(folder, "mistral3"),
    "no_processor": without_processor,
    "gemma3": lambda folder: vision_folders.folder_of(folder, "gemma3"),
}
GAME = "environment=game reward=null environment.factory=rlft.environment.oracle_game.OracleGame"
REFUSED = [
    (None, "model.path=embedded:tiny-arithmetic", "model.path: the data have images, and a qwen2 reads none"),
    (None, "generation=vllm", "generation.engine: vLLM reads images with torchvision, which is not installed"),
    (None, "generation=scripted", "generation.engine: the scripted engine does not sample prompts with images"),
    (None, "snapshot.teacher=embedded:tiny-arithmetic", "snapshot.teacher: "),
    (None, "prompts.style=raw", "prompts.style: "),
    (None, "lora=null", "lora: a checkpoint of all weights would lack the vision tower of a qwen2_5_vl"),
    (None, "data=arithmetic lora=null", "lora: a checkpoint of all weights would lack the vision tower"),
    (None, GAME, "environment: continues with texts alone, and the data have images"),
    ("mistral3", "", "model.path: the data have images, and those of a mistral3 are not read exactly"),
    ("no_processor", "", "model.path: its processor of images cannot be read"),
    ("gemma3", "generation=vllm prompts.max_tokens=128 model.device=cpu",
     "generation.engine: a gemma3 reads an image both ways, and vLLM's attention on a CPU "),
]  # fmt: skip


@each(("folder", "words", "expected"), REFUSED)
def test_what_does_not_go_with_images_is_refused(folder, words, expected, tmp_path):
    path = [] if folder is None else [f"model.path={FOLDERS[folder](tmp_path / folder)}"]
    with pytest.raises(UserError) as refused:
        planned(*path, *words.split())
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize("split", Split)
def test_images_of_any_prompt_count(split, tmp_path):
    """The first prompt, and the longest one, have none."""
    picture = tmp_path / "a.png"
    picture.write_bytes(drawing("3-a").data)
    asked = {"train": ["is it so?" * 9, "is it?"], "held_out": ["is this so?" * 9, "is this?"]}
    for name, texts in asked.items():
        rows = [{"prompt": text, "images": [], "answer": "1"} for text in texts]
        rows[1]["images"] = [str(picture)] * 2 if name == split.value else []
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        "+recipe=grpo_shapes", "data=jsonl", "eval.every=1", "eval.num_prompts=2", "reward=length",
        f"data.path={tmp_path}/train.jsonl", f"data.held_out_path={tmp_path}/held_out.jsonl",
        "data.image_field=images", "prompts_per_step=1", "prompts.max_tokens=200",
    ]  # fmt: skip
    plan = resolve(compose(keys)).plan()
    assert plan.images == 2
    assert plan.tower is not None
    with pytest.raises(UserError, match="does not sample prompts with images"):
        resolve(compose([*keys, "generation=scripted"])).plan()
