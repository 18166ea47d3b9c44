"""Runs with engines that are not this process's own: vLLM, and on a Ray cluster; killed or stopped, and resumed."""

import json
from contextlib import suppress
from typing import Any

import model_folders
import psutil
import pytest
from disturbed_runs import END_S, UPDATE
from ray_cluster import TOKEN, two_machines
from run_folders import CONVERSATIONS, check_same, checkpoints, metrics, tiny
from run_processes import happens, is_alive, marked, start_fresh

from rlft.generation.sending import PREFIX, memory_folder
from rlft.runs import run_folder

# -- vLLM: killed, it leaves no process; resumed, it goes on as the same run -------------------------------------------
TOLERANCE = 1e-4  # nats; vLLM gives no promise to the bit
SAMPLE = "rlft.generation.vllm.generator:VLLMGenerator.sample"


def start(place, name, *words, events=()):
    """A run that notes its children and the seeds of each call of the engine in the file `name`."""
    look = {"at": SAMPLE, "do": "note", "argument": 3, "to": str(place / name)}
    return start_fresh(*words, cwd=place, events=(look, *events))


def noted(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def adapter_folders(pid):
    return list(memory_folder().glob(f"{PREFIX}{pid}-*"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    # Of Llama's shape, with a head of its own, which vLLM would wrap; lengths vary where nothing is learned yet.
    model = model_folders.llama(tmp_path_factory.mktemp("model") / "llama")
    engine = ("generation=vllm", "generation.vllm.max_num_seqs=16", f"model.path={model}")
    rewards = ("scoring.workers=1", "reward=length", "reward.length.mode=target", "reward.length.target=12")
    return [*tiny("steps=2", "eval.every=0", *engine, *rewards)[1:]]


@pytest.fixture(scope="module")
def undisturbed(keys, tmp_path_factory):
    """The place of a run that has ended, and its process."""
    place = tmp_path_factory.mktemp("vllm")
    return place, start(place, "whole", "train", *keys, "hydra.run.dir=undisturbed")


def test_a_run_with_vllm_trains_and_leaves_no_process(undisturbed):
    place, whole = undisturbed
    assert whole.wait().code == 0, whole.wait().err
    children = {child for line in noted(place / "whole") for child in line["children"]}
    assert children, "there was a worker to outlive it"
    assert happens(lambda: not marked(whole.mark) and not any(map(is_alive, children)), within_s=END_S)
    assert adapter_folders(whole.pid) == []
    lines = metrics(place / "undisturbed")
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["sampler/rounding"] for line in lines] == [0, 0]
    assert run_folder.read(place / "undisturbed")["generation"]["vllm"]["weights"] == "copy", "auto, as it is recorded"


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["an adapter", "all weights"])
def test_a_run_with_vllm_that_is_killed_in_its_second_step_leaves_no_process_and_resumed_it_is_the_same_run(
    trained, keys, undisturbed, tmp_path
):
    place, whole = undisturbed
    if trained == "all weights":
        keys = [*(key for key in keys if not key.startswith("lora.")), "lora=null", "trainer.lr=1e-4"]
        place, whole = tmp_path, start(tmp_path, "whole", "train", *keys, "hydra.run.dir=undisturbed")
    assert whole.wait().code == 0, whole.wait().err
    # The first call is the check of decoding.
    kill = {"at": SAMPLE, "call": 3, "do": "kill", "when": "after"}
    killed = start(tmp_path, "killed", "train", *keys, "checkpoint.every=1", "hydra.run.dir=run", events=(kill,))
    assert killed.wait().code == -9, killed.wait().err
    assert noted(tmp_path / "killed")[0]["children"] != [], "there was a worker to outlive it"
    assert happens(lambda: not marked(killed.mark), within_s=END_S)
    assert len(adapter_folders(killed.pid)) == 1, "nobody had a chance to clean up"

    resumed = start(tmp_path, "resumed", "resume", "run")
    assert resumed.wait().code == 0, resumed.wait().err
    assert happens(lambda: not marked(resumed.mark), within_s=END_S)
    assert adapter_folders(killed.pid) == adapter_folders(resumed.pid) == [], "the next engine does it"

    checked, *seeds = [line["argument"] for line in noted(place / "whole")]
    assert len(seeds) == 2
    assert seeds[0] != seeds[1]
    assert [line["argument"] for line in noted(tmp_path / "resumed")] == [checked, *seeds[1:]]
    for step in (1, 2):
        name = f"rollouts/step_{step:06d}.jsonl"
        expected, found = noted(place / "undisturbed" / name), noted(tmp_path / "run" / name)
        assert [line["policy_version"] for line in found] == [step - 1] * 12
        for one, other in zip(expected, found, strict=True):
            for name in ("prompt_id", "index", "policy_version", "token_ids", "reward", "finish_reason"):
                assert one[name] == other[name], name
            assert other["logprobs"] == pytest.approx(one["logprobs"], rel=0, abs=TOLERANCE)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


# -- Ray, with engines and scorers on another machine, that sample conversations ---------------------------------------
def actors():
    """The actors of the cluster that this process has started."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            titles.append(process.cmdline()[:1])
    return [title for [title] in filter(None, titles) if title.startswith("ray::Host")]


@pytest.mark.slow
def test_a_run_on_ray_that_is_stopped_goes_on_anywhere_and_leaves_no_process(
    forks, undisturbed_of, tmp_path, tmp_path_factory
):
    by_one_process, other_machine = undisturbed_of(*CONVERSATIONS), tmp_path_factory.mktemp("other machine")
    assert any(line["turns/mean"] > 1 for line in metrics(by_one_process)), "some conversations have two turns"

    def stop(call: int, do: str, *words: str) -> None:
        event = {"at": UPDATE, "call": call, "do": do}
        started = forks.start(*words, cwd=tmp_path, variables=TOKEN, events=[event])
        done = started.wait()
        assert done.code == 130, done.err
        assert happens(lambda: not marked(started.mark) and not actors(), END_S), (marked(started.mark), actors())

    with two_machines(other_machine) as cluster:
        on_ray: Any = ("cluster=ray", f"cluster.address={cluster.address}", "cluster.scoring=true", "cluster.engines=2")
        kept = ("checkpoint.every=1", "checkpoint.keep=9", "hydra.run.dir=run")
        words = [word for word in CONVERSATIONS if word != "scoring.workers=0"]
        stop(1, "terminate", *words, *on_ray, "scoring.workers=1", *kept)
        assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step_000001"]
        wrote = {file.name.rpartition("-")[0] for file in other_machine.rglob("*.log")}
        assert {"engine-0", "engine-1", "scorer-0"} <= wrote
        stop(2, "interrupt", "resume", "run")
    forks.run("resume", "run", "cluster=local", "cluster.engines=0", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", by_one_process)
