import platform

import pytest
import torch

from rlft.plan.run_plan import slow_dtype
from rlft.system import machine


def test_a_machine_is_named_by_processor_device_and_threads(monkeypatch, tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Some Core 7\nprocessor\t: 1\nmodel name\t: Another\n")
    monkeypatch.setattr(machine, "CPUINFO", listed)
    said = machine.machine(torch.device("cpu"))
    name = f"Some Core 7 ({platform.machine()})"
    assert said == {"processor": name, "device": "cpu", "threads": str(torch.get_num_threads())}
    listed.unlink()
    assert machine.processor() == (platform.processor() or platform.machine())


LINES = {
    "x86 of 2018": ("flags\t\t: fpu avx2 avx512f avx512_vnni", []),
    "x86 with bfloat16": ("flags\t\t: fpu avx2 avx512f avx512_bf16", ["bfloat16"]),
    "x86 with tiles": ("flags\t\t: avx512_fp16 amx_bf16 amx_tile", ["bfloat16", "float16"]),
    "ARM": ("Features\t: fp asimd asimdhp", ["float16"]),
    "ARM with bfloat16": ("Features\t: fp asimd bf16", ["bfloat16"]),
    "a system that does not tell": ("cpu MHz\t: 2000", ["bfloat16", "float16"]),
}


@pytest.mark.parametrize("name", LINES)
def test_the_instructions_of_the_first_processor_count(name, tmp_path, monkeypatch):
    line, expected = LINES[name]
    file = tmp_path / "cpuinfo"
    file.write_text(
        f"processor\t: 0\n{line}\n\nprocessor\t: 1\nflags\t\t: avx512_bf16 avx512_fp16\n" * ("MHz" not in line)
    )
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert [dtype for dtype in ("bfloat16", "float16") if machine.multiplies_in(dtype)] == expected
    assert machine.multiplies_in("float32")


def test_a_dtype_that_the_processor_emulates_is_named_with_its_key(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text("flags\t\t: avx2\n")
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert slow_dtype("bfloat16", "cpu") == (
        "model.dtype: this processor has no instructions for it, so that products take about ten times as long as in "
        "float32, got bfloat16; use model.dtype=float32, which auto is on a CPU"
    )
    assert slow_dtype("bfloat16", "cuda") is None
    assert slow_dtype("float32", "cpu") is None
    file.unlink()
    assert slow_dtype("bfloat16", "cpu") is None, "where there is no list nothing is said"
