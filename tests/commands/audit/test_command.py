"""`rlft audit` at the command line: its table, JSON, exit codes and refusals, of runs, forks, resumed runs, exports."""

import json
import shutil

import pytest
from audited_runs import WORDS, audited, edited, key_set, lines_of, noisy, saved, wrong
from slow_cases import slow

from rlft import cli
from rlft.runs import run_status
from rlft.system.terminal import Status


def test_the_table_the_json_and_the_exit_code(copies, ran):
    folder = copies()
    found = json.loads(ran(["audit", str(folder), "recompute=2", "replay=0", "--json"]).out)
    assert found["differs"] is False
    assert {"chain.jsonl", "checkpoints", "training data", "rewards", "advantages"} <= {
        row["name"] for row in found["rows"]
    }
    edited("metrics.jsonl", 1, key_set(step=9))(folder)
    table = ran(["audit", f"run={folder}", "recompute=0", "replay=0"], ends=1).out
    assert "wrong  step 2 is missing" in table
    assert table.rstrip().endswith("3 wrong"), "a step is missing, another is new, and their order is wrong"


@pytest.mark.parametrize("words", ["curriculum.running=true", slow("dynamic_sampling.max_rounds=1")])
def test_prompts_that_were_chosen_by_what_was_solved_are_not_accused(words, honest, tmp_path):
    place, folder = honest.parent, tmp_path / "run"
    inputs = (f"data.path={place / 'data.jsonl'}", f"model.path={place / 'base'}", f"hydra.run.dir={folder}")
    assert cli.run(["train", *WORDS, *inputs, words]) == 0
    rows = audited(folder, recompute=4, replay=1)
    assert wrong(rows) == []
    assert any(row.name.startswith("replay") and row.status is Status.ok for row in rows)


def test_a_run_at_work_is_not_audited(honest, monkeypatch):
    monkeypatch.setattr(run_status, "read", lambda folder: (run_status.Status.running, ""))
    assert "run: is running" in wrong(audited(honest))[0]


def test_a_resumed_run_has_the_same_chain(honest, copies):
    folder = copies()
    shutil.rmtree(saved(folder, 3))
    shutil.rmtree(saved(folder, 4))
    with (folder / "chain.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "previous": "')  # what a kill leaves
    assert cli.run(["resume", str(folder)]) == 0
    before, after = (lines_of(place / "chain.jsonl") for place in (honest, folder))
    times = [[line.pop("metrics_line") for line in lines] for lines in (before, after)]
    assert before == after
    assert times[0][:3] == times[1][:3]
    assert times[0][3:] != times[1][3:]
    assert wrong(audited(folder, recompute=9)) == []


@pytest.mark.slow
def test_a_forks_chain_goes_on_from_the_other_runs(honest, tmp_path):
    words = ("trainer.lr=0.01", "algorithm.kl_coef=0.1", "snapshot.reference=base")
    assert cli.run(["resume", str(saved(honest, 2)), *words, f"hydra.run.dir={tmp_path / 'fork'}"]) == 0
    parent, own = (lines_of(place / "chain.jsonl") for place in (honest, tmp_path / "fork"))
    assert own[:3] == parent[:3]
    assert own[3]["previous"] == parent[2]["digest"]
    assert own[3] != parent[3]
    rows = audited(tmp_path / "fork", recompute=9, replay=9)
    assert wrong(rows) == []
    left = [row.value for row in rows if row.status is Status.skipped]
    assert "was another: the run was resumed with other keys, or is a fork, before step 3" in left


def test_an_export_carries_the_chain_and_its_card_cites_it(honest, tmp_path, ran, capsys):
    chain, out = lines_of(honest / "chain.jsonl"), tmp_path / "adapter"
    assert cli.run(["export", f"run={saved(honest, 3)}", f"out={out}", "as=adapter"]) == 0
    assert lines_of(out / "chain.jsonl") == chain[:4]
    card = (out / "README.md").read_text()
    assert f"It ends with\n`{chain[3]['digest']}`" in card
    assert "`rlft audit adapter`" in card
    ran(["audit", str(out)])

    def found(change):
        kept = {file: file.read_bytes() for file in out.iterdir()}
        change()
        assert cli.run(["audit", str(out)]) == 1
        for file, content in kept.items():
            file.write_bytes(content)
        return " ".join(capsys.readouterr().out.split())

    weights = "adapter_model.safetensors"
    assert f"{weights} wrong step 3: is not the policy of the chain" in found(lambda: noisy(out / weights))
    other = saved(honest, 2) / "policy" / weights
    assert f"{weights} wrong step 3: is not" in found(lambda: shutil.copyfile(other, out / weights))
    assert "rlft.json wrong step 3: differs from" in found(
        lambda: (out / "rlft.json").write_text(json.dumps({"role": "policy", "step": 3, "base_fingerprint": "0"}))
    )
    assert "README.md wrong step 3: does not name" in found(
        lambda: (out / "README.md").write_text(card.replace(chain[3]["digest"], chain[2]["digest"]))
    )
    assert "chain.jsonl wrong step 2" in found(lambda: edited("chain.jsonl", 2, key_set(previous="0" * 64))(out))
    assert cli.run(["export", f"run={honest}", f"out={tmp_path / 'model'}"]) == 0
    assert "weights skipped a merged model" in " ".join(ran(["audit", str(tmp_path / "model")]).out.split())
