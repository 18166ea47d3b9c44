"""What is refused of a sweep before its first run, and what makes trials comparable."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each
from slow_cases import slow

from rlft.commands.sweep.checks import (
    check_measured_alike,
    check_metric,
    check_possible,
    check_same_questions,
    checked_configs,
    cluster_of,
    corners_of,
    curve,
    gpus_of,
    is_finished,
    lower_is_better,
    planned,
)
from rlft.commands.sweep.space import Choice, Space
from rlft.config.compose import compose
from rlft.config.resolved import build, resolve
from rlft.config.trainer import ClusterConfig
from rlft.loop.evaluations import compared
from rlft.runs import run_folder, run_status
from rlft.types import UserError
from tests.commands.sweep.fake_studies import line, write

SMALL = ("generation=transformers", "model.device=cpu", "data.size=16", "data.held_out_size=4", "scoring.workers=0")
TOKENS = Choice(key="generation.max_tokens", values=("16", "256"))
PROMPTS = Choice(key="prompts.max_tokens", values=("64", "300"))


def with_recipes(folder, **texts):
    """A space of recipes with these keys."""
    (folder / "recipe").mkdir()
    for name, text in texts.items():
        (folder / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n# A recipe.\n{text}\n")
    return Space(fixed=SMALL, varied=(Choice(key="+recipe", values=tuple(texts)),))


def test_recipes_of_other_lengths_are_refused_though_they_read_the_same_files(tmp_path):
    space = with_recipes(tmp_path, one="steps: 2", same="steps: 2\nepochs: 2", longer="steps: 4")
    configs = checked_configs(corners_of(space), space, tmp_path, "train", "accuracy")
    with pytest.raises(UserError, match=r"^recipe: decides how many steps a run has, .*, got 2 and 4 steps; "):
        planned(corners_of(space), configs)


def test_a_study_stays_possible_whatever_its_other_values_are():
    """Each of the two is accepted with the first of the other, and both together are refused."""
    check_possible(Space(fixed=SMALL, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_server_that_does_not_answer_refuses_every_trial():
    fixed = (*SMALL, "reward=http", "reward.http.url=http://127.0.0.1:9/score")  # the discard port: nobody listens
    with pytest.raises(UserError, match=r"^reward\.http\.url: "):
        check_possible(Space(fixed=fixed, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_file_that_is_gone_refuses_every_trial_and_one_that_is_back_none(tmp_path):
    data = tmp_path / "data.jsonl"
    space = Space(fixed=(*SMALL[:2], "scoring.workers=0", "data=jsonl", f"data.path={data}"), varied=(TOKENS,))
    with pytest.raises(UserError, match=r"^data\.path: "):
        check_possible(space, None, "train")
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    check_possible(space, None, "train")


PREFERENCES = ("preferences=jsonl", "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64")
REWARDS = ["eval/reward/exact_match", "eval/reward/format"]


@each(("command", "words", "names"), [
    ("train", ["eval.num_samples=4", "eval.kl_base=true"], [*(f"eval/pass@{k}" for k in (1, 2, 4)), "eval/maj@4",
                                                            *REWARDS, "eval/kl_base"]),
    ("train", ["eval.num_samples=2", "reward=[length,exact_match]"], ["eval/pass@1", "eval/pass@2",
                                                                      "eval/reward/length", REWARDS[0]]),
    ("train", ["eval.num_samples=1"], ["eval/pass@1", *REWARDS]),
    ("sft", ["demonstrations=jsonl", "demonstrations.path=x.jsonl"], ["eval/loss"]),
    ("rm", PREFERENCES, ["eval/loss"]),
    ("dpo", PREFERENCES, ["eval/loss", "eval/margin", "eval/chosen_logprob"]),
])  # fmt: skip
def test_the_metrics_of_a_run_are_those_of_its_evaluations(command, words, names):
    accuracy = [] if command == "sft" else ["accuracy"]
    assert compared(compose([*words], command=command)) == [*accuracy, *names]
    assert "eval/maj@4" not in compared({**compose(["eval.num_samples=4"]), "reward": {}})


def test_a_metric_that_there_will_not_be_is_refused():
    said = r"sweep.metric: no evaluation has it, got eval/pass@8; did you mean eval/pass@4[?] All: accuracy"
    with pytest.raises(UserError, match=said):
        check_metric("eval/pass@8", compose(["eval.num_samples=4"]))
    for every, got in ((0, "0"), (None, "null")):
        with pytest.raises(UserError, match=rf"eval.every: trials are compared by .*, and there is none, got {got};"):
            check_metric("accuracy", {"command": "train", "eval": {"every": every}})
    check_metric("eval/reward/format", compose([]))


TEXT = ("pretrain.path=embedded:arithmetic-text",)
ALIKE = [  # (command, words of all trials, words of some, metrics that compare them, metrics that do not)
    *(("train", (), word, (), ("accuracy",)) for word in (
        "eval.num_samples=8", "reward=[format,exact_match]", "generation.temperature=0.5", "generation.top_p=0.9",
        "generation.top_k=5", "generation.min_p=0.1", "generation.stop=['4']", "scoring.on_error=0",
        "generation.include_stop_str_in_output=true",
    )),
    ("train", (), "reward.format.mode=soft", ("accuracy",), ("eval/reward/format",)),
    ("train", (), "reward.format.weight=0.5", ("eval/reward/format",), ()),
    ("train", (), "trainer.lr=1e-3 reward.exact_match.weight=2 algorithm=gspo generation.max_tokens=99",
     ("accuracy",), ()),
    ("train", ("eval.temperature=1.0",), "generation.temperature=0.5", ("accuracy",), ()),
    ("train", TEXT, "pretrain.max_tokens=33", ("accuracy",), ("eval/pretrain_loss",)),
    ("train", TEXT, "pretrain.sequences_per_update=3", ("eval/pretrain_loss",), ()),
    *(("dpo", PREFERENCES, word, ("accuracy", "eval/chosen_logprob"), ("eval/loss", "eval/margin")) for word in (
        "loss=ipo", "loss.beta=0.5", "snapshot.reference=base", "lora.path=elsewhere",  # which is the reference, too
    )),
    ("dpo", (*PREFERENCES, "loss=simpo"), "lora.path=elsewhere", ("eval/loss",), ()),  # which has no reference
    ("rm", PREFERENCES, "margin=1", ("eval/loss",), ()),  # its loss is measured without its margin
]  # fmt: skip


@each(("command", "words", "some", "compare", "do_not"), ALIKE)
def test_trials_are_compared_by_what_is_measured_alike(command, words, some, compare, do_not):
    first, other = (compose([*words, *more], command=command) for more in ([], some.split()))
    for metric in compare:
        check_measured_alike(first, other, metric)
    for metric in do_not:
        with pytest.raises(UserError, match="decides how a run is measured") as refused:
            check_measured_alike(first, other, metric)
        assert refused.value.key == some.partition("=")[0].removesuffix(".mode")


@pytest.mark.parametrize(
    ("command", "section"), [("dpo", "preferences"), slow("rm", "preferences"), ("sft", "demonstrations")]
)
def test_trials_are_compared_on_the_same_held_out_texts(command, section):
    """A limit of 20 tokens leaves some of the embedded completions out, which have up to 23."""
    words = [f"{section}=jsonl", f"{section}.path=embedded:arithmetic-{section}", "model.device=cpu"]
    whole, short, same = (
        resolve(compose([*words, *more], command=command)).plan()
        for more in (
            ["max_completion_tokens=64"],
            ["max_completion_tokens=20"],
            ["max_completion_tokens=64", "trainer.lr=1e-3"],
        )
    )
    check_same_questions("trainer.lr", whole, same)
    with pytest.raises(UserError, match=f"^max_completion_tokens: decides which {section} are held out"):
        check_same_questions("max_completion_tokens", whole, short)


def test_losses_and_divergences_are_better_when_they_are_lower_unless_a_direction_is_given():
    lower = ["eval/loss", "eval/pretrain_loss", "eval/kl_base"]
    others = ["accuracy", "eval/pass@4", "eval/reward/no_loss", "eval/reward/kl_base"]
    assert [name for name in (*lower, *others) if lower_is_better(name)] == lower
    for metric in (*lower, *others):
        assert lower_is_better(metric, "min")
        assert not lower_is_better(metric, "max")


def test_a_curve_leaves_the_evaluation_before_the_first_step_out(tmp_path):
    write(tmp_path, [line(0, 0.1), line(2, 0.3), line(4, float("nan"))])
    found = curve(tmp_path, "accuracy")
    assert list(found) == [2, 4]
    assert found[2] == 0.3
    assert math.isnan(found[4])
    assert curve(tmp_path / "none", "accuracy") == {}


def test_a_repeated_sweep_with_another_config_is_refused_also_in_a_quoted_folder(tmp_path):
    plain = compose(["steps=4", "model.date=2026-11-25"])
    folder = tmp_path / "my sweep" / "0"
    folder.mkdir(parents=True)
    run_folder.write_config(folder, plain, {})
    run_status.write(folder, 4, run_status.Status.interrupted)
    assert not is_finished(plain, folder)
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        is_finished({**plain, "seed": 1}, folder)
    with run_status.recording_status(folder, 4):
        pass
    assert is_finished(plain, folder)
    assert not is_finished({**plain, "name": "other"}, folder), "its plan says what it lacks"


def job(**cluster):
    plain = compose([f"cluster.{key}={value}" for key, value in cluster.items()])
    return SimpleNamespace(plain=plain, config=build(plain))


def test_what_cannot_differ_between_jobs_is_refused():
    assert cluster_of([job(jobs=3), job(jobs=3)]) == job(jobs=3).config.cluster
    without = SimpleNamespace(plain={"command": "sft"}, config=None)
    assert cluster_of([without]) is None
    with pytest.raises(UserError, match=r"cluster\.jobs: is one for all jobs of a sweep, got 1, 2"):
        cluster_of([job(jobs=1), job(jobs=2)])
    with pytest.raises(UserError, match=r"cluster\.ranks: a job that runs concurrently .*cluster\.jobs=2.* got 4"):
        cluster_of([job(jobs=2, ranks=4, lanes=4)])


def test_jobs_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(ClusterConfig(jobs=2)) == ["0", "1"]
    with pytest.raises(UserError, match=r"cluster\.jobs: .* there are 2 here, got 3; use cluster\.jobs=2"):
        gpus_of(ClusterConfig(jobs=3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert gpus_of(ClusterConfig(jobs=3)) == ["3", "5", "7"]
    assert gpus_of(ClusterConfig(jobs=9, kind="ray", address="auto")) == []
