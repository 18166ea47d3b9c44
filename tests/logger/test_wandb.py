"""Weights & Biases offline, without an account and without a network."""

from pathlib import Path

import pytest
import yaml
from in_one_test import each

from rlft.config import overrides
from rlft.config.compose import compose
from rlft.logger.wandb import Wandb, choose_mode, has_account, run_id

KEYS = {"project": "rlft", "entity": None, "init_seconds": 30.0, "finish_seconds": 5.0}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def test_a_resumed_run_continues_its_run_id_offline(make_run, make_step, make_evaluation, capfd):
    for first, last in ((0, 2), (2, 3)):
        logger = Wandb(mode="auto", **KEYS)
        logger.start(make_run(step=first))
        assert logger.run.settings.console == "off"  # the live view's stream stays ours
        logger.evaluation(make_evaluation(first))
        for step in range(first + 1, last + 1):
            logger.step(make_step(step, loss__total=float("nan")))
        logger.finish("interrupted" if last == 2 else "finished")
    folder = make_run().folder
    identity = (folder / "wandb_id.txt").read_text().strip()
    parts = list((folder / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all((part / f"run-{identity}.wandb").stat().st_size > 0 for part in parts)
    captured = capfd.readouterr()
    told = captured.err.splitlines()
    assert len(told) == 2
    assert all(line.startswith("wandb: offline, no account is set up; upload with `wandb sync ") for line in told)
    assert captured.out == ""


def test_a_run_of_wandbs_agent_has_the_agents_id_now_and_when_it_is_resumed(make_run, monkeypatch):
    """`wandb agent` names sweep and run in the environment, and wandb then ignores every other id."""
    monkeypatch.setenv("WANDB_RUN_ID", "agents01")
    folder = make_run().folder
    assert run_id(folder / "alone") != "agents01", "without a sweep it is nobody's"
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep001")
    assert run_id(folder) == "agents01"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.setenv("WANDB_RUN_ID", "another1")
    assert run_id(folder) == "agents01"


def test_the_sweep_of_the_docs_gives_words_that_rlft_takes():
    """What wandb's agent does with a sweep's file, up to the process that it starts."""
    from wandb.sdk.launch.sweeps import utils

    page = (Path(__file__).parents[2] / "docs" / "how-to" / "resume-and-sweeps.md").read_text()
    sweep = yaml.safe_load(page.partition("```yaml wandb_sweep.yaml\n")[2].partition("```")[0])
    drawn = {"trainer.lr": 0.00031, "lora.rank": 16, "algorithm": "gspo"}
    assert set(drawn) == set(sweep["parameters"])
    args = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in drawn.items()}})
    words = [word for part in utils.create_sweep_command(sweep["command"])
             for word in (args["args_no_hyphens"] if part == "${args_no_hyphens}" else [part])]  # fmt: skip
    assert words[:2] == ["rlft", "train"]
    plain = compose(list(overrides.parse(words[2:]).overrides))
    assert (plain["trainer"]["lr"], plain["lora"]["rank"]) == (0.00031, 16)
    assert plain["algorithm"] == compose(["algorithm=gspo"])["algorithm"]
    assert "wandb" in plain["logger"]
    assert sweep["metric"]["name"] == f"eval/{next(iter(plain['reward']))}"


def test_online_that_does_not_work_goes_on_offline(make_run, monkeypatch, capsys):
    import wandb

    tried = []

    class Opened:
        dir, url = "x/wandb/offline-run/files", None

    def init(mode, **keys):
        tried.append((mode, keys["id"], keys["resume"]))
        if mode == "online":
            raise wandb.errors.CommError("no route")
        return Opened()

    monkeypatch.setattr(wandb, "init", init)
    logger = Wandb(mode="online", **KEYS)
    logger.start(make_run())
    identity = run_id(make_run().folder)
    assert tried == [("online", identity, "allow"), ("offline", identity, None)]
    online, offline = capsys.readouterr().err.splitlines()
    assert online == f"wandb: could not start online (CommError: no route); trying offline. What to do: {logger.remedy}"
    assert offline == "wandb: offline, online did not work; upload with `wandb sync x/wandb/offline-run`"


