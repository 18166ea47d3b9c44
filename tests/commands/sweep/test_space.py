"""What is chosen among: keys with several values or an interval, in Hydra's words."""

import re

import pytest
from in_one_test import each

from rlft.commands.sweep.space import Choice, Interval, Space, changes_no_number, check_changes_numbers, read_space
from rlft.config.compose import compose
from rlft.config.overrides import parse_overrides
from rlft.types import UserError


def interval(value, key="trainer.lr"):
    [one] = read_space([f"{key}={value}"], "train", is_study=True).varied
    assert isinstance(one, Interval)
    return one


def test_words_with_several_values_are_chosen_and_the_others_are_fixed():
    words = ["trainer.lr=interval(1e-5,1e-2)", "lora.rank=choice(4,16)", "algorithm=grpo,gspo"]
    space = read_space(["+recipe=grpo_arithmetic", *words], "train", is_study=True)
    assert space.fixed == ("+recipe=grpo_arithmetic",)
    assert space.varied == (
        Interval(key="trainer.lr", low=1e-5, high=1e-2, whole=False, log=True),
        Choice(key="lora.rank", values=("4", "16")),
        Choice(key="algorithm", values=("grpo", "gspo")),
    )
    assert space.size is None
    params = {"trainer.lr": 2.5e-4, "lora.rank": "16", "algorithm": "gspo"}
    assert space.words(params) == [*space.fixed, "trainer.lr=0.00025", "lora.rank=16", "algorithm=gspo"]


def test_each_value_and_each_end_is_a_corner_once():
    space = read_space(["trainer.lr=interval(1,2)", "lora.rank=4,8,16"], "train", is_study=True)
    assert [word for word, _ in space.corners()] == [
        "trainer.lr=1.0 lora.rank=4", "trainer.lr=2.0", "lora.rank=8", "lora.rank=16",
    ]  # fmt: skip
    assert dict(space.corners())["lora.rank=8"] == {"trainer.lr": 1.0, "lora.rank": "8"}
    assert read_space(["a=1,2", "b=1,2,3"], "train", is_study=True).size == 6


def test_runs_are_named_by_whole_keys_and_numbers_of_four_digits():
    words = ["+recipe=grpo_arithmetic", "trainer.lr=interval(1e-5,1e-2)", "lora.rank=4,8", "algorithm=grpo,gspo"]
    params = {"trainer.lr": 0.000123456, "lora.rank": "4", "algorithm": "grpo"}
    named = read_space(words, "train", is_study=True).name(params)
    assert named == "trainer.lr=0.0001235, lora.rank=4, algorithm=grpo"
    grid = read_space(["+recipe=grpo_arithmetic", "trainer.lr=1e-3,1e-4", "lora.rank=8,16"], "train", is_study=False)
    assert [grid.name(params) for params in grid.combinations()][3] == "trainer.lr=0.0001, lora.rank=16"
    fixed = read_space(["+recipe=grpo_arithmetic", "steps=4", "hydra.sweep.dir=swept"], "train", is_study=False)
    assert fixed.name({}) == "recipe=grpo_arithmetic, steps=4"


@each(("value", "log"), [
    ("interval(1e-5,1e-4)", True),  # ten times
    ("interval(1e-5,9e-5)", False),
    ("interval(0,1)", False),
    ("tag(linear,interval(1e-5,1e-2))", False),
    ("tag(log,interval(1,2))", True),
])  # fmt: skip
def test_wide_intervals_of_positive_numbers_are_sampled_on_a_log_scale_unless_a_tag_says_so(value, log):
    assert interval(value).log is log


def test_whole_numbers_are_drawn_from_an_interval_of_whole_numbers():
    assert interval("int(interval(4,64))", "lora.rank") == Interval(
        key="lora.rank", low=4, high=64, whole=True, log=True
    )
    space = Space(fixed=(), varied=(interval("int(interval(4,64))", "lora.rank"),))
    assert space.words({"lora.rank": 16}) == ["lora.rank=16"]


