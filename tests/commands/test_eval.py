"""`rlft eval` samples in ways that training refuses, since nothing is learned from its completions."""

import json
from itertools import count

import pytest
from slow_cases import slow

from rlft import cli
from rlft.commands import chat
from rlft.commands.eval import resolve_evaluation
from rlft.commands.policy import sampled_by
from rlft.config.compose import compose
from rlft.types import UserError

TINY = (
    "model.path=embedded:tiny-arithmetic", "model.device=cpu", "data=arithmetic", "data.size=16",
    "data.held_out_size=8", "generation=transformers", "generation.max_tokens=16", "eval.num_prompts=4",
    "scoring.workers=0",
)  # fmt: skip


@pytest.fixture
def completions(tmp_path, monkeypatch):
    """Evaluates with these words; (prompt id, text) of every completion."""
    numbers = count()

    def evaluate(*words):
        folder = tmp_path / str(next(numbers))  # one for each: the files are named by the second
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert cli.run(["eval", *TINY, *words]) == 0
        [file] = folder.rglob("step_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        return [(line["prompt_id"], line["completion"]) for line in lines]

    return evaluate


REFUSED_IN_TRAINING = [
    slow(("generation.temperature=0",)),
    ("generation.min_p=0.999",),
    slow(("generation.top_p=0.001", "algorithm.mismatch=token_truncate")),
    slow(("generation.top_k=1", "snapshot.old=sampled")),
]
"""Each leaves the most likely token alone."""


def test_keys_that_only_training_reads_are_said_to_change_nothing(completions, capsys):
    completions("steps=5", "trainer.lr=0.1", "seed=3", "eval.num_samples=1")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    told = "has no effect: an evaluation does not read it"
    assert notes == [f"note: {key} {told}" for key in ("steps", "trainer.lr")]


@pytest.mark.parametrize("words", REFUSED_IN_TRAINING, ids=lambda words: words[0])
def test_greedy_evaluations_are_greedy_however_they_are_asked_for(words, completions, capsys):
    greedy = [line for line in completions("eval.num_samples=1", "eval.temperature=0") for _ in range(2)]
    assert completions("eval.num_samples=2") != greedy, "there is something to leave out"
    assert completions("eval.num_samples=2", *words) == greedy
    capsys.readouterr()
    assert cli.run(["train", *TINY, *words]) == 2, "training samples otherwise"
    assert capsys.readouterr().err.startswith(f"rlft: {words[0].partition('=')[0]}: ")


def test_a_recipe_is_evaluated_and_talks_without_what_its_training_requires(completions):
    with pytest.raises(UserError, match=r"^snapshot\.teacher: has no value yet"):
        compose(["+recipe=opd_arithmetic"])
    assert len(completions("+recipe=opd_arithmetic", "eval.num_samples=1")) == 4
    assert sampled_by(["+recipe=opd_arithmetic"])[2]["snapshot"]["teacher"] == "none"


def test_a_student_is_evaluated_and_talks_without_its_teacher_who_may_be_gone(tmp_path):
    """Also one whose algorithm refuses to train without a teacher, and whose teacher vLLM would compute."""
    teacher = ("algorithm=opd", f"snapshot.teacher={tmp_path / 'gone'}", "snapshot.teacher_hint=x")
    plain = compose([*TINY, *teacher, "snapshot.teacher_engine=vllm"])
    plan = resolve_evaluation(plain).plan(trains=False)
    assert (plan.config.snapshot.teacher, plan.config.snapshot.teacher_hint) == ("none", None)
    assert plan.config.snapshot.teacher_model is None  # nothing to load
    assert not any("teacher" in name for name in plan.fingerprints)
    chat.read(plain, raw=True)
