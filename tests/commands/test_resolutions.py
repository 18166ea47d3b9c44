"""A config is typed once and planned once, whatever command reads it: counted through the command line."""

import io
import sys

import pytest
from slow_cases import slow

from rlft import cli
from rlft.config import instantiate
from rlft.config.resolved import Resolved
from rlft.config.schema import GenerationConfig, Root

SMALL = ("lora.rank=2", "model.device=cpu", "checkpoint.every=0", "console=null", "scoring.workers=0")
SAMPLES = ("generation=transformers", "generation.max_tokens=8")
TRAIN = ("train", "steps=1", "prompts_per_step=2", "group_size=2", "eval.every=0", "rollouts.every=0",
         "data.size=16", "data.held_out_size=4", *SAMPLES, *SMALL)  # fmt: skip


@pytest.fixture
def counts(monkeypatch, here):
    """{what: how often}: whole configs and `generation` sections that were typed, and plans that were made."""
    counted = {"configs": 0, "sections": 0, "plans": 0}
    from_mapping, plan = instantiate.from_mapping, Resolved.plan

    def typed(cls, values, prefix, command="train"):
        counted["configs"] += issubclass(cls, Root)
        counted["sections"] += cls is GenerationConfig
        return from_mapping(cls, values, prefix, command)

    def planned(self, **how):
        counted["plans"] += 1
        return plan(self, **how)

    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, module in sys.modules.copy().items():
        if name.startswith("rlft.") and getattr(module, "from_mapping", None) is from_mapping:
            monkeypatch.setattr(module, "from_mapping", typed)
    monkeypatch.setattr(Resolved, "plan", planned)
    return counted


PAIRS = ("preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "steps=1", "eval.every=0")
DEMONSTRATIONS = ("demonstrations.path=embedded:arithmetic-demonstrations", *PAIRS[1:])


@pytest.mark.parametrize(("words", "runs"), [
    slow((*TRAIN, "hydra.run.dir=run"), 1),
    (("plan", *TRAIN[1:]), 1),
    slow(("eval", "model.path=embedded:tiny-arithmetic", "eval.num_prompts=2", *TRAIN[4:]), 1),
    slow(("sample", "num_prompts=2", "n=2", "data.size=16", "data.held_out_size=4", *SAMPLES, *SMALL[1:2]), 1),
    slow(("sft", *DEMONSTRATIONS, *SMALL[:-1], "scoring.workers=0"), 1),
    slow(("rm", *PAIRS, *SMALL[:-1]), 1),
    slow(("dpo", *PAIRS, *SMALL[:-1]), 1),
    (("chat", "model.path=embedded:tiny-arithmetic", "generation.max_tokens=8", *SMALL[1:2]), 1),
    slow((*TRAIN, "-m", "seed=0,1", "hydra.sweep.dir=sweep"), 2),
], ids=lambda value: value[0] + " -m" * ("-m" in value) if isinstance(value, tuple) else None)  # fmt: skip
def test_a_config_is_typed_once_and_a_plan_is_made_once_a_run(words, runs, counts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.run(words) == 0
    none = {"rm": {"sections": 0}, "dpo": {"sections": 0}, "chat": {"plans": 0}}.get(words[0], {})
    assert counts == dict.fromkeys(counts, runs) | none


@pytest.mark.slow
def test_so_are_those_of_what_is_resumed_and_repeated(counts, capsys):
    saved = [word for word in TRAIN if not word.startswith("checkpoint.every")]
    assert cli.run([*saved, "hydra.run.dir=run"]) == cli.run([*saved, "-m", "seed=0,1", "hydra.sweep.dir=sweep"]) == 0
    for words, runs in (
        (("resume", "run", "steps=2"), 1),
        ((*saved[:1], *saved[2:], "steps=2", "hydra.run.dir=run", "resume=auto"), 1),  # finished
        (("resume", "run/checkpoints/step_000001", "steps=2", "hydra.run.dir=fork"), 1),
        (("eval", "run=run", "eval.num_prompts=2"), 1),
        (("sample", "run=run", "num_prompts=2", "n=2"), 1),
        ((*saved, "-m", "seed=0,1", "hydra.sweep.dir=sweep"), 2),  # finished, which is seen without a plan
        ((*saved[:1], *saved[2:], "steps=2", "-m", "seed=0,1", "hydra.sweep.dir=sweep"), 2),
    ):
        counts.update(dict.fromkeys(counts, 0))
        assert cli.run(words) == 0, capsys.readouterr().err
        known = dict.fromkeys(counts, runs)
        if "-m" in words:  # a job that goes on is read again, with what its folder keeps
            known = {"configs": 4, "sections": 4, "plans": 3} if "steps=2" in words else known | {"plans": 0}
        assert counts == known, words
