import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import rlft
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.data.files import files_of_split
from rlft.data.hub import HubTable, local_path
from rlft.system.hub import PROBE_SECONDS
from rlft.types import Split, UserError

NOBODY_LISTENS = "http://127.0.0.1:9"
"""The discard port: refused at once on any ordinary machine, so tests never leave it."""


def load_in_a_fresh_process(folder, endpoint, **keys):
    """Seconds and result of loading data=gsm8k as a new program would, with an empty cache below `folder`."""
    code = f"""
import yaml
from rlft.config.instantiate import instantiate
from rlft.config.catalog import config_folder
from rlft.types import Split
keys = yaml.safe_load((config_folder() / "data/gsm8k.yaml").read_text()) | {keys!r}
prompts = instantiate(keys, "data").load(Split.train)
print(len(prompts), prompts[0].answer)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(Path(rlft.__file__).parents[1])}
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return time.monotonic() - start, ended


def test_gsm8k_recipe_keys_read_a_folder_in_its_format(make_data, gsm8k_mini):
    data = make_data("gsm8k", path=str(gsm8k_mini))
    train, held_out = data.load(Split.train), data.load(Split.held_out)
    assert (len(train), len(held_out)) == (24, 8)
    assert [p.answer for p in train[:2]] == ["33", "1470"]  # "#### 1,470" without its comma
    assert train[22].answer == "-5"
    assert [m["role"] for m in train[0].messages] == ["system", "user"]
    assert "<think>" in train[0].messages[0]["content"]
    assert train[0].messages[1]["content"].startswith("Ines bakes 4 trays")


def test_without_a_held_out_split_a_part_of_the_training_split_is_held_out(make_data, gsm8k_mini):
    data = make_data("gsm8k", path=str(gsm8k_mini), held_out_split=None, held_out_fraction=0.3)
    one_file = make_data("gsm8k", path=str(gsm8k_mini / "train.jsonl"), held_out_fraction=0.3)
    for split in Split:
        assert data.load(split) == one_file.load(split)


@pytest.mark.parametrize("place", [".", "main", "data"])
def test_the_sets_own_parquet_files_are_read(make_data, gsm8k_mini, tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    for name in ("train", "test"):
        records = [json.loads(line) for line in (gsm8k_mini / f"{name}.jsonl").read_text().splitlines()]
        half = len(records) // 2
        for i, part in enumerate((records[:half], records[half:])):
            file = tmp_path / place / f"{name}-0000{i}-of-00002.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), file)
    assert len(files_of_split(tmp_path, "train", "main")) == 2
    ours, theirs = (make_data("gsm8k", path=str(path)).load(Split.train) for path in (tmp_path, gsm8k_mini))
    assert [(p.messages, p.answer) for p in ours] == [(p.messages, p.answer) for p in theirs]


def test_what_looks_like_a_path_or_exists_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("openai/gsm8k", "data.path") is None
    Path("openai/gsm8k").mkdir(parents=True)
    assert local_path("openai/gsm8k", "data.path") == Path("openai/gsm8k")
    for missing in ("/no/such/folder", "./no", "../no", "~/no/such", "no.jsonl", "no/such.jsonl"):
        with pytest.raises(UserError, match=r"^data\.path: there is no such file or folder, got "):
            local_path(missing, "data.path")


def test_a_folder_without_the_files_is_refused(make_data, gsm8k_mini, tmp_path):
    shutil.copy(gsm8k_mini / "train.jsonl", tmp_path)
    with pytest.raises(UserError, match=r"^data\.path: the folder has no files of the split test, got") as refusal:
        make_data("gsm8k", path=str(tmp_path)).load(Split.train)
    assert "put train.jsonl and test.jsonl there" in str(refusal.value)
    assert "data.held_out_split=null holds out a part of the split train" in str(refusal.value)
    kept = make_data("gsm8k", path=str(tmp_path), held_out_split=None)
    assert len(kept.load(Split.train)) + len(kept.load(Split.held_out)) == 24


def test_a_local_line_without_a_final_answer_is_named(make_data, write, tmp_path):
    file = write(tmp_path / "mine.jsonl", {"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": "2"})
    with pytest.raises(UserError, match=r"mine\.jsonl:2: the answer has no match of data\.answer_pattern"):
        make_data("gsm8k", path=str(file)).load(Split.train)


def test_gsm8k_answers(make_data, write, tmp_path):
    answers = {
        "so 9 * 2 = 18\n#### 18": "18", "#### -5": "-5", "#### 1,234,567": "1234567", "#### $20": "20",
        "#### 2.50": "2.50", "#### .5": ".5", "####7.": "7", "#### 1\n#### 2": "2",
    }  # fmt: skip
    rows = ({"question": f"{i}?", "answer": text} for i, text in enumerate(answers))
    data = make_data("gsm8k", path=str(write(tmp_path / "a.jsonl", *rows)), held_out_fraction=1.0)
    assert [prompt.answer for prompt in data.load(Split.held_out)] == list(answers.values())


def test_without_network_and_files_it_stops_in_time_naming_both_keys(tmp_path):
    seconds, ended = load_in_a_fresh_process(tmp_path, NOBODY_LISTENS)
    last = ended.stderr.strip().splitlines()[-1]
    assert "data.path: the hub cannot be reached" in last
    assert "got openai/gsm8k; use local copies: data.path=<folder" in last
    assert "model.path=<folder>" in last
    assert seconds < 15


@pytest.mark.slow
def test_a_hub_that_never_answers_costs_the_probe_only(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        seconds, ended = load_in_a_fresh_process(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "data.path: the hub cannot be reached" in ended.stderr
    assert PROBE_SECONDS <= seconds < 15


def test_a_cached_set_works_offline(gsm8k_mini, tmp_path):
    # The cache's layout for openai/gsm8k, main: made from the local files, then given the hub set's name.
    files = {name: str(gsm8k_mini / f"{name}.jsonl") for name in ("train", "test")}
    datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made" / "json").glob("default-*/*/*/")
    cached = tmp_path / "datasets" / "openai___gsm8k" / "main" / "0.0.0" / made.name
    shutil.copytree(made, cached)
    for file in cached.glob("json-*.arrow"):
        file.rename(cached / file.name.replace("json-", "gsm8k-"))
    info = cached / "dataset_info.json"
    told = json.loads(info.read_text()) | {"dataset_name": "gsm8k", "config_name": "main"}
    info.write_text(json.dumps(told))

    seconds, ended = load_in_a_fresh_process(tmp_path, NOBODY_LISTENS)
    assert ended.stdout.split() == ["24", "33"], ended.stderr
    assert seconds < 15


NO_SPLIT = "Unknown split \"tset\". Should be one of ['train']."


@pytest.mark.parametrize(("error", "key", "problem"), [
    ("DatasetNotFoundError", "data.path", "neither a local path nor a set on the hub"),
    ("DataFilesNotFoundError", "data.path", "cannot be loaded"),
    ("ConnectionError", "data.path", "cannot be reached"),
    (ValueError("BuilderConfig 'man' not found. Available: ['main']"), "data.subset", "Available: ['main']"),
    (ValueError(NO_SPLIT), "data.held_out_split", 'Unknown split "tset"'),
])  # fmt: skip
def test_what_the_hub_refuses_is_told_by_its_key(make_data, hub_sets, error, key, problem):
    if isinstance(error, str):
        error = getattr(datasets.exceptions, error, ConnectionError)("said the library")
    hub_sets.update(train=error, test=error)
    with pytest.raises(UserError) as refusal:
        make_data("gsm8k").load(Split.train)
    assert refusal.value.key == key
    assert problem in str(refusal.value)


def test_numbers_of_a_hub_set_are_those_that_it_holds():
    """Else a run that is recorded could not resume: its prompts would be others."""
    rows = datasets.Dataset(pyarrow.table({"answer": pyarrow.array([0.1, 2.0], pyarrow.float32())}))
    assert [record.fields for record in HubTable(rows, "set", "train").records()] == rows.to_list()
    assert rows[0] == {"answer": 0.10000000149011612}


def test_hub_rows_are_read_and_bad_ones_named_by_split_and_row(make_data, make_demonstrations, hub_sets):
    hub_sets["test"] = [{"question": "1?", "answer": "#### 1"}]
    hub_sets["train"] = [{"question": "2?", "answer": "#### 2"}, {"q": 3}]
    data = make_data("gsm8k")
    assert [(p.id, p.answer) for p in data.load(Split.held_out)] == [("test:0", "1")]
    said = r"some/set, train, row 0: is not a chat.*name other fields \(demonstrations\.\*field\)$"
    with pytest.raises(UserError, match=rf"^demonstrations\.path: {said}"):
        make_demonstrations("hub", path="some/set").load(Split.train)
    with pytest.raises(UserError, match="openai/gsm8k, train, row 1: field 'question' must be a string, it is null"):
        data.load(Split.train)
    hub_sets["train"] = hub_sets["test"]
    with pytest.raises(UserError, match="every training question is also held out"):
        data.load(Split.train)
    hub_sets["train"] = []
    with pytest.raises(UserError, match="holds no data, got openai/gsm8k, train"):
        data.load(Split.train)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"\x00" * 100], ids=["empty", "cut", "zeros"])
def test_a_damaged_parquet_file_is_refused_by_its_name(content, tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").write_bytes(content)
    words = ["data=gsm8k", f"data.path={tmp_path}", "data.subset=null"]
    with pytest.raises(UserError, match=r"data\.path: cannot be read \(.*, got .*\.parquet; "):
        instantiate(compose(words)["data"], "data").load(Split.train)
