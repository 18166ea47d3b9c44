"""Engines in workers of a cluster sample what the engine in the run's own process samples, to the last bit."""

import hashlib
import re
import signal
import threading
import tracemalloc
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pool_engines import CountingEngine, ThreadLauncher
from real_engines import check_pool_against, opened_here, sampled, signal_to
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlft.generation import sending
from rlft.generation.loaded_adapter import difference, published
from rlft.generation.sending import Outgoing
from rlft.loop import workers
from rlft.loop.freshness import Freshness
from rlft.loop.workers import EngineWorker, engine_specs, open_engines, rank_specs
from rlft.model.backbone import read_backbone
from rlft.model.full_weights import WholeModel
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.placement import Placement, place
from rlft.system.process.worker import WorkerSpec
from rlft.types import UserError

GPU_KEYS = ("model.device=cuda:1", "generation=transformers", "cluster.engines=2", "cluster.ranks=3")


@pytest.fixture
def gpus(monkeypatch):
    """Five GPUs, of which the run's own process has the second."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,2,0")
    monkeypatch.setattr(workers, "resolve_device", torch.device)


def specs(config, placement):
    """{name: (GPUs that the launcher is asked for, its variables)} of all workers."""
    plan = SimpleNamespace(config=config, placement=placement, annotated={"needs_old": False})
    all_specs = [*engine_specs(config, "transformers", placement), *rank_specs(plan)]
    assert {spec.arguments.get("config", spec.arguments.get("settings")).model.device for spec in all_specs} == {"cuda"}
    return {spec.name: (spec.gpus, dict(spec.environment)) for spec in all_specs}


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_workers_here_see_the_gpus_of_the_placement(kind, gpus, run_config):
    config = run_config(*GPU_KEYS, f"cluster={kind}")
    for available, seen in (
        (5, {"engine-0": "2", "engine-1": "0", "rank-1": "7", "rank-2": "3"}),
        (3, {"engine-0": "5", "engine-1": "7", "rank-1": "7", "rank-2": "3"}),  # in pairs
    ):
        found = specs(config, place(config.cluster, on_gpus=True, available=available))
        assert found == {name: (0, {"CUDA_VISIBLE_DEVICES": gpu}) for name, gpu in seen.items()}
    if kind == "ray":  # one that is joined is asked for GPUs
        joined = run_config(*GPU_KEYS, "cluster=ray", "cluster.address=auto", "cluster.gpus_per_engine=2")
        asked = specs(joined, place(joined.cluster, on_gpus=True))
        assert asked == {"engine-0": (2, {}), "engine-1": (2, {}), "rank-1": (1, {}), "rank-2": (1, {})}


def test_the_launcher_is_told_the_runs_own_gpu(gpus, run_config, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(workers, "open_launcher", lambda *args, **kwargs: told.append(kwargs))
    for device in ("cuda:1", "cpu"):
        plan = SimpleNamespace(config=run_config(*GPU_KEYS, f"model.device={device}"))
        workers.opened_launcher(plan, tmp_path)
    assert [(kwargs["on_gpus"], kwargs["own_gpu"]) for kwargs in told] == [(True, "5"), (False, None)]


@pytest.mark.parametrize(
    ("kind", "order"), [("pairs", ["engine", "engine", "ranks", "base"]), ("divided", ["ranks", "base"])]
)
def test_ranks_load_bases_once_an_engine_on_the_same_gpu_has_measured_its_memory(
    kind, order, run_config, monkeypatch, tmp_path
):
    events = []
    may_start = threading.Event()

    def start_slowly(self):
        may_start.wait(5.0)
        events.append("engine")

    monkeypatch.setattr(CountingEngine, "started", start_slowly)
    faultless = {"faults": {}, "stale": (), "corrupt": False, "delay_s": 0.0}
    slow = [WorkerSpec(name=f"engine-{i}", factory="-", arguments=faultless) for i in range(2)]
    monkeypatch.setattr(workers, "engine_specs", lambda *_: slow)
    monkeypatch.setattr(workers, "opened_launcher", lambda *_: closing(ThreadLauncher(tmp_path)))
    monkeypatch.setattr(workers, "rank_specs", lambda *_: events.append("ranks") or [])
    config = run_config("generation=transformers", "cluster.engines=2", "cluster.ranks=2")
    placement = Placement(kind=kind, reason="", gpus=2)
    plan = SimpleNamespace(config=config, engine="transformers", placement=placement, environment=None, images=2)
    if kind == "pairs":
        threading.Timer(0.05, may_start.set).start()
    with workers.open_workers(plan, tmp_path, print, "resume") as opened:
        events.append("base")
        assert events == order
        may_start.set()
        opened.pool.wait_until_started()
    assert sorted(events) == ["base", "engine", "engine", "ranks"]


KEYS = (
    "model.dtype=float32", "model.device=cpu", "lora.rank=4", "lora.alpha=8", "group_size=4",
    "generation.max_tokens=24", "generation.transformers.batch_size=8", "generation.transformers.weights=apart",
    "cluster.engines=2",
)  # fmt: skip
ON_THE_CPU = Placement(kind="processes", reason="a test's")


@pytest.fixture(scope="module")
def config(run_config):
    return run_config(*KEYS)


@pytest.fixture(scope="module")
def prompts(make_prompt):
    return [make_prompt(f"{7 * i} + {13 * i + 5} = ?", str(20 * i + 5)) for i in range(12)]


@pytest.mark.slow
def test_killed_and_stopped_engines_change_no_completion(config, prompts, make_roles, backbone, tmp_path):
    config = replace(config, cluster=replace(config.cluster, timeout=3.0))
    roles, notes, launcher = make_roles(noise=0.02), [], LocalProcesses(tmp_path)
    here = opened_here(config, "transformers", roles, backbone)
    killed = signal_to(0, signal.SIGKILL, 0.1, lambda worker: worker.pid)
    stopped = signal_to(1, signal.SIGSTOP, 0.1, lambda worker: worker.pid)
    try:
        check_pool_against(here, launcher, config, "transformers", roles, prompts, notes, killed, stopped)
    finally:
        launcher.close()
    assert notes[0].startswith("engine-0 is replaced: engine-0 was killed by SIGKILL")
    assert notes[1].startswith("engine-1 is replaced: engine-1 has not answered for 3 s (sample; cluster.timeout)")


def test_a_worker_answers_with_the_version_and_the_hash_of_what_has_come(config, make_roles):
    from safetensors.torch import save

    adapter, settings = make_roles(noise=0.02).publish(5), engine_specs(config, "transformers", ON_THE_CPU)[0].arguments
    weights = save({name: tensor.contiguous() for name, tensor in adapter.weights.items()})
    digest = hashlib.sha256(weights).hexdigest()
    worker = EngineWorker(**settings)
    try:
        before = worker.score([[3, 4, 5]])
        damaged = weights[:-1] + bytes([weights[-1] ^ 1])
        assert worker.load(5, adapter.config, digest, damaged) == (5, hashlib.sha256(damaged).hexdigest())
        assert worker.score([[3, 4, 5]]) == before  # it was not loaded
        assert worker.load(5, adapter.config, digest, weights) == (5, digest)
        assert worker.score([[3, 4, 5]]) != before
    finally:
        worker.close()


# -- all weights -------------------------------------------------------------------------------------------------------
WHOLE = [key for key in KEYS if not key.startswith("lora.")] + ["lora=null", "generation.vllm.max_num_seqs=8"]
SMALL = 2**18
"""Bytes of a bucket: the largest tensor has 384 x 128 numbers of 4 bytes, which is less, and all of them 3.4 MiB."""


@pytest.fixture(scope="module")
def whole(run_config):
    return run_config(*WHOLE)


@pytest.fixture
def policy(whole):
    return WholeModel(read_backbone(whole.model))


@torch.no_grad()
def published_by(policy, version):
    """What an update might do, and its publish."""
    noise = torch.Generator().manual_seed(version)
    for _, parameter in policy.named_parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return policy.publish(version)


def send(worker, adapter, lost=None):
    """Has an engine load a version bucket by bucket, without `lost`, as if the digests were right."""
    outgoing = Outgoing(adapter, lambda file: file)
    arrived = hashlib.sha256()
    for number in range(len(outgoing)):
        file = outgoing.bucket(number)
        if number == lost:
            continue
        arrived.update(file)
        if number + 1 < len(outgoing):
            assert worker.load_part(number, arrived.hexdigest(), file) == arrived.hexdigest()
        else:
            answer = worker.load(adapter.version, {}, arrived.hexdigest(), file)
            assert answer == (adapter.version, arrived.hexdigest())
    return outgoing


def problem_of(worker, adapter, earlier=None):
    found = worker.loaded_adapter()
    return difference(adapter.version, found, published(adapter, found.dtype), earlier or {})


@pytest.fixture
def follower(whole, monkeypatch):
    monkeypatch.setattr(sending, "BUCKET", SMALL)
    worker = EngineWorker(**engine_specs(whole, "transformers", ON_THE_CPU)[0].arguments)
    yield worker
    worker.close()


def test_all_weights_arrive_in_an_engine_to_the_last_bit(follower, policy, monkeypatch):
    texts = [[3, 4, 5, 6], [7, 8, 9]]
    for version in (1, 2):
        adapter = published_by(policy, version)
        assert len(send(follower, adapter)) > 10
        assert problem_of(follower, adapter) is None
        assert follower.score(texts) == policy.score(texts)
    given = []  # an engine that takes no parts is given all of them together
    monkeypatch.setattr(follower._engine, "loads_parts", False)
    monkeypatch.setattr(follower._engine, "load", given.append)
    send(follower, adapter)
    assert given[0].weights.keys() == adapter.weights.keys()
    assert all(torch.equal(given[0].weights[name], tensor) for name, tensor in adapter.weights.items())


def test_a_changed_bit_a_lost_bucket_and_a_stale_engine_are_seen(follower, policy):
    first = published_by(policy, 1)
    send(follower, first)
    tensors = published(first, "float32")
    name = "model.layers.2.mlp.down_proj.weight"
    flipped = first.weights[name].clone().view(torch.int32)
    flipped[5, 7] ^= 1
    moved = replace(first, weights={**first.weights, name: flipped.view(torch.float32)})
    assert "1 of the 50 tensors that it was given are others, such as model.layers.2.mlp.down_proj" in str(
        problem_of(follower, moved)
    )
    second = published_by(policy, 2)
    assert str(problem_of(follower, second, {1: tensors})).endswith("; it still holds version 1")
    send(follower, second, lost=3)
    problem = str(problem_of(follower, second, {1: tensors}))
    assert re.match(r"policy version 2: \d of the 50 tensors that it was given are others", problem)
    outgoing = Outgoing(published_by(policy, 3), lambda file: file)
    expected = [outgoing.bucket(number) and outgoing.sha256(number) for number in range(3)]
    follower.load_part(0, expected[0], outgoing.bucket(0))
    before = follower.loaded_adapter()
    assert follower.load_part(2, expected[2], outgoing.bucket(2)) != expected[2]
    assert follower.loaded_adapter() == before, "nothing was taken"


class Largest(TorchDispatchMode):
    """The largest tensor, in bytes, that is made inside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


