"""Loads that a run meets in one place: many completions, long ones, large data.

Each is a function that is called in a process of its own, so that what it holds is its own: it prints one line of JSON.

    python scripts/load_parts.py <part> <JSON of its arguments>
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MB = 10**6


def scoring(prompts: int, group: int, workers: int, rewards: list[str], characters: int = 120) -> dict[str, Any]:
    """A step's completions scored by worker processes; completions share their token ids, which are not measured."""
    from rlft.reward.workers.scorer import Scorer, specs
    from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

    ids, logprobs = tuple(range(48)), (-0.5,) * 48

    def completion(i: int) -> Completion:
        # Words that do not repeat, then the answer: each text is an object of its own, as an engine gives it.
        said = " ".join(f"{i * 7919 + k:x}" for k in range(max(1, characters // 8)))[:characters]
        text = f"<think>{said}</think><answer>{i % 10}</answer>"
        return Completion(text=text, token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.stop)

    groups = []
    for p in range(prompts):
        prompt = Prompt(id=f"p{p}", messages=({"role": "user", "content": f"{p}?"},), answer=str(p % 10))
        rollouts = (Rollout(prompt=prompt, completion=completion(p + i), policy_version=0) for i in range(group))
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    from rlft.config.compose import compose

    named = compose([f"reward=[{','.join(rewards)}]"])["reward"]
    import torch

    torch.zeros(1)
    scorer = Scorer(specs(named), workers, 600.0, "stop")
    try:
        scorer(groups[:workers])  # the workers are up
        before, began, used = rss_bytes(), time.monotonic(), processor_seconds()
        with peak_of_workers() as peak:
            scores = scorer(groups)
        seconds, own = time.monotonic() - began, processor_seconds() - used
        shape = list(scores.total.shape)
    finally:
        scorer.close()
    held = before / MB, peak_bytes() / MB
    means = {name: float(values.mean()) for name, values in scores.by_reward.items()}
    return {
        "shape": shape,
        "seconds": seconds,
        "main_seconds": own,
        "before": held[0],
        "peak": held[1],
        "worker_peak": max(peak.values(), default=0) / MB,
        "means": means,
    }


def write_data(file: str, gigabytes: float, characters: int) -> dict[str, Any]:
    """Questions of about so many characters, which do not repeat."""
    number = 0
    with Path(file).open("w") as lines:
        while lines.tell() < gigabytes * 1e9:
            for _ in range(1000):
                text = " ".join(f"{number * 2654435761 + k & 0xFFFFFFFF:x}" for k in range(characters // 9))
                lines.write(json.dumps({"prompt": f"{number}: {text}", "answer": str(number)}) + "\n")
                number += 1
    return {"rows": number, "bytes": Path(file).stat().st_size}


def data(file: str, max_tokens: int, tokenised: bool) -> dict[str, Any]:
    """A data file as `rlft train` reads it before its first step, then the prompts of 100 steps.

    tokenised: as a run does it; otherwise rows are read and parsed, which shows what is held of them in less time.
    """
    from rlft.config.compose import compose
    from rlft.config.instantiate import instantiate
    from rlft.config.model import ModelConfig
    from rlft.data.prompts import prompts_for_step, scan
    from rlft.model.backbone import load_tokenizer
    from rlft.types import Split

    plain = compose(["data=jsonl", f"data.path={file}"])
    settings: dict[str, Any] = {"path": "embedded:tiny-arithmetic", "revision": None, "trust_remote_code": False}
    rest = {name: value for name, value in plain["model"].items() if name not in settings}
    tokenizer = load_tokenizer(ModelConfig(**settings, **rest))
    before, began, used = rss_bytes(), time.monotonic(), processor_seconds()
    component, told = instantiate(plain["data"], "data"), io.StringIO()
    with contextlib.redirect_stderr(told):
        prompts = component.load(Split.train)
        read_s = time.monotonic() - began
        held_out = component.load(Split.held_out)
        if tokenised:
            prompts = scan(prompts, tokenizer, max_tokens, "drop", Split.train).prompts
            held_out = scan(held_out, tokenizer, max_tokens, "drop", Split.held_out).prompts
    scanned_s, processor = time.monotonic() - began, processor_seconds() - used
    began = time.monotonic()
    for step in range(100):
        found = [prompts[i] for i in prompts_for_step(len(prompts), 16, 0, step)]
        assert all(bool(prompt.token_ids) is tokenised for prompt in found)
    return {
        "train": len(prompts),
        "held_out": len(held_out),
        "read_seconds": read_s,
        "seconds": scanned_s,
        "processor_seconds": processor,
        "step_milliseconds": (time.monotonic() - began) * 10,
        "before": before / MB,
        "peak": peak_bytes() / MB,
        "told": told.getvalue().splitlines()[-1:],
    }


# -- measuring --------------------------------------------------------------------------------------------------------
def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """From /proc: what getrusage says begins with the peak of the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def processor_seconds() -> float:
    """Of this process and its ended children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@contextlib.contextmanager
def peak_of_workers() -> Iterator[dict[int, int]]:
    """{process: its peak in bytes} of the reward workers, filled while inside."""
    from load_processes import WORKER, Watcher

    peaks: dict[int, int] = {}
    with Watcher(os.getpid(), lambda: 0, 0.5) as watcher:
        yield peaks
        time.sleep(0.6)
    for sample in watcher.samples:
        if sample.role == WORKER:
            peaks[sample.pid] = max(peaks.get(sample.pid, 0), sample.rss)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "scoring": scoring,
    "write_data": write_data,
    "data": data,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](**json.loads(sys.argv[2]))))