def test_wandb_that_cannot_start_at_all_lets_the_run_go_on(make_run, make_step, monkeypatch, capsys):
    import wandb

    def init(**keys):
        raise wandb.Error("broken")

    monkeypatch.setattr(wandb, "init", init)
    logger = Wandb(mode="offline", **KEYS)
    logger.start(make_run())
    logger.step(make_step(1))
    logger.finish("finished")
    told = f"wandb: could not start (Error: broken); going on without it. What to do: {logger.remedy}\n"
    assert capsys.readouterr().err == told


class Service:
    """Stands in for a run whose service is gone."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def log(self, metrics, step):
        self.calls += 1
        raise self.error

    def finish(self, exit_code):
        raise self.error


def test_a_failing_service_is_told_once_and_stops_nothing(make_step, capsys):
    import wandb

    for error in (wandb.Error("service down"), ConnectionResetError("Connection lost")):
        logger = Wandb(mode="offline", **KEYS)
        logger.run = service = Service(error)
        for step in (1, 2, 3):
            logger.step(make_step(step))
        logger.finish("finished")
        assert service.calls == 1
        assert capsys.readouterr().err.count("wandb: stopped logging at step 1") == 1
    logger.run = Service(error)
    logger.finish("finished")
    assert "could not close the run" in capsys.readouterr().err


@each(
    "url",
    ["wandb.corp.example", "corp", "ftp://corp", "http://", "https://[", "://", "https://corp.example:port", "a b"],
)
@each("key", [None, "short", "x" * 40])
def test_an_address_that_is_none_is_told_and_the_run_goes_on(url, key, make_run, make_step, monkeypatch, capsys):
    """wandb checks some of these before it asks any server; nothing is sent, for the mode is offline."""
    import wandb

    wandb.teardown()  # which would else go on with the address of the run before
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert choose_mode("auto", {"WANDB_BASE_URL": url, "NETRC": str(make_run().folder)})[0] == "offline"
    logger = Wandb(mode="auto", **KEYS)
    logger.start(make_run())
    is_open = logger.run is not None
    logger.step(make_step(1))
    logger.finish("finished")
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("wandb: offline, " if is_open else "wandb: could not start (")
    assert is_open or "WANDB_BASE_URL (with https://)" in told
    monkeypatch.undo()


@each("typed", [None, "typed"])
@each("in_environment", [None, "environments"])
def test_what_the_user_has_set_in_the_environment_counts_where_no_key_is_typed(
    typed, in_environment, make_run, monkeypatch
):
    import wandb

    asked = {}
    monkeypatch.setattr(wandb, "init", lambda **keys: asked.update(keys))
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
        if in_environment is not None:
            monkeypatch.setenv(name, in_environment)
    Wandb(mode="offline", **KEYS | {"project": typed}).start(make_run())
    assert asked["project"] == (typed or in_environment or "rlft")
    assert asked["name"] == (in_environment or "tiny")
    assert asked["entity"] is None, "which lets wandb read WANDB_ENTITY"
    monkeypatch.undo()


@each(("name", "found"), [(".netrc", True), ("_netrc", True), ("netrc", False)])
def test_an_account_is_found_in_the_home_folder_unless_another_file_is_named(name, found, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / name).chmod(0o600)
    assert has_account({}) == found
    with monkeypatch.context() as no_home:
        no_home.setattr(Path, "home", lambda: pytest.fail("the home folder is not needed"))
        assert has_account({"NETRC": str(tmp_path / name)})
        assert not has_account({"NETRC": str(tmp_path / "none")})
    (tmp_path / name).unlink()


def test_the_mode_follows_the_key_then_the_environment_then_the_account(tmp_path):
    account = {"WANDB_API_KEY": "x" * 40}
    assert choose_mode("offline", account) == ("offline", "logger.wandb.mode=offline")
    assert choose_mode("auto", account | {"WANDB_MODE": "disabled"}) == ("disabled", "WANDB_MODE=disabled")
    assert choose_mode("auto", account) == ("online", "an account is set up")
    assert choose_mode("auto", {"NETRC": "/nowhere"}) == ("offline", "no account is set up")
    path, login = tmp_path / "netrc", "login user password secret\n"
    for text, url, found in [
        (f"machine elsewhere.example {login}", {}, False),
        (f"machine api.wandb.ai {login}", {}, True),
        (f"machine api.wandb.ai {login}", {"WANDB_BASE_URL": "https://wandb.example:8080"}, False),
        ("no netrc at all\n", {}, False),  # broken: as good as none
    ]:
        path.write_text(text)
        path.chmod(0o600)
        assert has_account({"NETRC": str(path), **url}) == found
