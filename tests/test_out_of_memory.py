"""Memory errors, real ones and those of a GPU, told by where they came."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlft.logger.loggers import Loggers
from rlft.out_of_memory import GROWS, OutOfMemoryError, explained
from rlft.types import StepRecord

RUN = Path("runs/x")


def fail(config, stage, error):
    logger = Loggers(())
    logger.stage(stage)
    logger.step(StepRecord(step=7, metrics={}, groups=(), rewards={}, total_rewards=(), advantages=()))
    with explained(logger, config, RUN):
        raise error


@pytest.mark.parametrize(
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
    with pytest.raises(OutOfMemoryError, match=r"lower generation\.vllm\.max_num_seqs \(now"):
        fail(run_config("generation=vllm"), "sample", MemoryError())


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
from pathlib import Path
from rlft.config import build, compose
from rlft.logger.loggers import Loggers
from rlft.out_of_memory import explained
config = build(compose([]))
torch.ones(10)
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
with explained(Loggers(()), config, Path("run")):
    torch.ones(2**28)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only")
def test_torchs_own_error_on_a_cpu_is_known():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert "OutOfMemoryError: memory ran out in starting after step 0, 1073741824 bytes more were wanted" in done.stderr
