from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from rlft.system import machine


def test_a_machine_is_named_by_processor_device_and_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Some Core 7\nprocessor\t: 1\nmodel name\t: Another\n")
    monkeypatch.setattr(machine, "CPUINFO", listed)
    said = machine.machine(torch.device("cpu"))
    name = f"Some Core 7 ({platform.machine()})"
    assert said == {"processor": name, "device": "cpu", "threads": str(torch.get_num_threads())}
    listed.unlink()
    assert machine.processor() == (platform.processor() or platform.machine())
