"""What a benchmark's work counts and writes: operations against a count of their own, prompts, and the model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_work import shape_of
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft.commands.doctor.work import Shape, Size, Workload, make_model, step_flops, write_prompts

pytestmark = pytest.mark.slow


@pytest.fixture
def small() -> Size:
    return Size(hidden=32, layers=2, heads=4, key_heads=2, intermediate=48, vocabulary=300)


def test_the_operations_of_a_step_are_those_of_its_layers_and_scores(small: Size, tmp_path: Path) -> None:
    work = Workload(prompts=3, group=2, prompt_tokens=5, completion_tokens=4, rank=2)
    base = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", small, "float32"))
    bare = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=work.rank, target_modules="all-linear"))
    tokens = work.prompt_tokens + work.group * work.completion_tokens  # of one group, packed
    count = 0

    def of_layer(name: str) -> Any:
        passes = 3 if "lora_" in name else 2  # forward, the input's gradient and, where it learns, the weight's
        seen = work.group * work.completion_tokens if "lm_head" in name else tokens

        def hook(module: torch.nn.Linear, *_: Any) -> None:
            nonlocal count
            count += work.prompts * passes * 2 * seen * module.in_features * module.out_features

        return hook

    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(of_layer(name))
    model(input_ids=torch.arange(tokens)[None])
    for _ in range(work.prompts):
        pairs = sum(place + 1 for place in range(work.prompt_tokens))
        for _ in range(work.group):
            pairs += sum(work.prompt_tokens + place + 1 for place in range(work.completion_tokens))
        # Scores and their product with the values, once forward and twice backward.
        count += pairs * small.layers * small.hidden * 2 * 2 * 3
    shape = shape_of(small, work.rank)
    assert step_flops(shape, work) == count
    assert Shape.of_model(bare, model.num_parameters(only_trainable=True)) == shape


def test_prompts_have_their_length_in_tokens_and_the_model_never_ends(small: Size, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", small, "float32")
    work = Workload(prompts=2, group=2, prompt_tokens=17, completion_tokens=4)
    rows = write_prompts(tmp_path / "prompts.jsonl", work, steps=3).read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {len(tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in rows} == {17}
    assert tokenizer.eos_token_id is None
    logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[-1] == small.vocabulary
