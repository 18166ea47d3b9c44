"""What the benchmarks count and write: operations against a count of their own, and a run from end to end."""

from __future__ import annotations

import copy
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft.commands.doctor.work import Shape, Size, Workload, make_model, step_flops, write_prompts

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "scripts"


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, which has its imports; gives what it says: `run("bench_step", "--out", place)`."""

    def run_script(name: str, *words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_script


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
    shape = Shape.of_size(small, work.rank)
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


def test_a_step_is_measured_and_told(run: Run, tmp_path: Path) -> None:
    words = ["--only", "rlft", "--shapes", "tiny", "--groups", "2", "--rounds", "1", "--steps", "2"]
    said = run("bench_step", *words, "--out", tmp_path, "--override", "model.device=cpu")
    [result] = json.loads((tmp_path / "step.json").read_text())
    [measured] = result["runs"]["rlft"]
    assert len(measured["seconds"]) == 2, "the first step is left out"
    assert measured["peak"] > 2**27
    for step in measured["seconds"]:
        stages = [step[name] for name in ("sample", "score", "credit", "update", "publish")]
        assert min(stages) > 0
        assert 0.8 * step["step"] < sum(stages) <= step["step"], "the stages are the step"
    told = (tmp_path / "step.md").read_text()
    assert told.strip() in said
    assert "| tiny G2 | rlft |" in told
    assert "of 1 processes x 2 steps, engine transformers." in told


@pytest.mark.parametrize(
    ("script", "words", "file", "told"),
    [
        ("bench_limit", "--size 1m --shapes 8+8 --group 2 --rounds 1 --steps 1", "limit.md", "| 8+8 G2 |"),
        ("bench_scaling", "--size 1m --axes group --groups 2 --steps 1", "scaling.md", "group"),
        ("check_plan", "--only=1m 8+8 G2", "plan.md", "| 1m 8+8 G2 |"),
    ],
)
def test_the_other_scripts_of_the_page_run_and_leave_their_table(
    script: str, words: str, file: str, told: str, run: Run, tmp_path: Path
) -> None:
    options = words.split() if script != "check_plan" else [words]
    run(script, *options, "--out", tmp_path)
    assert told in (tmp_path / file).read_text()


def test_the_overlap_is_measured_in_turn(run: Run, tmp_path: Path) -> None:
    sizes = ["prompts_per_step=2", "group_size=2", "generation.max_tokens=8", "data.size=32"]
    words = ["--rounds", "1", "--steps", "4", "--out", tmp_path, "--override", *sizes]
    run("bench_overlap", *words)
    table = (tmp_path / "overlap.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:] == ["---", "0", "1"]
    assert "times as long as with it" in table


def test_conversations_are_measured_beside_single_turns_at_equal_tokens(run: Run, tmp_path: Path) -> None:
    words = ["--size", "1m", "--prompt", "8", "--tokens", "8", "--group", "2", "--rounds", "1", "--steps", "1"]
    run("bench_turns", *words, "--out", tmp_path)
    told = (tmp_path / "turns.md").read_text()
    names = [line.split("|")[1].strip() for line in told.splitlines() if line.startswith("| ")]
    assert names == ["conversations", "---", "no environment", "1 turn", "2 turns", "4 turns"]
    # The last run is that of four turns: 8 prompts x 2 completions x 8 tokens; after three of the turns their end, the
    # 16 letters of an answer, the end of that and the start of the next turn, 19 tokens.
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["turns/mean"], last["tokens/completion"]) == (4.0, 128)
    assert last["tokens/environment"] == 16 * 3 * 19


def test_every_script_that_a_page_names_is_run_by_a_test() -> None:
    pages = "".join(page.read_text() for page in (SCRIPTS.parent / "docs").glob("*.md"))
    named = set(re.findall(r"scripts/(\w+)\.py", pages))
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    assert {name for name in named if name not in tests} == set()
