"""What a benchmark's work counts and writes: operations against a count of their own, prompts, and the model."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from roofline import network
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft.commands.doctor.work import Size, Workload, make_model, write_prompts
from rlft.plan.roofline import operations_of, update

pytestmark = pytest.mark.slow


@pytest.fixture
def small():
    return Size(hidden=32, layers=2, heads=4, key_heads=2, intermediate=48, vocabulary=300)


def test_the_operations_of_a_step_are_those_of_its_layers(small, tmp_path):
    """Each of a linear layer's weights, forward and for the gradient of its input; where it learns, for its own."""
    work = Workload(prompts=3, group=2, prompt_tokens=5, completion_tokens=4)
    base = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", small, "float32"))
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    tokens, count = work.prompts * (5 + 2 * 4), 0
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            seen = work.completions * work.completion_tokens if "lm_head" in name else tokens
            count += (3 if "lora_" in name else 2) * 2 * seen * module.in_features * module.out_features
    kernels = [kernel for kernel in update(network(small), work.rows) if not kernel.name.startswith("attention")]
    assert operations_of(kernels) == pytest.approx(count)


def test_prompts_have_their_length_in_tokens_and_the_model_never_ends(small, tmp_path):
    folder = make_model(tmp_path / "model", small, "float32")
    work = Workload(prompts=2, group=2, prompt_tokens=17, completion_tokens=4)
    rows = write_prompts(tmp_path / "prompts.jsonl", work, steps=3).read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {len(tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in rows} == {17}
    assert tokenizer.eos_token_id is None
    logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[-1] == small.vocabulary
