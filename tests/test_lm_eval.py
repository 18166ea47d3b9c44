"""lm-evaluation-harness, in an environment of its own, against `rlft serve`: its numbers are ours.

The environment is made from the package index (0.8 GB), or is the one that RLFT_LM_EVAL names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import torch
from run_processes import happens, start_fresh

from rlft import cli
from rlft.commands import serve
from rlft.commands.policy import open_roles, policy_of
from rlft.config.model import resolve_path
from rlft.data.arithmetic import Arithmetic
from rlft.model.backbone import load_backbone
from rlft.runs.find import find
from rlft.types import Split

pytestmark = pytest.mark.slow

MODEL, KEY = "embedded:tiny-arithmetic", "a-secret-key"
PROBLEMS, LONGEST = 24, 48
DATA = {"difficulty": 2, "operations": ["+", "-", "*"], "size": 100, "held_out_size": PROBLEMS, "seed": 0}
DATASET = """
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/sums.jsonl"}}
test_split: test
doc_to_text: "{{question}}"
"""
GENERATE = """
task: sums
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: 48, temperature: 0}
filter_list:
  - name: tags
    filter: [{function: regex, regex_pattern: "<answer>(.*?)</answer>"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
SCORE = """
task: choices
output_type: multiple_choice
target_delimiter: " "
doc_to_choice: "{{[answer, '0']}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """The environment that has lm_eval."""
    if known := os.environ.get("RLFT_LM_EVAL"):
        return Path(known)
    folder = tmp_path_factory.mktemp("harness") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "lm_eval[api]==0.4.13", "transformers"], check=True, timeout=800)
    return folder


def evaluated(harness, folder, task, *words):
    """(the results of a task, what was asked and answered for each of its problems)."""
    out = folder / f"out-{task}"
    command = [harness / "bin" / "lm_eval", "run", "--tasks", task, "--include_path", folder, "--output_path", out]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    command += ["--log_samples", *words]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-4000:]
    [results], [samples] = list(out.rglob("results_*.json")), list(out.rglob("samples_*.jsonl"))
    return json.loads(results.read_text())["results"][task], [json.loads(x) for x in samples.read_text().splitlines()]


def test_it_counts_the_right_answers_that_rlft_eval_counts_and_sums_the_trainers_logprobs(
    harness, forks, tmp_path, make_batch
):
    run = tmp_path / "run"
    words = ("+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=4", "eval.every=0", "scoring.workers=0")
    sampling = ("generation=transformers", f"generation.max_tokens={LONGEST}", "model.device=cpu", "console=null")
    assert cli.run(["train", *words, *sampling, f"hydra.run.dir={run}"]) == 0
    problems = Arithmetic(**DATA).load(Split.held_out)
    rows = [{"question": problem.messages[0]["content"], "answer": problem.answer} for problem in problems]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("sums", GENERATE), ("choices", SCORE)):
        (tmp_path / f"{name}.yaml").write_text((DATASET + task).replace("FOLDER", str(tmp_path)))
    common = (f"run={run}", "generation.temperature=0")
    started = forks.start("serve", *common, "serve.port=0", f"serve.token={KEY}", cwd=tmp_path)
    assert happens(lambda: "OPENAI_BASE_URL=" in started.err.read_text(), within_s=120), started.err.read_text()
    url = started.err.read_text().partition("OPENAI_BASE_URL=")[2].split()[0]
    served = httpx2.get(f"{url}/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]

    chat = f"model={served},base_url={url}/chat/completions,tokenizer_backend=None"
    results, samples = evaluated(
        harness, tmp_path, "sums", "--model", "local-chat-completions", "--model_args", chat, "--apply_chat_template"
    )
    keys = ("eval.every=1", *(f"data.{name}={value}" for name, value in DATA.items() if name != "operations"))
    ours = start_fresh(
        "eval", *common, *keys, "data.operations=[+,-,*]", f"eval.num_prompts={PROBLEMS}", "eval.num_samples=1",
        cwd=tmp_path,
    ).wait()  # fmt: skip
    assert ours.code == 0, ours.err
    [file] = (run / "evaluations").glob("*.jsonl")
    head, *lines = map(json.loads, file.read_text().splitlines())
    assert len(samples) == len(lines) == PROBLEMS
    assert 0 < head["accuracy"] < 1, "right and wrong answers occur: it has not learned products"
    assert results["exact_match,tags"] == head["accuracy"]
    texts = {sample["doc"]["question"]: sample["resps"][0][0] for sample in samples}
    assert {text.strip() for text in texts.values()} == {line["completion"].strip() for line in lines}

    tokenizer = resolve_path(MODEL)
    completions = f"model={served},base_url={url}/completions,tokenizer={tokenizer},tokenizer_backend=huggingface"
    _, samples = evaluated(harness, tmp_path, "choices", "--model", "local-completions", "--model_args", completions)
    policy = policy_of(serve.read(find(run).config), find(run), print)
    assert policy.saved is not None
    backbone = load_backbone(policy.config.model)
    roles = open_roles(policy, backbone)
    roles.restore(policy.saved.adapters)
    greedy = []
    for sample in samples:
        for choice, [[value, is_greedy]] in zip((sample["doc"]["answer"], "0"), sample["resps"], strict=True):
            question = backbone.tokenizer(sample["doc"]["question"])["input_ids"]
            row = backbone.tokenizer(f"{sample['doc']['question']} {choice}")["input_ids"]
            assert row[: len(question)] == question
            with torch.no_grad():
                sums = roles.logprobs(make_batch([(0, question, row[len(question) :])]), "policy")
            expected = float(sums[0, len(question) :].sum())
            assert float(value) == pytest.approx(expected, abs=1e-4)
            greedy.append(str(is_greedy) == "True")
    assert not all(greedy), "a wrong answer is not the most likely one"
    started.kill()