def test_a_publish_of_all_weights_holds_a_few_buckets_on_either_side(follower, policy):
    """Of Python's own memory, in which buckets are files, tensors' bytes, messages and pickles; and of torch's."""
    adapter = published_by(policy, 1)
    whole = sum(tensor.nbytes for tensor in adapter.weights.values())
    assert whole > 12 * SMALL
    tracemalloc.start()
    try:
        with Largest() as largest:
            send(follower, adapter)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < largest.bytes <= SMALL
    assert SMALL < peak < 6 * SMALL


@pytest.mark.slow
def test_vllm_in_a_worker_loads_all_weights_in_place_and_holds_every_bit(whole, policy, prompts, tmp_path, monkeypatch):
    """A model whose output head is tied to its embeddings, in 14 buckets, some of which end inside a tensor."""
    monkeypatch.setattr(sending, "BUCKET", SMALL)
    config = replace(whole, cluster=replace(whole.cluster, engines=1))
    notes, launcher = list[str](), LocalProcesses(tmp_path)
    plan = SimpleNamespace(config=config, engine="vllm", placement=ON_THE_CPU, environment=None, images=0)
    pool = open_engines(plan, launcher, notes.append)
    freshness = Freshness([prompt.token_ids for prompt in prompts[:2]], 1e-4, 1, notes.append)
    try:
        for version in (1, 2):
            adapter = published_by(policy, version)
            pool.load(adapter)
            assert freshness.check(version, pool, policy, adapter) is not None
            groups = sampled(pool, config, prompts[:2])
            assert {r.policy_version for group in groups for r in group.rollouts} == {version}
            [found] = pool._of_each("loaded_adapter").values()
            assert found.tensors == published(adapter, "float32")
            assert found.unread == found.faults == ()
    finally:
        pool.close()
        launcher.close()
    assert notes == []


