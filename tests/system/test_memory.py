"""What glibc is told, seen in page faults and the resident set; dtypes of a processor; and memory errors in words."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each

from rlft import cli
from rlft.logger.loggers import Loggers
from rlft.loop.parts import largest_of
from rlft.runs.lines import StepRecord
from rlft.system import memory
from rlft.system.memory import GROWS, Doing, OutOfMemoryError, explained, gc_frozen, keep_blocks

FAULTS = """
import resource
from rlft.system.memory import keep_blocks
{tell}
import torch
def pass_over():
    kept = [torch.ones(5 * 2**18) for _ in range(8)]  # 8 blocks of 5 MiB, as a forward keeps them
    del kept
pass_over()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    pass_over()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""

GROWTH = """
from pathlib import Path
from rlft.system.memory import keep_blocks
{tell}
import torch
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
torch.ones(2**10).sum()
before = pages()
large = torch.ones(10 * 2**20)  # 40 MiB
behind = torch.ones(2**14)
del large
print((pages() - before) * 4)
"""

HOLES = """
from pathlib import Path
from rlft.system.memory import keep_blocks
{tell}
import torch
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
torch.ones(6 * 2**20).sum()  # 24 MiB, freed: from here on glibc by itself keeps blocks of up to that size
kept = []
before = pages()
for size in range(8, 24):
    large = torch.ones(size * 2**18)  # 8 .. 23 MiB
    kept.append(torch.ones(2**14))  # 64 KiB that come to lie behind it
    del large
print((pages() - before) * 4)
"""


def printed(code: str, tell: str) -> int:
    done = subprocess.run([sys.executable, "-c", code.format(tell=tell)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_blocks_of_a_step_are_used_again_without_a_page_fault() -> None:
    if sys.platform != "linux":
        assert not keep_blocks(4096), "there is no such setting elsewhere, and it says so"
        return
    # A pass fills 10,240 pages, which are all new where blocks of 5 MiB go back to the system.
    assert printed(FAULTS, "assert keep_blocks(4096)") < 1024


@pytest.mark.slow
def test_with_large_micro_batches_blocks_that_are_freed_leave_no_holes() -> None:
    if sys.platform == "linux":
        # What stays is 16 x 64 KiB = 1 MiB, and a few MiB of whatever torch begins to use; each hole is 8 MiB or more.
        assert printed(HOLES, "assert keep_blocks(16384)") < 6 * 1024 < printed(HOLES, "")


@pytest.mark.slow
def test_a_block_over_32_mib_goes_back_at_once() -> None:
    if sys.platform == "linux":
        assert printed(GROWTH, "assert keep_blocks(4096)") < 8 * 1024


def test_the_collector_passes_over_old_objects_only_inside() -> None:
    before = gc.get_freeze_count()
    with gc_frozen():
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == 0


def test_free_memory_is_what_the_system_and_the_container_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**28 < memory.free_memory() < 2**45
    monkeypatch.setattr(memory, "_control_group_room", lambda: 12345)
    assert memory.free_memory() == 12345


# -- memory that runs out ----------------------------------------------------------------------------------------------
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
            "activations of a micro-batch; resume with a lower token_budget (now 2304): rlft resume runs/x "
            "token_budget=1152",
        ),
        (
            "sample",
            "keys and values of the completions; resume with a lower generation.transformers.batch_size (now 256)",
        ),
        (
            "rehearse sampling",
            "generation.transformers.batch_size (now 256): rlft resume runs/x generation.transformers.batch_size=128",
        ),
        ("rehearse update", "resume with a lower token_budget (now 2304): rlft resume runs/x token_budget=1152"),
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
    assert f"resume with a lower {key} (now 256): rlft resume runs/x {key}=128" in str(stopped.value)
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
            "memory ran out in sample after step 0: what grows there is keys and values of the completions; "
            "resume with a lower generation.transformers.batch_size (now 256): rlft resume sampled "
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
def test_every_command_tells_it(words, place, told, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keys):
        raise torch.OutOfMemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, fail)
    command, *rest = words
    common = ("model.path=embedded:tiny-arithmetic", "model.device=cpu", "generation=transformers")
    assert cli.run([command, *common, *rest]) == 1
    assert capsys.readouterr().err.endswith(f"rlft: stopped: {told}")


LOSSES = (
    "memory ran out in evaluate after step 0: what grows there is activations of a micro-batch; resume with a lower "
)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (
            ("rm", "preferences.path=embedded:arithmetic-preferences"),
            "rlft.loop.supervised.PreferenceTask.evaluate",
        ),
        (
            ("sft", "demonstrations.path=embedded:arithmetic-demonstrations"),
            "rlft.loop.supervised.DemonstrationTask.evaluate",
        ),
    ],
    ids=["rm", "sft"],
)
def test_an_evaluation_of_losses_alone_is_bounded_by_the_token_budget(words, place, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keys):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(place, fail)
    common = ("model.device=cpu", "max_completion_tokens=64", "steps=1", "console=null", "token_budget=600")
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
from rlft.system.memory import Doing, explained
torch.ones(10)
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
with explained(Doing(current="merge"), None):
    torch.ones(2**28)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only")
def test_torchs_own_error_on_a_cpu_is_known():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert "OutOfMemoryError: memory ran out in merge, 1073741824 bytes more were wanted" in done.stderr
