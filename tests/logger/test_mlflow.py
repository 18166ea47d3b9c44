"""MLflow on a database file, read back by its own client, and servers that do not answer."""

import math
import random
import socket
import time
from dataclasses import replace

import pytest
from in_one_test import each

from rlft.logger.mlflow import Mlflow

PATIENT = 300.0  # of a machine with other work, where nothing is waited for


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A database, which takes seconds to be made; nothing waits for the disk, since no test cuts the power."""
    from sqlalchemy import Engine, event

    def hurry(connection, _):
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", hurry)
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    event.remove(Engine, "connect", hurry)


@pytest.fixture
def start(store, request):
    """Opens a logger of an experiment that is this test's."""

    def start(run, uri=store, seconds=PATIENT):
        logger = Mlflow(tracking_uri=uri, experiment=request.node.name, seconds=seconds)
        logger.start(run)
        return logger

    return start


@pytest.fixture
def client(store):
    from mlflow import MlflowClient  # seconds, which the collection of all other tests would take longer

    return MlflowClient(store)


@pytest.fixture
def runs(client, request):
    """The test's runs as the client gives them."""
    return lambda: client.search_runs([client.get_experiment_by_name(request.node.name).experiment_id])


@pytest.fixture
def points(client):
    return lambda run, name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]


def test_steps_evaluations_and_the_config_are_read_back(
    start, runs, points, make_run, make_step, make_evaluation, capfd
):
    config = {"trainer": {"lr": 0.5}, "stop": ["@"], "empty": "", "long": "x" * 7000}
    logger = start(replace(make_run(), config=config | {f"k{i}": i for i in range(120)}))
    logger.evaluation(make_evaluation(0))
    logger.step(make_step(1, a=0.5, b=float("nan"), c=float("-inf")))
    logger.step(make_step(2, a=0.25))
    logger.finish("finished")
    (entry,) = runs()
    assert (entry.info.status, entry.info.run_name) == ("FINISHED", "tiny")
    assert points(entry, "a") == [(1, 0.5), (2, 0.25)]
    assert math.isnan(points(entry, "b")[0][1])
    assert math.isnan(points(entry, "c")[0][1])
    assert points(entry, "eval/pass_4") == [(0, 0.75)]
    assert points(entry, "eval/accuracy") == [(0, 0.5)]
    expected = {"trainer.lr": "0.5", "stop": '["@"]', "empty": "", "long": "x" * 6000, "k119": "119"}
    assert {name: entry.data.params[name] for name in expected} == expected
    assert len(entry.data.params) == 124
    told = f"mlflow: run {entry.info.run_id} of experiment {logger.experiment}\n"
    assert capfd.readouterr() == ("", told)


def test_a_resumed_run_goes_on_with_each_step_once(start, runs, points, make_run, make_step, make_evaluation):
    logger = start(make_run())
    logger.evaluation(make_evaluation(0))
    for step in (1, 2, 3):
        logger.step(make_step(step, a=step))
    logger.evaluation(make_evaluation(3))
    logger.finish("interrupted")
    assert runs()[0].info.status == "KILLED"
    logger = start(replace(make_run(step=2), config={"seed": 1, "new": 2}))
    assert runs()[0].info.status == "RUNNING"
    for step in (3, 4):
        logger.step(make_step(step, a=step, late=1.0))
        logger.evaluation(make_evaluation(step))
    logger.finish("stopped: out of memory")
    (entry,) = runs()
    assert entry.info.status == "FAILED"
    assert points(entry, "a") == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert points(entry, "late") == [(3, 1), (4, 1)]
    assert [step for step, _ in points(entry, "eval/accuracy")] == [0, 3, 4]
    assert entry.data.params == {"seed": "0", "new": "2"}, "a parameter stays as it was"


def test_a_run_that_is_deleted_meanwhile_stops_nothing(start, runs, client, make_run, make_step, capsys):
    logger = start(make_run())
    logger.step(make_step(1, a=1.0))
    client.delete_run(runs()[0].info.run_id)
    for step in (2, 3):
        logger.step(make_step(step, a=1.0))
    logger.finish("finished")
    told = capsys.readouterr().err.splitlines()[1:]
    assert len(told) == 1
    assert told[0].startswith("mlflow: stopped logging at step 2 (MlflowException: ")
    assert told[0].endswith(f"); training goes on. What to do: {logger.remedy}")


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_costs_its_time_limit(listens, start, make_run, make_step, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:  # and never answers
            server.listen()
        begun = time.monotonic()
        logger = start(make_run(), uri=f"http://127.0.0.1:{server.getsockname()[1]}", seconds=0.1)
        logger.step(make_step(1))
        logger.finish("finished")
        assert time.monotonic() - begun < 30  # MLflow's own limits are minutes
    told = "mlflow: could not start (TimeoutError: no answer in 0.1 s); going on without it. What to do: "
    assert capsys.readouterr().err.startswith(told)


PARTS = ("a", " ", "'", '"', "\n", "\t", "%", "_", "`", "\\", "🎉", "é", "=", "OR", "';--", "{}", "-" * 60)


def test_a_run_of_any_name_is_found_again_and_no_other_is(start, runs, make_run, tmp_path, capsys):
    """Forty names of random parts, each twice at the same time in folders of their own."""
    random_numbers, found = random.Random(11), {}
    for case in range(40):
        name = "".join(random_numbers.choices(PARTS, k=random_numbers.randint(1, 8)))
        folders = [tmp_path / f"{case} {twin}" for twin in ("a", "b")]
        for folder in (*folders, *folders):  # begun, then resumed
            logger = start(replace(make_run(folder=folder), name=name))
            assert logger.run is not None, (name, capsys.readouterr().err)
            assert found.setdefault(folder, logger.run) == logger.run, name
            logger.run = None
    assert len(set(found.values())) == len(runs()) == 80
    assert all(line.startswith("mlflow: run ") for line in capsys.readouterr().err.splitlines()), "a line each"


@each("typed", [None, "typed"])
@each("in_environment", [None, "it's of the environment"])
def test_the_experiment_of_the_environment_counts_where_no_key_is_typed(
    typed, in_environment, store, client, make_run, monkeypatch, tmp_path
):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    if in_environment is not None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", in_environment)
    logger = Mlflow(tracking_uri=store, experiment=typed, seconds=PATIENT)
    logger.start(make_run(folder=tmp_path / f"{typed} {in_environment}"))
    experiment = client.get_experiment_by_name(typed or in_environment or "rlft")
    assert logger.run in [run.info.run_id for run in client.search_runs([experiment.experiment_id])]
    monkeypatch.undo()
