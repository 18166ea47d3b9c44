import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from rlft.config.catalog import config_folder
from rlft.config.instantiate import instantiate
from rlft.data import hub
from rlft.data.records import sampled_line
from rlft.types import Completion, FinishReason, Prompt, Rollout, Split


@cache
def shipped(group, name):
    return yaml.safe_load((config_folder() / group / f"{name}.yaml").read_text())


def maker(group):
    """Makes the component of configs/<group>/<name>.yaml with some keys overridden."""

    def make(name, **overrides):
        return instantiate({**shipped(group, name), **overrides}, group)

    return make


@pytest.fixture
def makers():
    """{section: what makes its components}."""
    return {section: maker(section) for section in ("data", "demonstrations", "preferences")}


@pytest.fixture
def make_data(makers):
    return makers["data"]


@pytest.fixture
def make_demonstrations(makers):
    return makers["demonstrations"]


@pytest.fixture
def make_preferences(makers):
    return makers["preferences"]


@pytest.fixture
def write():
    """Writes objects as the lines of a JSONL file."""

    def write_lines(path, *rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write_lines


@pytest.fixture
def load(make_data, write, tmp_path):
    """Reads rows as prompts, all of which are held out: `load(*rows, **keys)`."""

    def load_rows(*rows, **keys):
        path = str(write(tmp_path / "a.jsonl", *rows))
        return make_data("jsonl", path=path, held_out_fraction=1.0, **keys).load(Split.held_out)

    return load_rows


@pytest.fixture
def trained_rows(write, tmp_path):
    """The training split of these lines by a maker; one other question is held out in a file of its own."""

    def load(make, *lines, **keys):
        other = {"prompt": "held out", "completion": "x", "completions": ["x", "y"], "scores": [1, 0]}
        held_out = write(tmp_path / "held_out.jsonl", keys.pop("other", other))
        file = write(tmp_path / "mine.jsonl", *lines)
        return make("jsonl", path=str(file), held_out_path=str(held_out), **keys).load(Split.train)

    return load


@pytest.fixture
def hub_sets(monkeypatch):
    """{split: its rows} of every set on a hub that answers; an exception in place of rows is raised."""
    import datasets.config

    sets = {}

    def load_dataset(path, subset, *, split, revision):
        if isinstance(sets[split], Exception):
            raise sets[split]
        return datasets.Dataset.from_list(list(sets[split]))

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return sets


@pytest.fixture
def sample():
    """Makes a line of `rlft sample`: the completion `text` of the prompt `name`."""

    def make(name, text, reward=0.0, *, cut=False, **keys):
        messages = ({"role": "user", "content": f"What is {name}?"},)
        ids = keys.pop("token_ids", [ord(c) for c in text] + [0] * (not cut))
        reason = FinishReason.length if cut else FinishReason.stop
        completion = Completion(text=text, token_ids=ids, logprobs=[], finish_reason=reason)
        prompt = Prompt(id=name, messages=messages, answer="2")
        rollout = Rollout(prompt=prompt, completion=completion, policy_version=3)
        fixed = {"index": 0, "rewards": {"format": 1.0}, "model": "tiny, step 3", "tokenizer": "0123456789ab"}
        return sampled_line(rollout, reward=reward, **{**fixed, **keys})

    return make


@pytest.fixture
def gsm8k_mini():
    """Problems in GSM8K's format, written for this project."""
    return Path(__file__).parent / "gsm8k_mini"
