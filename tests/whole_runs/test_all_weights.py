"""`rlft train lora=null`: what trains, also with engines in other processes, and what reads its checkpoint."""

import json
import os
import re
import signal
from typing import Any, cast

import pytest
import torch
from model_folders import classifier_folder
from run_folders import ALL_WEIGHTS, check_same, metrics, whole_lines
from safetensors.torch import load_file
from slow_cases import slow, slow_but

from rlft import cli
from rlft.generation import sending
from rlft.generation.pool import EnginePool
from rlft.generation.sending import Outgoing

# -- engines in other processes ----------------------------------------------------------------------------------------
APART = ("+recipe=grpo_arithmetic", *ALL_WEIGHTS, "generation.transformers.batch_size=4", "checkpoint.every=1")


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by one process") / "run"
    assert cli.run(["train", *APART, "steps=3", "eval.every=2", f"hydra.run.dir={folder}"]) == 0
    return folder


class Disturbed:
    """Kills engines of a run in this process: in a publish, and while they sample.

    Args:
        publish: (version, bucket) at which the second engine is killed, before the bucket is sent.
        unit: number of the call in which the first engine is killed, after it was sent.
    """

    def __init__(self, patch: pytest.MonkeyPatch, publish: tuple[int, int] | None, unit: int | None) -> None:
        self.notes, self.calls = list[str](), 0
        pools, start, bucket, begin = list[EnginePool](), EnginePool.__init__, Outgoing.bucket, EnginePool._begin

        def started(pool: EnginePool, *args: Any, note: Any, **more: Any) -> None:
            pools.append(pool)
            start(pool, *args, note=self.notes.append, **more)

        def sent(outgoing: Outgoing, number: int) -> Any:
            nonlocal publish
            if (outgoing.number, number) == publish:
                publish = None
                os.kill(cast(Any, pools[0]._slots[1].worker).pid, signal.SIGKILL)
            return bucket(outgoing, number)

        def begun(pool: EnginePool, *args: Any) -> Any:
            work = begin(pool, *args)
            self.calls += 1
            if self.calls == unit:
                os.kill(cast(Any, work.slot.worker).pid, signal.SIGKILL)
            return work

        patch.setattr(sending, "BUCKET", 2**20)
        patch.setattr(EnginePool, "__init__", started)
        patch.setattr(Outgoing, "bucket", sent)
        patch.setattr(EnginePool, "_begin", begun)