def test_a_worker_that_is_closed_leaves_its_base_without_adapters(config, backbone, monkeypatch):
    monkeypatch.setattr("rlft.loop.workers.load_backbone", lambda model: backbone)
    first, second = engine_specs(config, "transformers", ON_THE_CPU)
    assert [(spec.threads, spec.gpus) for spec in (first, second)] == [(torch.get_num_threads(), 0)] * 2
    worker = EngineWorker(**first.arguments)
    assert hasattr(backbone.model, "peft_config")
    worker.close()
    assert not hasattr(backbone.model, "peft_config")


def test_several_gpus_are_tensor_parallelism_of_vllm(config):
    engine = config.generation.named("vllm")
    assert engine.with_gpus(1) is engine
    options = engine.with_gpus(4).options
    assert (options["tensor_parallel_size"], options["distributed_executor_backend"]) == (4, "mp")
    for name in ("transformers", "scripted"):
        with pytest.raises(UserError, match=r"^cluster\.gpus_per_engine: .* computes on one GPU, got 4"):
            config.generation.named(name).with_gpus(4)


def test_a_process_whose_engine_is_dead_ends(monkeypatch, capsys):
    class EngineDeadError(Exception):
        pass

    class Ended(BaseException):
        pass

    monkeypatch.setattr(workers.os, "_exit", Mock(side_effect=Ended))
    worker = EngineWorker.__new__(EngineWorker)
    worker._generator, worker._dead = Mock(), EngineDeadError.__name__
    worker._generator.sample.side_effect = EngineDeadError("engine core has died")
    with pytest.raises(Ended):
        worker.sample([], 1, [], None)
    workers.os._exit.assert_called_once_with(1)
    assert "engine core has died" in capsys.readouterr().err
