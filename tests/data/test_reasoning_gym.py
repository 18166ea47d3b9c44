import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import slow

import rlft
from rlft.data import reasoning_gym as module
from rlft.data.records import identity
from rlft.types import Split, UserError

SMALL = {"size": 40, "held_out_size": 8}


def questions(prompts):
    return [p.metadata["reasoning_gym"]["entry"]["question"] for p in prompts]


def test_an_entry_becomes_a_prompt_with_all_its_verifier_needs(make_data):
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    data = make_data("reasoning_gym", **SMALL, options=options, prompt_template="Now: {question}")
    prompt = data.load(Split.train)[0]
    entry = prompt.metadata["reasoning_gym"]["entry"]
    assert prompt.id.startswith("chain_sum:")
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[1]["content"] == f"Now: {entry['question']}"
    assert prompt.answer == entry["answer"]
    assert prompt.metadata["reasoning_gym"]["task"] == "chain_sum"
    assert prompt.metadata["reasoning_gym"]["options"] == options
    assert pickle.loads(pickle.dumps(prompt)) == prompt


# Two digits, + or -: at most 200 distinct questions, so two seeds must meet the same ones.
FEW = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


@pytest.mark.usefixtures("gym_here")
@pytest.mark.parametrize(("task", "options"), [("chain_sum", FEW), slow("gsm_symbolic", {})])
def test_splits_are_disjoint_by_construction_also_between_seeds(make_data, task, options):
    data = [make_data("reasoning_gym", **SMALL, task=task, options=options, seed=seed) for seed in (0, 1)]
    train = {identity([{"role": "user", "content": q}]) for d in data for q in questions(d.load(Split.train))}
    held_out = {identity([{"role": "user", "content": q}]) for d in data for q in questions(d.load(Split.held_out))}
    assert len(held_out) > 8  # another seed brings other questions
    assert not train & held_out


@pytest.mark.usefixtures("gym_here")
def test_no_question_comes_twice_in_a_task_with_few_of_them(make_data):
    # tower_of_hanoi repeats itself: 18 distinct questions in the first 20.
    asked = questions(make_data("reasoning_gym", **SMALL, task="tower_of_hanoi").load(Split.train))
    assert len(set(asked)) == 40


@pytest.mark.slow
def test_ransom_note_is_the_same_under_every_hash_seed(tmp_path):
    # The library makes this task from a set: without a fixed hash seed a resumed run would see changed data.
    code = (
        "from rlft.data.reasoning_gym import make\n"
        "print([entry['question'] for _, entry in make('ransom_note', '{}', 3, 1, 0)['train']])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(rlft.__file__).parents[1])}
    command, how = [sys.executable, "-c", code], {"capture_output": True, "text": True, "check": True, "timeout": 60}
    first, second = (
        subprocess.run(command, env=environment | {"PYTHONHASHSEED": seed}, **how).stdout for seed in ("1", "2")
    )
    assert first == second != ""


@pytest.mark.usefixtures("gym_here")
def test_a_composite_of_tasks_can_be_asked_for(make_data):
    parts = [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "letter_counting")]
    prompts = make_data("reasoning_gym", **SMALL, task="composite", options={"datasets": parts}).load(Split.train)
    sources = {p.metadata["reasoning_gym"]["entry"]["metadata"]["source_dataset"] for p in prompts}
    assert sources == {"chain_sum", "letter_counting"}


@pytest.mark.usefixtures("gym_here")
@pytest.mark.parametrize(("keys", "key", "told"), [
    ({"task": "chain_sums"}, "data.task", "did you mean chain_sum"),
    ({"task": "zzzzzz"}, "data.task", "choose one of ab, acre"),
    ({"options": {"min_term": 3}}, "data.options", "min_terms"),
    ({"options": {"min_terms": 9, "max_terms": 2}}, "data.options", "max_terms must be >= min_terms"),
    ({"options": {"seed": 3}}, "data.options.seed", "set data.seed"),
    ({"options": {"size": 3}}, "data.options.size", "set data.size"),
    ({"task": "composite"}, "data.options", "Must specify at least one dataset"),
    ({"size": 0}, "data.size", "greater than 0"),
    ({"prompt_template": "?"}, "data.prompt_template", "{question}"),
    ({"size": 201, "options": FEW}, "data.size", "not that many distinct train questions of chain_sum"),
])  # fmt: skip
def test_what_the_library_cannot_make_is_refused(make_data, keys, key, told):
    with pytest.raises(UserError) as refusal:
        make_data("reasoning_gym", **SMALL | keys).load(Split.train)
    assert refusal.value.key == key
    assert told in str(refusal.value)


def test_a_missing_library_is_told_with_its_extra(make_data, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*'rlft\[reasoning-gym\]'"):
        make_data("reasoning_gym", **SMALL).load(Split.train)


def test_neither_file_imports_the_library_or_torch(tmp_path):
    code = (
        "import sys, rlft.data.reasoning_gym, rlft.data.hub, rlft.data.arithmetic, rlft.reward.reasoning_gym\n"
        "assert not {'reasoning_gym', 'torch', 'datasets', 'huggingface_hub', 'numpy'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(rlft.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_child_that_dies_is_no_silent_short_set(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended early"):
        module.make("chain_sum", '{"max_terms": 7}', 3, 1, 12345)
