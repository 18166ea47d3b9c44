"""Real engines in actors of Ray sample what the engine in this process samples, also when one is killed."""

import signal
from dataclasses import replace

import pytest
from ray_cluster import two_machines
from real_engines import check_pool_against, opened_here, signal_to

from rlft.config.trainer import ClusterConfig
from rlft.system.process.launcher import open_launcher

pytestmark = pytest.mark.slow

KEYS = (
    "model.dtype=float32", "model.device=cpu", "lora.rank=4", "lora.alpha=8", "group_size=4", "prompts.max_tokens=40",
    "generation.max_tokens=24", "generation.transformers.batch_size=8", "generation.transformers.weights=apart",
    "generation.vllm.max_num_seqs=8", "cluster=ray", "cluster.address=auto", "cluster.engines=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("other machine")) as cluster:
        config = ClusterConfig(kind="ray", address=cluster.address, engines=2)
        with open_launcher(config, tmp_path_factory.mktemp("run")) as launcher:
            yield launcher


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_actor_that_is_killed_or_stopped_changes_no_completion(
    engine, launcher, run_config, make_prompt, make_roles, backbone
):
    config, roles, notes = run_config(*KEYS), make_roles(noise=0.02), []
    prompts = [make_prompt(f"{7 * i} + {13 * i + 5} = ?", str(20 * i + 5)) for i in range(12)]
    here = opened_here(config, engine, roles, backbone)
    disturbances = [signal_to(0, signal.SIGKILL, 0.1, pid_of)]
    if engine == "transformers":  # what happens then has nothing to do with the engine
        config = replace(config, cluster=replace(config.cluster, timeout=4.0))
        disturbances.append(signal_to(1, signal.SIGSTOP, 0.1, pid_of))
    try:
        check_pool_against(here, launcher, config, engine, roles, prompts, notes, *disturbances)
    finally:
        here.close()
    assert notes[0].startswith("engine-0 is replaced: engine-0 has died (")
    late = ["engine-1 is replaced: engine-1 has not answered for 4 s (sample; cluster.timeout); its log is "]
    assert [note[: len(late[0])] for note in notes[1:]] == (late if engine == "transformers" else [])


def pid_of(worker):
    return worker.place.pid
