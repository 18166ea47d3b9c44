"""verifiers, in an environment of its own, plays through the endpoint of a run, which learns from it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WANTED = "verifiers==0.4.*"
AGENT = Path(__file__).parents[2] / "helpers" / "verifiers_agent"
INSTALL_S = 600.0


def environment_with_verifiers():
    """The interpreter of an environment with verifiers and nothing of ours; made once on a machine, in its temporary
    folder, because it takes the better part of a minute and 565 MB."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(tempfile.gettempdir()) / f"rlft-tests-{os.getuid()}" / f"verifiers-0.4-python{version}"
    if not folder.is_dir():
        building = folder.with_name(f"{folder.name}-{os.getpid()}")
        subprocess.run([sys.executable, "-m", "venv", str(building)], check=True, timeout=INSTALL_S)
        pip = [str(building / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WANTED]
        try:
            subprocess.run(pip, check=True, timeout=INSTALL_S)
            building.rename(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            if not folder.is_dir():  # else somebody else has been faster
                raise
    return folder / "bin/python"


def test_an_environment_of_verifiers_trains_unmodified(forks, tiny_path, tmp_path):
    """By its client for training, which tokenises by itself, asks for tokens and reads their log-probs."""
    command = ",".join(map(str, [environment_with_verifiers(), AGENT / "play.py", "train", tiny_path]))
    keys = (
        "+recipe=grpo_arithmetic", "steps=3", "prompts_per_step=1", "group_size=2", "generation=transformers",
        "generation.max_tokens=48", "lora.rank=2", "model.device=cpu", "data.size=64", "data.held_out_size=8",
        "eval.every=0", "scoring.workers=0", "console=null", "reward=null", "environment=endpoint",
        "environment.workers=2", "generation.temperature=2.0",  # so that answers differ in length, and in their rewards
    )  # fmt: skip
    variables = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    words = (*keys, f"environment.command=[{command}]", "hydra.run.dir=run")
    forks.run("train", *words, cwd=tmp_path, variables=variables, ends=0)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    files = sorted((tmp_path / "run/rollouts").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [call for row in rows for turn in row["turns"] for call in turn["calls"]] == []  # nothing has failed
    for row in rows:
        assert len(row["turns"]) == 2
        assert 0 < sum(row["mask"]) < len(row["mask"])
        assert 0.0 < row["rewards"]["turns"] <= 1.1  # brief is above 0 for any answer
    norms = [line["policy/grad_norm"] for line in metrics]
    assert any(norm > 0 for norm in norms), norms
