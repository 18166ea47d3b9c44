"""What glibc is told, seen in page faults and the resident set; dtypes of a processor; and memory errors in words."""

import gc
import operator
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

# What glibc was told before torch is imported, and what is printed: page faults, or kB that the resident set has grown.
BEGIN = """
import resource
from pathlib import Path
from rlft.system.memory import keep_blocks
{tell}
import torch
def kilobytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
"""
FAULTS = """
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
torch.ones(2**10).sum()
before = kilobytes()
large = torch.ones(10 * 2**20)  # 40 MiB
behind = torch.ones(2**14)
del large
print(kilobytes() - before)
"""
HOLES = """
torch.ones(6 * 2**20).sum()  # 24 MiB, freed: from here on glibc by itself keeps blocks of up to that size
kept = []
before = kilobytes()
for size in range(8, 24):
    large = torch.ones(size * 2**18)  # 8 .. 23 MiB
    kept.append(torch.ones(2**14))  # 64 KiB that come to lie behind it
    del large
print(kilobytes() - before)
"""


def printed(code, tell):
    program = BEGIN.format(tell=tell) + code
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no such setting elsewhere")
def test_blocks_of_a_step_are_used_again_without_page_faults_and_holes_and_large_ones_go_back():
    # A pass fills 10,240 pages, which are all new where blocks of 5 MiB go back to the system.
    assert printed(FAULTS, "assert keep_blocks(4096)") < 1024
    # With large micro-batches what stays is 16 x 64 KiB = 1 MiB, and a few MiB of whatever torch begins to use; each
    # hole is 8 MiB or more.
    assert printed(HOLES, "assert keep_blocks(16384)") < 6 * 1024 < printed(HOLES, "")
    assert printed(GROWTH, "assert keep_blocks(4096)") < 8 * 1024, "a block over 32 MiB"


def test_the_collector_passes_over_old_objects_only_inside():
    before, old = gc.get_freeze_count(), [[] for _ in range(2000)]
    with gc_frozen():
        assert gc.get_freeze_count() > before + len(old) / 2
    assert gc.get_freeze_count() == 0


def test_free_memory_is_what_the_system_and_the_container_leave(monkeypatch):
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


VLLM = ("generation=vllm",)


@each(
    ("words", "stage", "error", "told"),
    [
        ((), "update", "1.25 GiB", "activations of a micro-batch; resume with a lower token_budget (now 2304): "
         "rlft resume runs/x token_budget=1152"),
        ((), "sample", "1.25 GiB", "keys and values of the completions; resume with a lower "
         "generation.transformers.batch_size (now 256)"),
        ((), "rehearse sampling", "1.25 GiB", "generation.transformers.batch_size (now 256): rlft resume runs/x "
         "generation.transformers.batch_size=128"),
        ((), "rehearse update", "1.25 GiB", "resume with a lower token_budget (now 2304): rlft resume runs/x "
         "token_budget=1152"),
        ((), "publish", "1.25 GiB", "lower generation.transformers.weights (now merged); rlft plan"),
        ((), "starting", "1.25 GiB", "the model's weights; lower model.dtype (now auto)"),
        ((), "a stage of a user's own", "1.25 GiB", "activations of a micro-batch"),
        (VLLM, "sample", "", "resume with a lower generation.vllm.max_num_seqs (now 256): rlft resume runs/x "
         "generation.vllm.max_num_seqs=128"),
        (VLLM, "publish", "", "what grows there is the adapter that is published; lower lora.rank"),
    ],
)  # fmt: skip
def test_what_grew_and_what_to_lower(words, stage, error, told, run_config):
    cause = (
        torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {error}. GPU 0 has") if error else MemoryError()
    )
    with pytest.raises(OutOfMemoryError) as stopped:
        fail(run_config(*words), stage, cause)
    wanted = f", {error} more were wanted" * bool(error)
    assert str(stopped.value).startswith(f"memory ran out in {stage} after step 7{wanted}: what grows there is ")
    assert told in str(stopped.value)


def test_work_without_a_run_names_no_step_and_no_command(run_config):
    for doing, config, told in (
        ("evaluate", run_config(), "activations of a micro-batch; lower token_budget \\(now 2304\\)$"),
        ("merge", None, ".* in float32; use as=adapter"),
    ):
        told = pytest.raises(OutOfMemoryError, match=f"^memory ran out in {doing}: what grows there is {told}")
        with told, explained(Doing(current=doing), config):
            raise MemoryError


SAMPLED = "rlft.generation.transformers.TransformersGenerator.sample"
VALUES = "keys and values of the completions"
LOSSES = (
    "memory ran out in evaluate after step 0: what grows there is activations of a micro-batch; resume with a lower "
)
ROWS = "generation.transformers.batch_size"


@pytest.mark.parametrize(
    ("words", "place", "told"),
    [
        ("eval generation=transformers eval.num_prompts=4 data.held_out_size=8", SAMPLED,
         f"memory ran out in evaluate: what grows there is {VALUES}; lower {ROWS} (now 256)\n"),
        ("sample generation=transformers prompts_per_step=2 n=2 data.size=16 hydra.run.dir=run", SAMPLED,
         f"memory ran out in sample after step 0: what grows there is {VALUES}; resume with a lower {ROWS} (now 256): "
         f"rlft resume run {ROWS}=128\n"),
        ("chat generation=transformers", "rlft.commands.chat.open_roles",
         "memory ran out in starting: what grows there is the model's weights; lower model.dtype (now auto)\n"),
        # An evaluation of losses alone is bounded by the token budget.
        *((f"{command} {data} max_completion_tokens=64 steps=1 console=null token_budget=600 hydra.run.dir=run",
           f"rlft.loop.supervised.{task}.evaluate",
           f"{LOSSES}token_budget (now 600): rlft resume run token_budget=300\n")
          for command, data, task in (
              ("rm", "preferences.path=embedded:arithmetic-preferences", "PreferenceTask"),
              ("sft", "demonstrations.path=embedded:arithmetic-demonstrations", "DemonstrationTask"))),
    ],
    ids=["eval", "sample", "chat", "rm", "sft"],
)  # fmt: skip
def test_every_command_tells_it(words, place, told, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keys):
        raise torch.OutOfMemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, fail)
    assert cli.run([*words.split(), "model.path=embedded:tiny-arithmetic", "model.device=cpu"]) == 1
    assert capsys.readouterr().err.endswith(f"rlft: stopped: {told}")


def test_other_errors_are_left_alone_and_every_key_that_is_told_exists(run_config):
    config = run_config()
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        fail(config, "update", RuntimeError("shapes differ"))
    for _, key in GROWS.values():
        operator.attrgetter(key)(config)


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


def test_there_is_no_such_setting_elsewhere_and_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_blocks(4096) is False
