"""What a run holds does not grow with its steps, completions or a critic.

`scripts/load_test.py` measures the same over 2,000 steps and at full size; these are its parts at a size for the suite.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slow_cases import slow
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from load_processes import MAIN, SANDBOX, WORKER, Sample, Watcher, last_step, trends  # noqa: E402
from load_test import rater, words, write_prompts  # noqa: E402
from run_processes import environment, start_fresh  # noqa: E402

from rlft.config.compose import compose  # noqa: E402
from rlft.reward.workers.scorer import specs  # noqa: E402
from rlft.reward.workers.worker import MAX_PROBLEM, MAX_TRACEBACK, Failure, Loaded, load, score  # noqa: E402
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout  # noqa: E402

STEPS, WARM_UP = 40, 10
FLAT_MB = 30.0  # a 100 steps: what allocators do in 30 steps; a leak of 1 MB a step is 100

LEAKING = """
import os

class Leaking:
    def __init__(self):
        self.held = []

    def start(self, run): ...
    def stage(self, name): ...
    def evaluation(self, evaluation): ...
    def note(self, text): ...
    def finish(self, status): ...

    def step(self, record):
        leak(self.held)

HELD = []

def leak(held):
    held.append((bytearray(os.urandom(4096)) * 256, open(os.devnull)))

def reward(group):
    leak(HELD)
    return [1.0 for _ in group.rollouts]