@each(("word", "fragment"), [
    ("trainer.lr=interval(1e-2,1e-5)", "trainer.lr: an interval goes from a number to a larger one"),
    ("trainer.lr=int(interval(1e-5,1e-2))", "trainer.lr: an interval of whole numbers has ends that are not whole, "
     "got int(interval(1e-5,1e-2)); round"),
    ("trainer.lr=interval(0.1,0.1)", "trainer.lr: an interval goes from a number to a larger one, "
     "got interval(0.1,0.1); write trainer.lr=0.1"),
    ("trainer.lr=tag(log,interval(0,1))", "trainer.lr: only positive numbers have logarithms"),
    ("trainer.lr=tag(wide,interval(0,1))", "trainer.lr: an interval is tagged log, linear or not at all"),
    ("lora.rank=4,8,4", "lora.rank: has a value twice, got 4"),
    ("seed=0,1", "seed: cannot be swept by sweep=optuna"),
    ("data.seed=0,1", "data.seed: is the seed of the data"),
    ("steps=10,20", "steps: is one for all trials"),
    ("hydra.sweep.dir=a,b", "hydra.sweep.dir: is one for the whole sweep"),
    ("lora.rank=int(interval(2.5,8.7))", "lora.rank: an interval of whole numbers has ends that are not whole"),
    ("lora.rank=int(interval(start=2,end=8.5))", "lora.rank: an interval of whole numbers has ends that are not w"),
    ("trainer.lr=interval(1e-5,inf)", "trainer.lr: an interval has two finite ends, got interval(1e-5,inf); give"),
    ("trainer.lr=interval(1e-5,nan)", "trainer.lr: an interval has two finite ends, got interval(1e-5,nan); give"),
    ("trainer.lr=interval(inf,inf)", "trainer.lr: an interval has two finite ends, got interval(inf,inf); give"),
    ("resume=runs/a", "resume: cannot be used in a sweep, got runs/a; resume a sweep with rlft resume"),
    ("steps=4", "sweep: has nothing to choose"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(word, fragment):
    with pytest.raises(UserError, match=f"^{re.escape(fragment)}"):
        read_space([word, "lora.dropout=0,0.1"] if word.startswith("resume") else [word], "train", is_study=True)


@each("word", [
    "name=a,b", "checkpoint.every=1,2", "cluster.jobs=1,2", "alarms.kl=1,2", "token_budget=512,1024",  # of any run
    "rollouts.every=1,2", "environment.workers=1,2", "snapshot.teacher_gpu_memory_utilization=0.1,0.2",  # of train
    "freshness.every=1,2", "scoring.workers=0,1", "model.device=cpu,cuda", "generation.transformers.batch_size=8,16",
])  # fmt: skip
def test_keys_that_change_no_number_cannot_be_chosen(word):
    key, _, values = word.partition("=")
    said = f"{key}: cannot be swept: it does not change what a run measures, got {values.replace(',', ', ')};"
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        check_changes_numbers(read_space([word], "train", is_study=True), compose([]))


def test_an_outside_engines_free_keys_cannot_be_chosen_either():
    section = {"engine": "fused_engine.Fused", "Fused": {"_target_": "fused_engine.Fused"}}
    assert not changes_no_number("generation.Fused.lends", {"command": "train"})
    assert changes_no_number("generation.Fused.lends", {"command": "train", "generation": section})


@each("word", [
    "trainer.lr=1e-3,1e-4", "algorithm=grpo,gspo", "model.path=a,b", "data.path=a,b", "lora.path=a,b",
    "generation.max_tokens=16,32", "cluster=local,mine", "reward.mine.seed=1,2", "eval.every=1,2",
])  # fmt: skip
def test_keys_that_change_numbers_can_be_chosen_or_are_refused_for_what_they_are(word):
    """Another file is another setting, and what evaluations depend on is refused by its own message."""
    space = read_space([word], "train", is_study=True)
    if word.startswith("cluster"):
        with pytest.raises(UserError, match=r"^cluster: cannot be swept"):
            check_changes_numbers(space, compose([]))
    else:
        check_changes_numbers(space, compose([]))


def test_values_with_colons_stay_as_the_records_of_older_studies_have_them():
    word, values = "reward.http.url=http://a:1/score,http://b:2/score", ("http://a:1/score", "http://b:2/score")
    escaped = tuple(value.replace(":", "\\:") for value in values)
    for is_study, expected in ((True, escaped), (False, values)):
        [choice] = read_space([word], "train", is_study=is_study).varied
        assert choice.extremes == expected
        for value in choice.extremes:  # either way a run has the address itself
            [parsed] = parse_overrides([f"reward.http.url={value}"], "train")
            assert parsed.value() in values


def test_a_plain_sweep_refuses_an_interval():
    assert read_space(["trainer.lr=1e-5,1e-4", "lora.rank=range(1,4)"], "train", is_study=False).size == 6
    with pytest.raises(UserError, match=r"trainer.lr: an interval has no values .*; add sweep=optuna"):
        read_space(["trainer.lr=interval(1e-5,1e-4)"], "train", is_study=False)


@each(("word", "refusal"), [
    ("lora.rank=shuffle(4,8)", "lora.rank: shuffle(..) gives another order each time"),
    ("lora.rank=shuffle(range(1,4))", "lora.rank: shuffle(..) gives another order each time"),
    ("algorithm=glob(gspo*)", "algorithm: a pattern does not say which values there are, got glob(gspo*); "
     "write algorithm=gspo,gspo_t"),
    ("lora.rank=glob(*)", "lora.rank: a pattern does not say which values there are, got glob(*); "
     "give lora.rank values with commas"),
])  # fmt: skip
def test_values_in_another_order_each_time_and_patterns_are_refused_in_any_sweep(word, refusal):
    for is_study in (True, False):
        with pytest.raises(UserError, match=f"^{re.escape(refusal)}"):
            read_space([word], "train", is_study=is_study)
