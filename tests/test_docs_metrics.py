"""docs/reference/metrics.md names every metric that a run writes, and none that nothing writes."""

import json
import re
from pathlib import Path

import pytest

import rlft
from rlft import cli
from rlft.loop.evaluations import METRICS, metric_of
from rlft.loop.metrics import CAUSES
from rlft.types import FinishReason

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "reference" / "metrics.md"
PLACEHOLDERS = {"<name>": "[a-z_]+", "<k>": r"\d+", "<role>": "(policy|critic|reward|model)"}
SMALL = (
    "steps=2", "generation=transformers", "lora.rank=2", "lora.alpha=4", "model.device=cpu", "eval.num_prompts=4",
    "console=null", "name=x",
)  # fmt: skip
SAMPLED = ("generation.max_tokens=24", "data.size=16", "data.held_out_size=8", "scoring.workers=0")
TRAIN = ("train", *SMALL, *SAMPLED, "prompts_per_step=2", "group_size=2")
RUNS = [
    (*TRAIN, "algorithm=grpo", "algorithm.entropy_coef=0.01", "algorithm.dual_clip=3", "alarms.constant_reward=1",
     "token_values.every=1", "generation.drafts=history"),
    (*TRAIN, "algorithm=ppo_ptx", "critic.kind=adapter", "snapshot.reference=base", "eval.kl_base=true",
     "pretrain.path=embedded:arithmetic-text"),
    (*TRAIN, "algorithm=grpo", "algorithm.kl_coef=0.1", "snapshot.reference=base", "algorithm.kl_controller=adaptive",
     "algorithm.kl_target=0.1", "dynamic_sampling.max_rounds=1", "cluster.lanes=2", "curriculum.running=true"),
    (*TRAIN, "algorithm=opd", "snapshot.teacher=base", "snapshot.teacher_hint=x", "algorithm.teacher_in=loss",
     "algorithm.mismatch=token_truncate", "algorithm.off_policy_limit=0.1", "algorithm.reward_coef=1"),
    ("sft", *SMALL, *SAMPLED, "demonstrations.path=embedded:arithmetic-demonstrations", "data=arithmetic",
     "max_completion_tokens=64", "examples_per_step=2"),
    *((command, *(word for word in SMALL if not word.startswith(("generation", "eval."))),
       "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "rankings_per_step=2")
      for command in ("rm", "dpo")),
]  # fmt: skip


def named():
    """The names in the first column of every table."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name):
    text = re.escape(name)
    for placeholder, found in PLACEHOLDERS.items():
        text = text.replace(re.escape(placeholder), found)
    return re.compile(text)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every name in the metrics and evaluations of runs of many kinds."""
    folder, found = tmp_path_factory.mktemp("runs"), set()
    for number, words in enumerate(RUNS):
        assert cli.run([*words, f"hydra.run.dir={folder / str(number)}"]) == 0, words
    for file in [*folder.rglob("metrics.jsonl"), *folder.rglob("eval.jsonl")]:
        found |= {name for line in file.read_text().splitlines() for name in json.loads(line)}
    return found - {"step", "examples"}


def test_the_metrics_of_evaluations_on_the_page_are_those_of_the_table():
    page = {name for name in named() if name.startswith("eval/")}
    assert {name for name in page if not name.endswith("_se")} == {metric.name for metric in METRICS[1:]}
    with_error = {metric.name for metric in METRICS[1:] if metric.has_error}
    assert {name.removesuffix("_se") for name in page if name.endswith("_se")} == with_error


@pytest.mark.slow
def test_every_metric_of_an_evaluation_is_in_the_table_and_has_an_error_if_it_says_so(written):
    names = {name for name in written if name.startswith("eval/") and not name.endswith("_se")}
    found = {name: metric_of(name) for name in names}
    assert len(found) > 15
    assert [name for name, metric in found.items() if metric is None] == []
    assert {n for n, metric in found.items() if metric.has_error} == {n for n in names if f"{n}_se" in written}


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_explained(written):
    patterns = [pattern(name) for name in named()]
    assert len(written) > 50
    assert [name for name in sorted(written) if not any(p.fullmatch(name) for p in patterns)] == []


@pytest.mark.slow
def test_every_name_on_the_page_is_one_that_something_writes(written):
    made = {f"finish/{reason}" for reason in FinishReason} | {f"calls/{cause}_fraction" for cause in CAUSES}
    source = "".join(file.read_text() for file in Path(rlft.__file__).parent.rglob("*.py"))
    unknown = [
        name
        for name in named()
        if not any(pattern(name).fullmatch(other) for other in written | made) and f'"{name}"' not in source
    ]
    assert unknown == []