"""


def write_leaks(place):
    """A logger and a reward that hold a megabyte and an open file more each time; what is said to use them."""
    (place / "leaking.py").write_text(LEAKING)
    for group, name, target in (("logger", "leaking", "Leaking"), ("reward", "leak", "reward")):
        file = place / "mine" / group / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        weight = "  weight: 1.0\n" if group == "reward" else ""
        file.write_text(f"{name}:\n  _target_: leaking.{target}\n{weight}")
    return ["--config-dir", "mine", "reward=[exact_match,leak]", "console=null", "logger=leaking"]


def small(place, url, *more):
    """What is said for a run of STEPS steps of two completions, with evaluations and checkpoints between them."""
    write_prompts(place / "sums.jsonl", 60)
    own = ("reward", "prompts_per_step=", "checkpoint.every=", "eval.every=", "hydra.")
    kept = [word for word in words(place / "sums.jsonl", url, STEPS, place) if not word.startswith(own)]
    kept += ["prompts_per_step=1", "checkpoint.every=10", "eval.every=20", "scoring.workers=1", "hydra.run.dir=run"]
    return [*kept, *more]


def watched(run, place):
    """{role: the trend of its process} until the run ends, and the roles of all that there was."""
    with Watcher(run.pid, lambda: last_step(place / "run" / "metrics.jsonl"), 0.1) as watcher:
        done = run.wait()
    assert done.code == 0, done.err
    found = trends(watcher.samples, WARM_UP, STEPS // 3)
    return {trend.role: trend for trend in found}, {sample.role for sample in watcher.samples}


@pytest.mark.slow
def test_memory_and_open_files_of_every_process_stay_flat_and_no_temporary_file_is_left(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with rater() as url:
        rewards = ["reward=[exact_match,code,http]", f"reward.http.url={url}", "reward.code.tests_field=tests"]
        rewards += ["reward.code.program_in=text", "reward.code.seconds=20", "console=null"]
        variables = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
        run = start_fresh(
            *small(tmp_path, url, *rewards), cwd=tmp_path, variables={**variables, "OMP_NUM_THREADS": "1"}
        )
        found, roles = watched(run, tmp_path)
    assert found.keys() >= {MAIN, WORKER}
    assert SANDBOX in roles
    for trend in found.values():
        assert trend.is_flat(FLAT_MB), trend
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_leak_of_a_megabyte_and_a_file_a_step_is_seen(forks, tmp_path):
    said = small(tmp_path, "http://localhost:1/score", *write_leaks(tmp_path))
    found, _ = watched(forks.start(*said, cwd=tmp_path), tmp_path)
    for role in (MAIN, WORKER):
        assert found[role].rss_slope > 2 * FLAT_MB, found[role]
        assert found[role].handles_after > found[role].handles_before + STEPS // 4
        assert not found[role].is_flat(FLAT_MB)


# -- how a trend is measured -------------------------------------------------------------------------------------------
def samples(rss, handles, role=MAIN):
    pairs = enumerate(zip(rss, handles, strict=True))
    return [Sample(step=i, role=role, pid=1, rss=r * 10**6, anonymous=r * 10**6, handles=h) for i, (r, h) in pairs]


def test_a_trend_is_of_the_steps_after_the_warm_up():
    # What is held after the last step does not count either.
    [trend] = trends(samples([900, *range(100, 138), 100], [5] * 40), 1, 20)
    assert (trend.rss_peak, round(trend.rss_slope, 6)) == (900.0, 100.0)  # 1 MB a step
    [trend] = trends(samples([900, *[100] * 38, 500], [9, *[5] * 38, 9]), 1, 20)
    assert (trend.rss_slope, trend.handles_before, trend.handles_after) == (0.0, 5, 5)
    assert trend.is_flat(1.0)
    [trend] = trends(samples([100] * 40, [5] * 20 + [6] * 20), 1, 20)
    assert not trend.is_flat(1.0), "a file more"
    assert trends(samples([100] * 40, [5] * 40), 30, 20) == [], "too short for a trend"


# -- many completions, and long ones -----------------------------------------------------------------------------------
def part(name, **arguments):
    """What a part of the load test measures, in a process of its own."""
    command = [sys.executable, str(SCRIPTS / "load_parts.py"), name, json.dumps(arguments)]
    done = subprocess.run(
        command, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_many_completions_are_scored_without_a_copy_of_them(tmp_path):
    small, large = (part("scoring", prompts=p, group=64, workers=1, rewards=["exact_match"]) for p in (20, 600))
    assert large["shape"] == [600, 64]
    # 38,400 completions: a score of each is 24 bytes and a reference, in lists and in three tensors; their texts are
    # 130 bytes each, their tokens 48 x 8 x 2 where they are sent. Tasks of all at once would be 35 MB.
    assert large["peak"] - large["before"] < 10
    assert large["worker_peak"] - small["worker_peak"] < 5, "a worker keeps nothing of a group"


@pytest.mark.slow
def test_a_part_of_the_load_test_prints_what_is_allowed_and_whether_it_holds(tmp_path):
    words = ("large-data", "--gigabytes", "0.01", "--out", str(tmp_path))
    command = [sys.executable, str(SCRIPTS / "load_test.py"), *words]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # Lines of 1 kB, written a thousand at a time: 10,000 are 10 MB.
    assert "| the file | 10 MB, 10,000 rows |" in done.stdout
    assert " MB | 121 MB | holds |" in done.stdout  # 120 and 10,000 rows of 58.5 bytes


MEGABYTE = 10**6
LONG = {
    "letters": "x" * MEGABYTE,
    "digits": f"<answer>{'7' * MEGABYTE}</answer>",
    "a sum": f"<answer>{'1+' * (MEGABYTE // 2)}1</answer>",
    "open tags": "<think>" * (MEGABYTE // 7),
    "answers": "<answer>1</answer>" * (MEGABYTE // 18),
    "boxes": "\\boxed{" * (MEGABYTE // 7),
    "fences": "```python\n" * (MEGABYTE // 10),
    "spaces": f"<answer>{' ' * MEGABYTE}1</answer>",
    "equations": "1+1=2 " * (MEGABYTE // 6),
    "commas": "1," * (MEGABYTE // 2),
    "signs": "-+" * (MEGABYTE // 2),
}
QUICK_S = 8.0


def group_of(text):
    prompt = Prompt(id="p", messages=({"role": "user", "content": "What is 1 + 1?"},), answer="2")
    said = Completion(text=text, token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.length)
    return Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=said, policy_version=0),))


@pytest.mark.parametrize(
    "name", ["exact_match", "math", *map(slow, ["format", "length", "cosine", "repetition", "equations"])]
)
def test_completions_of_a_megabyte_are_scored_within_seconds(name):
    reward = load(list(specs(compose([f"reward=[{name}]"])["reward"]).values()))[name]
    assert not isinstance(reward, Failure)
    for kind, text in LONG.items():
        outcome = score(reward, group_of(text), QUICK_S, [0, 0])
        assert not isinstance(outcome, Failure), f"{kind}: {outcome.problem[:200]}"


def test_an_error_that_quotes_its_completion_is_told_in_few_words():
    def raising(group: Group) -> list[float]:
        raise ValueError(group.rollouts[0].completion.text)

    failure = score(Loaded(reward=raising, scores_steps=False), group_of("x" * 10**7), QUICK_S, [0, 0])
    assert isinstance(failure, Failure)
    assert len(failure.problem) == MAX_PROBLEM
    assert len(failure.traceback) < MAX_TRACEBACK + 100
    assert "raise ValueError(group.rollouts[0].completion.text)" in failure.traceback


# -- a critic costs an adapter, not a network: PPO's peak memory next to GRPO's on the same batch ----------------------
LIMIT = 1.15


@pytest.fixture(scope="module")
def larger_model(tiny_path, tmp_path_factory):
    """Random weights, Qwen2-shaped, 13M parameters: activations outweigh what Python and torch take."""
    folder = tmp_path_factory.mktemp("larger")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=272, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def peak_bytes(forks, folder, model, *keys):
    """The most memory of a process that trains a step of 64 completions of 48 tokens in one micro-batch."""
    words = [
        *("train", "+recipe=grpo_arithmetic", f"model.path={model}", "steps=1"),
        *("prompts_per_step=8", "eval.every=0", "checkpoint.every=0", "console=null", "token_budget=16384"),
        *("algorithm.kl_coef=0.01", "snapshot.reference=base", f"hydra.run.dir={folder}", *keys),
    ]
    forks.run(*words, cwd=folder.parent, ends=0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens/completion"] > 2000, "random weights seldom end a completion"
    return lines[-1]["memory/peak_bytes"]


@pytest.mark.slow
def test_a_critic_adapter_adds_little_to_the_peak_memory(forks, larger_model, tmp_path):
    grpo = peak_bytes(forks, tmp_path / "grpo", larger_model)
    ppo = peak_bytes(forks, tmp_path / "ppo", larger_model, "algorithm=ppo", "critic.kind=adapter")
    print(f"peak memory: GRPO {grpo / 1e9:.2f} GB, PPO {ppo / 1e9:.2f} GB, ratio {ppo / grpo:.3f}")
    assert grpo > 0.9e9, "more than half of it must be the batch's: a fork has 0.3 GB of its own"
    assert ppo <= LIMIT * grpo
