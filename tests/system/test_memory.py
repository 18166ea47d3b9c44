"""What glibc is told, seen in a process's page faults and resident set; and dtypes that a processor multiplies in."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rlft.plan.startup_table import slow_dtype
from rlft.system import memory
from rlft.system.memory import gc_frozen, keep_blocks

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


# -- the processor, by what Linux lists of it -------------------------------------------------------------------------
LINES = {
    "x86 of 2018": ("flags\t\t: fpu avx2 avx512f avx512_vnni", []),
    "x86 with bfloat16": ("flags\t\t: fpu avx2 avx512f avx512_bf16", ["bfloat16"]),
    "x86 with tiles": ("flags\t\t: avx512_fp16 amx_bf16 amx_tile", ["bfloat16", "float16"]),
    "ARM": ("Features\t: fp asimd asimdhp", ["float16"]),
    "ARM with bfloat16": ("Features\t: fp asimd bf16", ["bfloat16"]),
    "a system that does not tell": ("cpu MHz\t: 2000", ["bfloat16", "float16"]),
}


@pytest.mark.parametrize("name", LINES)
def test_the_instructions_of_the_first_processor_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, expected = LINES[name]
    file = tmp_path / "cpuinfo"
    file.write_text(
        f"processor\t: 0\n{line}\n\nprocessor\t: 1\nflags\t\t: avx512_bf16 avx512_fp16\n" * ("MHz" not in line)
    )
    monkeypatch.setattr(memory, "CPUINFO", file)
    assert [dtype for dtype in ("bfloat16", "float16") if memory.multiplies_in(dtype)] == expected
    assert memory.multiplies_in("float32")


def test_where_there_is_no_list_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPUINFO", tmp_path / "none")
    assert slow_dtype("bfloat16", "cpu") is None


def test_a_dtype_that_the_processor_emulates_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags\t\t: avx2\n")
    monkeypatch.setattr(memory, "CPUINFO", file)
    assert slow_dtype("bfloat16", "cpu") == (
        "model.dtype: this processor has no instructions for it, so that products take about ten times as long as in "
        "float32, got bfloat16; use model.dtype=float32, which auto is on a CPU"
    )
    assert slow_dtype("bfloat16", "cuda") is None
    assert slow_dtype("float32", "cpu") is None
