"""Composition: recipes, a user's folder, values that must be given, and a run's config with changes typed later."""

import re
from pathlib import Path

import pytest

import rlft
from rlft import cli
from rlft.algorithm.grpo import GRPO
from rlft.algorithm.ops.surrogate import Mismatch
from rlft.config.compose import changed, compose, compose_run
from rlft.config.instantiate import instantiate
from rlft.config.resolved import build
from rlft.runs import run_folder
from rlft.types import UserError


def test_nothing_chosen_leaves_out_what_a_recipe_says_of_its_keys_but_not_what_is_typed():
    assert compose(["+recipe=grpo_calculator"])["environment"]["syntax"] == "xml"
    plain = compose(["+recipe=grpo_calculator", "environment=null"])
    assert "environment" not in plain
    assert build(plain).environment is None
    typed = compose(["+recipe=grpo_calculator", "environment=null", "environment.syntax=json"])
    assert typed["environment"]["syntax"] == "json", "which is refused: it is of no environment"


def test_a_run_gets_the_folder_hydra_names_and_a_resumed_one_its_own():
    assert re.fullmatch(r"runs/mine/[0-9-]+_[0-9-]+", str(compose_run(["name=mine"]).folder))
    assert compose_run(["hydra.run.dir=there"]).folder == Path("there")
    assert compose_run(["resume=runs/x/y"]).folder == Path("runs/x/y")