# Four buckets of 1 MiB hold the weights: one is killed in the middle of a publish, one while it samples.
@pytest.mark.parametrize(("publish", "unit"), [((2, 1), None), slow(None, 11)], ids=["in a publish", "sampling"])
@pytest.mark.usefixtures("warm_workers")
def test_an_engine_in_another_process_that_is_killed_changes_no_bit(
    publish, unit, by_one_process, tmp_path, monkeypatch
):
    disturbed = Disturbed(monkeypatch, publish, unit)
    words = ("steps=3", "eval.every=2", "cluster.engines=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert cli.run(["train", *APART, *words]) == 0
    check_same(tmp_path / "run", by_one_process)
    [note] = disturbed.notes
    assert re.match(r"engine-([01]) is replaced: engine-\1 was killed by SIGKILL", note)
    assert note.startswith("engine-1") or publish is None


TRAINS = {
    "GRPO": "grpo_arithmetic",
    "an entropy bonus, tokens' values": "grpo_arithmetic algorithm.entropy_coef=0.01 token_values.every=1",
    "a reference that is refreshed": "grpo_arithmetic algorithm.kl_coef=0.1 snapshot.reference=copy"
    " snapshot.refresh_every=1",
    "PPO with a head": "ppo_arithmetic critic.kind=shared critic.init=base",
    "A2C that begins with its critic": "a2c_arithmetic critic.kind=shared critic.init=base critic.warmup_steps=1",
    "PPO and text": "ppo_ptx_arithmetic critic.kind=shared critic.init=base",
    "a teacher of its own": "grpo_arithmetic algorithm=opd snapshot.teacher=embedded:tiny-student",
    "the base with a hint as the teacher": "grpo_arithmetic algorithm=opd snapshot.teacher=base algorithm.top_k=4"
    " snapshot.teacher_hint=Answer",
    "plain kernels": "grpo_arithmetic model.kernels=plain snapshot.reference=base algorithm.kl_coef=0.1",
    "recomputed layers": "grpo_arithmetic model.gradient_checkpointing=true",
    "Muon": "grpo_arithmetic trainer.optimizer=muon",
    "two ranks": "grpo_arithmetic cluster.ranks=2",
    "ranks and engines": "grpo_arithmetic cluster.ranks=2 cluster.engines=2 trainer.optimizer=muon",
    "Kimi": "kimi_arithmetic minibatches=2",
}


@pytest.mark.parametrize("name", slow_but("PPO with a head", TRAINS))
def test_it_trains(name, tmp_path, tiny_path):
    """Every weight moves that a gradient reaches, and so do the steps' numbers."""
    folder, (recipe, *words) = tmp_path / "run", TRAINS[name].split()
    more = ("steps=2", "eval.every=0", f"hydra.run.dir={folder}")
    assert cli.run(["train", f"+recipe={recipe}", *ALL_WEIGHTS, *more, *words]) == 0
    after = load_file(folder / "checkpoints" / f"step_{len(metrics(folder)):06d}" / "model" / "model.safetensors")
    before = load_file(tiny_path / "model.safetensors")
    assert after.keys() == before.keys()
    unmoved = [key for key in after if torch.equal(after[key], before[key])]
    assert unmoved == []


def test_a_sequence_classifier_scores_it_since_it_stands_on_no_base(tmp_path, capsys):
    classifier = classifier_folder(tmp_path / "classifier")
    learned = ("reward=learned", f"reward.learned.path={classifier}")
    words = ("+recipe=grpo_arithmetic", *ALL_WEIGHTS, *learned, "steps=1")
    for planned in (("train", *words), ("sft", "+recipe=sft_arithmetic", "lora=null", *learned, "model.device=cpu")):
        assert cli.run(["plan", *planned, "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]["as_planned"]
        counted = [part["bytes"] for part in memory if part["part"] == "learned rewards"]
        assert counted == [(classifier / "model.safetensors").stat().st_size]
    folder = tmp_path / "run"
    assert cli.run(["train", *words, "eval.every=1", f"hydra.run.dir={folder}"]) == 0
    [step] = metrics(folder)
    assert step["reward/std"] > 0
    assert step["policy/grad_norm"] > 0
    before, after = map(json.loads, whole_lines(folder / "eval.jsonl"))
    assert before["eval/reward/learned"] != after["eval/reward/learned"]


def test_its_checkpoint_is_evaluated_as_it_evaluated_itself_and_named_by_other_runs(tmp_path):
    folder = tmp_path / "run"
    one_step = ("+recipe=grpo_arithmetic", *ALL_WEIGHTS, "steps=1", "eval.every=1")
    assert cli.run(["train", *one_step, f"hydra.run.dir={folder}"]) == 0
    own = json.loads(whole_lines(folder / "eval.jsonl")[-1])
    assert cli.run(["eval", f"run={folder}"]) == 0
    [file] = (folder / "evaluations").iterdir()
    again = json.loads(file.read_text().splitlines()[0])
    names = [key for key in own if key.startswith("eval/")]
    assert len(names) > 6
    assert {key: again[key] for key in names} == {key: own[key] for key in names}
    # Another run that trains all weights goes on from it: its base is this run's policy.
    assert cli.run(["train", *one_step, f"model.path={folder}", f"hydra.run.dir={tmp_path / 'next'}"]) == 0
    began = json.loads(whole_lines(tmp_path / "next" / "eval.jsonl")[0])
    assert {key: began[key] for key in names} == {key: own[key] for key in names}
    assert cli.run(["export", f"run={folder}", f"out={tmp_path / 'exported'}"]) == 0
    saved = folder / "checkpoints" / "step_000001" / "model" / "model.safetensors"
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == saved.read_bytes()
    assert cli.run(["resume", str(saved.parents[1]), "steps=2", f"hydra.run.dir={tmp_path / 'fork'}"]) == 0
    assert cli.run(["audit", str(folder)]) == 0
    assert whole_lines(folder / "chain.jsonl")
