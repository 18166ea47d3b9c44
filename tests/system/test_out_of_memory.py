"""Memory errors, real ones and those of a GPU, told by where they came."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each

from rlft import cli
from rlft.logger.loggers import Loggers
from rlft.loop.engines import largest_of
from rlft.system.memory import GROWS, Doing, OutOfMemoryError, explained
from rlft.types import StepRecord

AGAIN = "rlft resume runs/x"


def fail(config, stage, error):
    logger = Loggers((), print)
    logger.stage(stage)
    logger.step(StepRecord(step=7, metrics={}, groups=(), rewards={}, total_rewards=(), advantages=()))
    engine = config.generation.engine
    engine = "transformers" if engine == "auto" else engine
    with explained(logger, config, AGAIN, largest_of(SimpleNamespace(config=config, engine=engine))):
        raise error


@each(
    ("stage", "told"),
    [
        (
            "update",
            "activations of a micro-batch; go on with a lower token_budget (now 2304): rlft resume runs/x token_budget="
            "1152",
        ),
        (
            "sample",
            "keys and values of the completions; go on with a lower generation.transformers.batch_size (now 256)",
        ),
        (
            "rehearse sampling",
            "generation.transformers.batch_size (now 256): rlft resume runs/x generation.transformers.batch_size=128",
        ),
        ("rehearse update", "go on with a lower token_budget (now 2304): rlft resume runs/x token_budget=1152"),
        ("publish", "lower generation.transformers.weights (now merged); rlft plan"),
        ("starting", "the model's weights; lower model.dtype (now auto)"),
        ("a stage of a user's own", "activations of a micro-batch"),
    ],
)
def test_what_grew_and_what_to_lower(stage, told, run_config):
    with pytest.raises(OutOfMemoryError) as stopped:
        fail(run_config(), stage, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has"))
    message = str(stopped.value)
    assert message.startswith(f"memory ran out in {stage} after step 7, 1.25 GiB more were wanted: ")
    assert told in message


def test_a_vllm_engine_has_a_key_of_its_own(run_config):
    with pytest.raises(OutOfMemoryError) as stopped:
        fail(run_config("generation=vllm"), "sample", MemoryError())
    key = "generation.vllm.max_num_seqs"
    assert f"go on with a lower {key} (now 256): rlft resume runs/x {key}=128" in str(stopped.value)
    with pytest.raises(OutOfMemoryError, match=r"what grows there is the adapter that is published; lower lora\.rank"):
        fail(run_config("generation=vllm"), "publish", MemoryError())


def test_work_without_a_run_names_no_step_and_no_command(run_config):
    with (
        pytest.raises(OutOfMemoryError) as stopped,
        explained(Doing(current="evaluate"), run_config()),
    ):
        raise MemoryError
    expected = "activations of a micro-batch; lower token_budget (now 2304)"
    assert str(stopped.value) == f"memory ran out in evaluate: what grows there is {expected}"


@pytest.mark.parametrize(
    ("words", "place", "told"),
    [
        (
            ("eval", "eval.num_prompts=4", "data.held_out_size=8"),
            "rlft.generation.transformers.TransformersGenerator.sample",
            "memory ran out in evaluate: what grows there is keys and values of the completions; lower "
            "generation.transformers.batch_size (now 256)\n",
        ),
        (
            ("sample", "prompts_per_step=2", "n=2", "data.size=16", "hydra.run.dir=sampled"),
            "rlft.generation.transformers.TransformersGenerator.sample",
            "memory ran out in sample after step 0: what grows there is keys and values of the completions; go on with "
            "a lower generation.transformers.batch_size (now 256): rlft resume sampled "
            "generation.transformers.batch_size=128\n",
        ),
        (
            ("chat",),
            "rlft.commands.chat.open_roles",
            "memory ran out in starting: what grows there is the model's weights; lower model.dtype (now auto)\n",
        ),
    ],
    ids=["eval", "sample", "chat"],
)
def test_every_verb_tells_it(words, place, told, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keys):
        raise torch.OutOfMemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, fail)
    verb, *rest = words
    common = ("model.path=embedded:tiny-arithmetic", "model.device=cpu", "generation=transformers")
    assert cli.run([verb, *common, *rest]) == 1
    assert capsys.readouterr().err.endswith(f"rlft: stopped: {told}")


LOSSES = (
    "memory ran out in evaluate after step 0: what grows there is activations of a micro-batch; go on with a lower "
)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (
            ("rm", "preferences.path=embedded:arithmetic-preferences"),
            "rlft.commands.preferences.PreferenceTask.evaluate",
        ),
        (
            ("sft", "demonstrations.path=embedded:arithmetic-demonstrations"),
            "rlft.commands.sft.DemonstrationTask.evaluate",
        ),
    ],
    ids=["rm", "sft"],
)
def test_an_evaluation_of_losses_alone_is_bounded_by_the_token_budget(words, place, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keys):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(place, fail)
    common = ("model.device=cpu", "max_completion_tokens=64", "steps=1", "logger=[]", "token_budget=600")
    monkeypatch.chdir(tmp_path)
    assert cli.run([*words, *common, "hydra.run.dir=run"]) == 1
    again = "token_budget (now 600): rlft resume run token_budget=300\n"
    assert capsys.readouterr().err.endswith(f"rlft: stopped: {LOSSES}{again}")


def test_export_says_what_to_do_instead():
    told = pytest.raises(OutOfMemoryError, match=r"^memory ran out in merge: .* in float32; use as=adapter")
    with told, explained(Doing(current="merge"), None):
        raise MemoryError


def test_other_errors_are_left_alone(run_config):
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        fail(run_config(), "update", RuntimeError("shapes differ"))


def test_every_key_that_is_told_exists(run_config):
    config = run_config()
    for _, key in GROWS.values():
        value = config
        for name in key.split("."):
            value = getattr(value, name)


REAL = """
import resource, torch
from rlft.config.compose import build, compose
from rlft.logger.loggers import Loggers
from rlft.system.memory import explained
config = build(compose([]))
torch.ones(10)
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
with explained(Loggers((), print), config, "rlft resume run"):
    torch.ones(2**28)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only")
def test_torchs_own_error_on_a_cpu_is_known():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert "OutOfMemoryError: memory ran out in starting after step 0, 1073741824 bytes more were wanted" in done.stderr