def test_a_key_that_a_file_requires_must_be_given_although_a_file_before_it_has_a_value(tmp_path):
    for name, text in {
        "recipe/first.yaml": "# @package _global_\nlora:\n  path: ???\nsteps: ???\n",
        "recipe/second.yaml": "# @package _global_\ndefaults: [first, _self_]\nsteps: 7\n",
        "recipe/third.yaml": "# @package _global_\ndefaults: [second, _self_]\nsteps: ???\nname: ???\n",
        "recipe/fourth.yaml": "# @package _global_\ndefaults: [{override /reward: '???'}]\nhydra: {job: {num: '???'}}",
        "recipe/fifth.yaml": "# @package _global_\nreward: ???\n",
        "algorithm/mine.yaml": "defaults: [grpo]\nclip_low: ???\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def missing(*words: str, problem: str = "has no value yet") -> str:
        with pytest.raises(UserError) as refused:
            compose(words, tmp_path)
        assert refused.value.problem == problem
        return refused.value.key

    assert missing("+recipe=first", "lora.path=adapter") == "steps"
    assert missing("+recipe=second") == "lora.path"
    assert missing("+recipe=third", "lora.path=adapter", "name=mine") == "steps"
    assert missing("+recipe=third", "lora.path=adapter", "steps=3") == "name"
    assert missing("+recipe=fourth", problem="something must be chosen") == "reward"
    assert list(compose(["+recipe=fourth", "reward=math"], tmp_path)["reward"]) == ["math"]
    for words in (["+recipe=fifth"], ["+recipe=fifth", "reward=math"]):
        assert missing(*words, problem="is chosen in a list of defaults") == "reward"
    assert missing("algorithm=mine") == "algorithm.clip_low"
    composed = compose(["+recipe=second", "lora.path=null", "algorithm=mine", "algorithm.clip_low=0.1"], tmp_path)
    assert (composed["lora"]["path"], composed["steps"], composed["algorithm"]["clip_low"]) == (None, 7, 0.1)
    # What only samples does not ask for them.
    assert compose(["+recipe=first"], tmp_path, requires=False)["steps"] == compose([])["steps"]
    assert compose(["data=jsonl", "data.path=a.jsonl"], requires=False)["data"]["path"] == "a.jsonl"


def test_a_users_folder_adds_choices(tmp_path):
    (tmp_path / "algorithm").mkdir()
    text = "# Mine.\ndefaults: [grpo, _self_]\nmismatch: off\nclip_low: 0.1\n"
    (tmp_path / "algorithm" / "mine.yaml").write_text(text)
    plain = compose(["algorithm=mine"], tmp_path)
    assert plain["algorithm"]["mismatch"] is False  # YAML reads a bare off so
    algorithm = instantiate(plain["algorithm"], "algorithm")
    assert (algorithm.clip_low, algorithm.mismatch) == (0.1, Mismatch.off)


def test_a_mismatch_mode_is_a_plain_word_on_the_command_line():
    for word in ("off", "'off'", "token_mask"):
        algorithm = instantiate(compose([f"algorithm.mismatch={word}"])["algorithm"], "algorithm")
        assert algorithm.mismatch == word.strip("'")


def test_load_algorithm_composes_and_overrides():
    algorithm = rlft.load_algorithm("grpo", clip_high=0.28)
    assert isinstance(algorithm, GRPO)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert rlft.load_algorithm("gspo").ratio == "sequence"


def test_load_algorithm_refuses_as_the_command_line_does():
    for name, overrides, message in (
        ("grop", {}, "algorithm: is not one of its choices, got grop; did you mean grpo?"),
        ("grpo", {"clip": 1.0}, "algorithm.clip: there is no such key"),
        ("grpo", {"clip_high": "a lot"}, "algorithm.clip_high: must be a number, got 'a lot'"),
    ):
        with pytest.raises(UserError) as refusal:
            rlft.load_algorithm(name, **overrides)
        assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("words", [("sft", "trainer.lr=1e-4"), ("train", "data=jsonl"), ("dpo", "name=${x}"), ("sft",)])
def test_cfg_prints_a_config_whose_values_are_not_all_given_yet(words, capsys):
    command, *overrides = words
    assert cli.run([command, "--cfg", "job", *overrides]) == 0
    printed = capsys.readouterr()
    assert (printed.err, "???" in printed.out or "${x}" in printed.out) == ("", True)


# -- a run's config with changes from the command line -----------------------------------------------------------------
PLAIN = compose(["generation.max_tokens=77", "generation.temperature=0.5", "reward.format.weight=3", "seed=9"])


def test_only_what_was_named_changes():
    after = changed(PLAIN, ["trainer.lr=0.5", "group_size=3"], None)
    assert (after["trainer"]["lr"], after["group_size"]) == (0.5, 3)
    after["trainer"]["lr"], after["group_size"] = PLAIN["trainer"]["lr"], PLAIN["group_size"]
    assert after == PLAIN


def test_a_choice_of_a_group_changes_the_whole_section_and_its_keys_follow_in_any_order():
    after = changed(PLAIN, ["data.path=rows.jsonl", "data=jsonl"], None)
    assert after["data"]["path"] == "rows.jsonl"
    assert "difficulty" not in after["data"]
    assert after["seed"] == 9


def test_what_a_recipe_refers_to_does_not_change_that_order(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# Mine\nname: ${data.path}_${data.subset}\n")
    after = changed(PLAIN, ["data.subset=main", "data.path=rows", "data=hub"], tmp_path)
    assert (after["data"]["path"], after["data"]["subset"]) == ("rows", "main")


def test_other_rewards_refer_to_the_runs_own_limits():
    after = changed(PLAIN, ["reward=[exact_match,overlong]"], None)
    assert list(after["reward"]) == ["exact_match", "overlong"]
    assert after["reward"]["overlong"]["max_tokens"] == 77
    again = changed(PLAIN, ["reward=[overlong]", "generation.max_tokens=55"], None)
    assert again["reward"]["overlong"]["max_tokens"] == 55, "whatever the order"


def test_another_engine_samples_as_the_run_did():
    after = changed(PLAIN, ["generation=vllm"], None)
    assert after["generation"] == {**PLAIN["generation"], "engine": "vllm"}


@pytest.mark.parametrize("began", ["snapshot.teacher_fingerprint", "teacher_fingerprint"])
def test_a_run_goes_on_with_its_teacher_in_another_place_and_with_no_other(began, tmp_path):
    """An adapter's fingerprint and that of a separate model have names of their own."""
    before, now, base = (
        {**PLAIN, "snapshot": {**PLAIN["snapshot"], "teacher": teacher}} for teacher in ("here", "there", "base")
    )
    run_folder.write_config(tmp_path, before, {began: "a" * 64})
    run_folder.check_same_config(tmp_path, now)
    run_folder.check_same_inputs({began: "a" * 64}, {began: "a" * 64})
    [other] = {"snapshot.teacher_fingerprint", "teacher_fingerprint"} - {began}
    for fingerprints in ({began: "b" * 64}, {other: "b" * 64}):
        with pytest.raises(UserError, match=r"^snapshot\.teacher: the .* \(fingerprint aaaaaaaaaaaa "):
            run_folder.check_same_inputs({began: "a" * 64}, fingerprints)
    with pytest.raises(UserError, match=r"snapshot\.teacher: here -> base"):
        run_folder.check_same_config(tmp_path, base)


@pytest.mark.parametrize(("override", "command", "message"), [
    ("grop_size=3", "train", "grop_size: there is no such key, got 3; did you mean group_size?"),
    ("group_size=3", "sft", "group_size: is a key of rlft train"),
    ("data=arithmetik", "train", "data: is not one of its choices, got arithmetik; did you mean arithmetic?"),
])  # fmt: skip
def test_a_change_of_what_is_not_there_is_refused(override, command, message):
    plain = compose([] if command == "train" else ["demonstrations.path=x"], command=command)
    with pytest.raises(UserError) as refused:
        changed(plain, [override], None, command)
    assert str(refused.value).startswith(message)
