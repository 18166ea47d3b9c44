"""Runs, steps and evaluations made up for the loggers' tests."""

import pytest
from ran_commands import here, ran

from rlft.logger.interface import RunInfo
from rlft.runs.lines import StepRecord
from rlft.system import interrupt
from rlft.types import Completion, Evaluation, FinishReason, Group, Prompt, Rollout

__all__ = ["here", "ran"]


def rollout(name, text, version=0):
    prompt = Prompt(id=name, messages=({"role": "user", "content": f"What is {name}?"},), answer="3")
    completion = Completion(text=text, token_ids=(5, 6), logprobs=(-0.5, -0.25), finish_reason=FinishReason.stop)
    return Rollout(prompt=prompt, completion=completion, policy_version=version)


@pytest.fixture
def make_run(tmp_path):
    def make(step=0, steps=6, folder=tmp_path / "run"):
        sizes = [("prompts per step", "2", "prompts sampled in a step"), ("engine", "scripted", "as asked")]
        return RunInfo(folder=folder, name="tiny", config={"seed": 0}, step=step, steps=steps, sizes=sizes)

    return make


@pytest.fixture
def make_step():
    """A step of one prompt with two completions; `text` is the first one's. Keywords are metrics, `__` for `/`."""

    def make(step, text="2", rewards=(0.0, 1.0), **metrics):
        rollouts = tuple(rollout("1+2", t, step - 1) for t in (text, *["3"] * (len(rewards) - 1)))
        return StepRecord(
            step=step,
            metrics={name.replace("__", "/"): value for name, value in metrics.items()} or {"reward/mean": 0.5 + step},
            groups=[Group(prompt=rollouts[0].prompt, rollouts=rollouts)],
            rewards={"exact_match": [list(rewards)], "custom": [[0.25] * len(rewards)]},
            total_rewards=[list(rewards)],
            advantages=[[-1.0, 1.0, *[0.0] * (len(rewards) - 2)][: len(rewards)]],
        )

    return make


@pytest.fixture
def make_evaluation():
    def make(step, accuracy=0.5, texts=("3", "4")):
        examples = tuple(rollout(f"1+2+{i}*0", text, step) for i, text in enumerate(texts))
        scores = tuple(float(text.endswith("3")) for text in texts)
        return Evaluation(
            step=step, accuracy=accuracy, accuracy_se=0.01, metrics={"eval/pass@4": 0.75, "eval/exact_match": accuracy},
            examples=examples, example_scores=scores,
        )  # fmt: skip

    return make


@pytest.fixture(autouse=True)
def goes_on():
    """A call that was given up makes the process end soon after its command; this one has more tests to do."""
    yield
    interrupt._ends_soon = False
