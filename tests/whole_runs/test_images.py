"""Runs on prompts with images: stopped and resumed they are the same run, and files and audit name the images."""

import json

import pytest
import vision_folders
from run_folders import IMAGES, check_goes_on, check_same, learned
from slow_cases import slow

from rlft import cli
from rlft.commands.watch.report import report_of
from rlft.commands.watch.report_completions import HELD_OUT, TRAINED, data_url
from rlft.data.shapes import drawing
from rlft.runs.lines import rollout_file

WORDS = (*IMAGES, "checkpoint.every=1", "checkpoint.keep=99")
REPETITION = ("reward=repetition", "reward.repetition.unit=tokens", "reward.repetition.ngram=1")
"""A reward that differs among random answers."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    assert cli.run([*WORDS, "steps=4", f"hydra.run.dir={folder}"]) == 0
    assert learned(folder)
    return folder


def test_resumed_it_is_the_same_run(run, tmp_path):
    check_goes_on(tmp_path, WORDS, 2, 4, whole=run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_models_that_read_images_both_ways_learn_and_resume(kind, tmp_path):
    model = vision_folders.folder_of(tmp_path / kind, kind)
    words = (*WORDS, f"model.path={model}", "prompts.max_tokens=128", *REPETITION)
    assert learned(check_goes_on(tmp_path, words, 2, 3))


@pytest.mark.parametrize("kind", [None, slow("qwen3_vl"), slow("gemma3")])
@pytest.mark.usefixtures("warm_workers")
def test_ranks_and_engines_in_other_processes_give_the_same_run(kind, tmp_path):
    """Ranks get the vectors of images that rank 0 has read, engines read them again."""
    words = (*WORDS, "steps=2", "cluster.lanes=2")
    if kind is not None:
        model = vision_folders.folder_of(tmp_path / kind, kind)
        words = (*words, f"model.path={model}", "prompts.max_tokens=128", *REPETITION)
    assert cli.run([*words, f"hydra.run.dir={tmp_path / 'alone'}"]) == 0
    assert learned(tmp_path / "alone")
    apart = ("cluster.ranks=2", "cluster.engines=1", "cluster.shard_base=true")
    assert cli.run([*words, *apart, f"hydra.run.dir={tmp_path / 'apart'}"]) == 0
    check_same(tmp_path / "apart", tmp_path / "alone")


def test_its_report_shows_the_images_of_what_was_trained_on_and_held_out(run):
    [shown] = report_of([run], 10**6)["runs"]
    groups = shown["completions"]["groups"]
    assert {group["kind"] for group in groups} == {TRAINED, HELD_OUT}
    assert all(group["images"] == [drawing(group["id"]).digest] for group in groups)
    assert shown["images"] == {digest: data_url(drawing(group["id"])) for group in groups for digest in group["images"]}


def test_rollouts_name_their_images_and_an_audit_compares_them_with_the_data(run, capsys):
    assert cli.run(["audit", f"run={run}"]) == 0
    file = rollout_file(run, 3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["images"] == [drawing(line["prompt_id"]).digest] for line in lines)
    capsys.readouterr()
    file.write_text("".join(json.dumps({**line, "images": ["0" * 16]}) + "\n" for line in lines))
    assert cli.run(["audit", f"run={run}"]) == 1
    assert "its images are not those of the data" in " ".join(capsys.readouterr().out.split())
