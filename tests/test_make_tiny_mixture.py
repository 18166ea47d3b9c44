"""The script that makes a mixture of experts from the embedded model."""

from __future__ import annotations

import make_tiny_mixture
import pytest
import torch
from transformers import AutoModelForCausalLM


def test_without_noise_the_mixture_is_the_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny_mixture, "NOISE", 0.0)
    dense = AutoModelForCausalLM.from_pretrained(make_tiny_mixture.BASE).eval()
    ids = torch.arange(5, 25)[None]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = make_tiny_mixture.mixture().eval()(ids).logits.log_softmax(-1)
        expected = dense(ids).logits.log_softmax(-1)
    # Two experts that are the same MLP, with weights that add up to 1; the last bits differ (largest seen: 1.2e-5).
    assert (found - expected).abs().max() < 1e-4
