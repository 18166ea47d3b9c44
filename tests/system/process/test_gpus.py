"""GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""

import pytest
import torch

from rlft.system.process.gpus import all_gpus, visible_gpus


def test_the_variable_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8a,1")
    assert visible_gpus() == ["3", "GPU-8a", "1"]
    assert all_gpus(torch.device("cuda")) == ["3", "GPU-8a", "1"]
    assert all_gpus(torch.device("cuda:1")) == ["GPU-8a", "3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_without_it_all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert all_gpus(torch.device("cuda:2")) == ["2", "0", "1"]
