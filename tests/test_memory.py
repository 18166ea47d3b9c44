"""What glibc is told, seen in a process's resident set."""

from __future__ import annotations

import subprocess
import sys

from rlft.memory import return_large_blocks

CODE = """
from pathlib import Path
from rlft.memory import return_large_blocks
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


def growth_kib(tell: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE.format(tell=tell)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_blocks_that_are_freed_leave_no_holes() -> None:
    if sys.platform != "linux":
        assert not return_large_blocks(), "there is no such setting elsewhere, and it says so"
        return
    # What stays is 16 x 64 KiB = 1 MiB, and a few MiB of whatever torch begins to use; each hole is 8 MiB or more.
    assert growth_kib("assert return_large_blocks()") < 6 * 1024 < growth_kib("")
