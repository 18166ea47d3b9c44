"""Runs of every algorithm, command and kind of role: honest ones are confirmed and replayed bit for bit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from audited_runs import noisy
from comparison_cases import CASES, RUN, TRAIN, Case, case
from run_processes import Nursery
from slow_cases import slow_but

from rlft.runs import checkpoint
from rlft.runs.chain import CHAIN
from rlft.runs.run_folder import CONFIG
from rlft.system.terminal import Status

TALK = f"{TRAIN} generation.max_tokens=96 prompts.max_tokens=64 data.size=64 data.held_out_size=8"
CONVERSATIONS = (
    case("calculator", f"train +recipe=grpo_calculator {TALK} {RUN}"),
    case("ppo with a calculator", f"train +recipe=ppo_calculator {TALK} {RUN}"),
    case("a game", f"train +recipe=grpo_whom_to_ask {TALK} {RUN}"),
)
KINDS = {one.name: one for one in (*CASES, *CONVERSATIONS)}


def do(forks: Nursery, kind: Case, place: Path) -> None:
    """Runs the commands of a case in this folder."""
    for name, content in kind.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    for number, command in enumerate(kind.commands):
        forks.run(*shlex.split(command), cwd=place, ends=kind.codes.get(number, 0))


def rows_of(forks: Nursery, folder: Path, place: Path) -> list[dict[str, str]]:
    """The rows of `rlft audit` with all steps recomputed and replayed, in the folder where the run was started."""
    audit = forks.run("audit", str(folder), "recompute=9", "replay=9", "--json", cwd=place)
    assert audit.code in (0, 1), audit.err
    return json.loads(audit.out)["rows"]


@pytest.mark.parametrize("name", slow_but("dpo", KINDS))
def test_an_honest_run_of_any_kind_is_confirmed(name: str, forks: Nursery, tmp_path: Path) -> None:
    do(forks, KINDS[name], tmp_path)
    chains = sorted(tmp_path.rglob(CHAIN))
    assert chains
    for chain in chains:
        rows = rows_of(forks, chain.parent, tmp_path)
        where = f"{name}, {chain.parent.name}"
        assert [row for row in rows if row["status"] == Status.wrong] == [], where
        replays = [row for row in rows if row["name"] == "replay"]
        others = [row["value"] for row in replays if "bit for bit:" not in row["value"]]
        assert [value for value in others if "was made with another config.yaml" not in value] == [], where
        assert replays or not (chain.parent / CONFIG).exists(), where  # exports have no config


@pytest.mark.slow
def test_another_head_of_a_reward_model_is_found(forks: Nursery, tmp_path: Path) -> None:
    """Also where MANIFEST was written anew; the bias is not trained, and depends on what is held out."""
    kind = KINDS["rm"]
    forks.run(*shlex.split(kind.commands[0]), cwd=tmp_path, ends=0)
    saved = tmp_path / "first" / "checkpoints" / "step_000003"
    [head] = [file for file in saved.rglob("*.safetensors") if "head" in file.name]
    noisy(head)
    checkpoint._write_manifest(saved)
    audit = forks.run("audit", "first", "replay=0", "--json", cwd=tmp_path, ends=1)
    differing = [row["value"] for row in json.loads(audit.out)["rows"] if row["status"] == Status.wrong]
    assert differing == ["step 3: heads/reward/weight differs from the chain"]
