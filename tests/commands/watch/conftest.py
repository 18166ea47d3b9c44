"""Runs that are really there, folders of runs as their loggers leave them, and texts that a model may write."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import yaml
from audited_runs import lines_of, replaced, write

from rlft.config.compose import compose
from rlft.runs import run_status
from rlft.runs.lines import encode

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
HOSTILE = {
    "script": "</script><script>document.title='owned'</script>",
    "handler": "<img src=x onerror=\"document.title='owned'\">",
    "link": "[a](javascript:document.title='owned') <a href=\"javascript:document.title='owned'\">click</a>",
    "frame": "<svg onload=document.title='owned'><iframe srcdoc='<script>top.document.title=1</script>'>",
    "template": "{{constructor.constructor('document.title=1')()}}`${document.title='owned'}`",
    "bidi": "safe\u202egnihton\u2066x\u200by\u200dz\u202c\ufeff",
    "escape": "\x1b[31mred\x1b]0;owned\x07",
    "blanks": "a\u3164b\u2800c\ufe0fd\u034f",
    "surrogate": "half \ud83d of one",
    "long": "x" * 2**20,
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request):
    """What a model may write, and nothing of which may run, or hide what stands there."""
    return request.param


@pytest.fixture
def make_run(tmp_path):
    """Writes the folder of a run as its loggers would: metrics, evaluations, and rollouts of groups of two.

    marks: {step: the alarm it is marked with}. tokens_in: the group that has values of tokens. The first group of step
    1 is asked again in the third last step.
    """

    def completion_line(step, group, index, text, steps, tokens):
        again = group == 0 and step in (1, steps - 2)
        values = {name: [-0.123] for name in ("old", "after", "reference", "entropy", "advantage")}
        line = {"step": step, "prompt_id": "again" if again else f"p{step}.{group}", "index": index}
        line |= {"prompt": [{"role": "user", "content": f"question {step}.{group}"}], "answer": "7", "completion": text}
        line |= {"token_ids": [5], "logprobs": [-0.1], "rewards": {"exact_match": float(index), "format": 1.0 - index}}
        line |= {"reward": float(index), "advantage": 2.0 * index - 1, "policy_version": step - 1}
        line |= {"finish_reason": "length" if group == 1 else "stop"}
        return line | ({"tokens": {"text": [text], **values}} if tokens else {})

    def make(name, *, steps=3, groups=4, seed=0, lr=0.01, completion="it is 7", marks=None, tokens_in=None):
        folder = tmp_path / "made" / name
        (folder / "rollouts").mkdir(parents=True)
        group_name = "other" if name == "other" else "made"
        plain = compose(["+recipe=grpo_arithmetic", f"name={group_name}", f"seed={seed}", f"trainer.lr={lr}"])
        (folder / "config.yaml").write_text(yaml.safe_dump(plain | {"origin": {"commit": "abc", "whole": True}}))
        metrics, evaluations = [], []
        for step in range(1, steps + 1):
            rising = 1 - 1 / (1 + step / 20)
            line = {"step": step, "reward/mean": rising + 0.01 * seed, "time/step": 1.0, "time/sample": 0.4}
            line |= {"time/update": 0.5, "policy/entropy": 1 / step, "memory/peak_bytes": 10**9}
            line |= {f"alarm/{marks[step]}": 1.0} if marks and step in marks else {}
            metrics.append(line)
            lines = [
                completion_line(step, g, i, completion, steps, g == tokens_in) for g in range(groups) for i in range(2)
            ]
            (folder / "rollouts" / f"step_{step:06d}.jsonl").write_bytes(b"".join(map(encode, lines)))
        example = {"prompt_id": "h", "question": "held?", "answer": "7", "score": 1.0, "finish_reason": "stop"}
        for step in (0, steps):
            text = f"it was {step} of {completion}"
            line = {"step": step, "accuracy": 0.5, "accuracy_se": 0.1, "examples": [example | {"completion": text}]}
            evaluations.append(line)
        (folder / "metrics.jsonl").write_bytes(b"".join(map(encode, metrics)))
        (folder / "eval.jsonl").write_bytes(b"".join(map(encode, evaluations)))
        (folder / "status.json").write_text('{"status": "finished"}')
        return folder

    return make


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """runs/first/a (finished), runs/first/b (another learning rate, killed), runs/second/c (sft, stopped)."""
    root = tmp_path_factory.mktemp("made") / "runs"
    a, b, c = root / "first" / "a", root / "first" / "b", root / "second" / "c"
    for source, copy, name in ((trained, a, "first"), (trained, b, "first"), (RECORDED / "sft", c, "second")):
        shutil.copytree(source, copy)
        config = copy / "config.yaml"
        config.write_text(re.sub("^name: .*$", f"name: {name}", config.read_text(), flags=re.MULTILINE))
    replaced("config.yaml", "lr: 0.02", "lr: 0.01")(b)
    write(b / "metrics.jsonl", [line | {"policy/lr": 0.01} for line in lines_of(b / "metrics.jsonl")])
    (b / run_status.FILE).write_text(json.dumps({"status": "running"}))
    told = {"status": "stopped", "reason": "the reward\x1b[31m raised"}
    (c / run_status.FILE).write_text(json.dumps(told))
    for age, name in ((300, "first/a"), (200, "first/b"), (7200, "second/c")):
        for file in [root / name, *(root / name).rglob("*")]:
            os.utime(file, (time.time() - age, time.time() - age))
    (root / "notes").mkdir()
    (root / "notes" / "config.yaml").write_text("mine: 1\n")
    return root
