"""Runs of on-policy distillation, in this process: resumed, and from teachers of every kind."""

import shutil
from typing import Any

import pytest
from run_folders import check_goes_on, check_same, learned, metrics
from slow_cases import slow

from rlft import cli
from rlft.config.compose import compose
from rlft.config.model import ModelConfig, SnapshotConfig
from rlft.config.resolved import resolve
from rlft.loop import parts as parts_of_runs, workers
from rlft.loop.parts import load_teacher
from rlft.plan import fit
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import sizes_of
from rlft.runs.find import with_named_runs
from rlft.system import device

SMALL = (
    "train", "+recipe=grpo_arithmetic", "model.device=cpu", "lora.rank=4", "lora.alpha=8", "prompts_per_step=2",
    "group_size=2", "generation=transformers", "generation.max_tokens=12", "eval.every=0", "data.size=64",
    "data.held_out_size=8", "scoring.workers=0", "console=null", "checkpoint.every=1", "checkpoint.keep=99",
    "trainer.lr=0.02",
)  # fmt: skip
OPD = (*SMALL, "algorithm=opd")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of one step: its policy is the teacher of those below."""
    folder = tmp_path_factory.mktemp("teachers") / "teacher"
    assert cli.run([*SMALL, "steps=1", "algorithm.entropy_coef=1.0", f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_exact_kl_is_that_of_the_networks_from_the_rehearsal_on(place, tmp_path):
    words = ["algorithm.kl_estimator=exact", f"algorithm.kl_in={place}", "algorithm.kl_coef=0.1"]
    words += ["algorithm.entropy_coef=1.0"]  # so that it learns
    run = tmp_path / "run"
    assert cli.run([*SMALL, *words, "snapshot.reference=base", "steps=2", f"hydra.run.dir={run}"]) == 0
    first, second = metrics(run)
    assert first["kl/reference"] == 0.0
    assert second["kl/reference"] > 0.0


@pytest.mark.slow
def test_a_run_with_another_runs_policy_as_teacher_resumes_as_the_same_run_though_it_has_moved(teacher, tmp_path):
    there = shutil.copytree(teacher, tmp_path / "there")
    words = (*OPD, f"snapshot.teacher={there}", "algorithm.reward_coef=0.5", "lora.dropout=0.1")
    run, halted = tmp_path / "run", tmp_path / "halted"
    for folder, steps in ((run, 2), (halted, 1)):
        assert cli.run([*words, f"steps={steps}", f"hydra.run.dir={folder}"]) == 0
    moved = there.rename(tmp_path / "moved")
    assert cli.run(["resume", str(halted), "steps=2", f"snapshot.teacher={moved}"]) == 0
    check_same(halted, run)
    assert learned(run)
    first, _ = metrics(run)
    assert first["kl/teacher"] > 1e-5
    assert 0 < first["teacher/agreement"] < 1
    assert not any(name == "teacher" for found in run.glob("checkpoints/*") for name in found.iterdir())


@pytest.mark.parametrize("command", ["train", slow("dpo")])
def test_a_frozen_adapter_of_another_rank_is_counted_with_its_own_size(teacher, command):
    """An adapter of rank 4 beside a policy of rank 2, which has half as many parameters."""
    words = {
        "train": (*SMALL, "algorithm=opd", f"snapshot.teacher={teacher}", f"snapshot.reference={teacher}"),
        "dpo": ("dpo", "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64",
                f"snapshot.reference={teacher}"),
    }[command]  # fmt: skip
    plan = resolve(with_named_runs(compose([*words[1:], "lora.rank=2"], command=command))).plan()
    sizes = sizes_of(plan.config.model, plan.config.lora)
    demand = plan.demand(sizes, False)
    frozen = 2 if command == "train" else 1
    assert demand.networks.frozen == frozen * 2 * sizes.lora
    assert demand.networks.adapters == 1
    [part] = [part for part in parts(sizes, demand, 0) if part.name == "adapters"]
    copies = 1 if command == "train" else 0  # the sampler's
    assert part.bytes == 4 * sizes.lora * (1 + copies + 2 * frozen)
    table = plan.parameters(sizes)
    assert table["policy (learns)"] == sizes.lora
    assert [number for role, number in table.items() if role[:3] in ("tea", "ref")] == frozen * [2 * sizes.lora]


def test_a_fork_may_learn_from_the_base_which_its_policy_is_no_longer(teacher, tmp_path):
    words = ("algorithm=opd", "snapshot.teacher=base", "steps=2", f"hydra.run.dir={tmp_path / 'fork'}")
    assert cli.run(["resume", str(teacher / "checkpoints" / "step_000001"), *words]) == 0
    assert metrics(tmp_path / "fork")[-1]["kl/teacher"] > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), ("overlap.lag=1", "algorithm.mismatch=token_truncate")], ids=["", "lag"])
def test_a_hint_alone_teaches_the_base_and_the_run_resumes_as_the_same_run(beside, tmp_path):
    """No reward counts. At the first step the policy is the base: with the same prompt both agree to rounding."""
    hint = 'snapshot.teacher_hint="The answer is {answer}."'
    words = (*OPD, *beside, "snapshot.teacher=base", "prompts.max_tokens=64", "token_budget=1024", "lora.dropout=0.1")
    run = check_goes_on(tmp_path, (*words, hint), 1, 2)
    assert learned(run)
    assert all(step["kl/teacher"] > 1e-4 for step in metrics(run))
    assert cli.run([*words, "algorithm.reward_coef=1", "steps=1", f"hydra.run.dir={tmp_path / 'bare'}"]) == 0
    assert metrics(tmp_path / "bare")[0]["kl/teacher"] < 1e-10


def test_a_larger_model_and_a_hint_in_the_loss_and_beside_rewards(tmp_path):
    """`tiny-student` learns from `tiny-arithmetic`, with the answer in its prompt, by four tokens in each place."""
    words = (
        "model.path=embedded:tiny-student", "snapshot.teacher=embedded:tiny-arithmetic", "algorithm.top_k=4",
        "snapshot.teacher_hint='The answer is {answer}.'", "algorithm.teacher_in=loss", "prompts.max_tokens=48",
        "algorithm.divergence=jensen_shannon", "algorithm.reward_coef=1.0", "cluster.lanes=2", "steps=2",
    )  # fmt: skip
    assert cli.run([*OPD, *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    first, second = metrics(tmp_path / "run")
    assert first["loss/teacher"] > 0
    assert first["loss/total"] == pytest.approx(first["loss/teacher"] + first["loss/policy"], rel=1e-5)
    assert first["policy/grad_norm"] > 0
    assert second["loss/teacher"] != first["loss/teacher"]


@pytest.mark.parametrize("where", ["run", "rank"])
def test_what_a_teacher_takes_is_not_free_for_activations(where, run_config, tmp_path, monkeypatch):
    """Activations may take half of what is free: all of it, less a byte for the teacher, is a byte too little."""
    loaded, told = [], []
    of_where = {"run": parts_of_runs, "rank": workers}[where]

    def load_and_count(snapshot: SnapshotConfig, model: ModelConfig) -> Any:
        loaded.append(load_teacher(snapshot, model))
        return loaded[-1]

    monkeypatch.setattr(of_where, "load_teacher", load_and_count)
    monkeypatch.setattr(fit, "activation_bytes", lambda *args, **keys: 500)
    monkeypatch.setattr(device, "free_memory", lambda: 1000 - len(loaded))
    monkeypatch.setattr(parts_of_runs, "set_checkpointing", lambda model, needed: told.append(needed))
    words = ("snapshot.teacher=embedded:tiny-arithmetic", "model.path=embedded:tiny-student", "prompts.max_tokens=48",
             "model.gradient_checkpointing=auto")  # fmt: skip
    if where == "run":
        assert cli.run([*OPD, *words, "steps=1", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    else:
        with workers.opened_trainer(run_config(*OPD[1:], *words), needs_old=True):
            pass
    assert told == [True]


@pytest.mark.slow
def test_a_run_with_a_teacher_in_vllm_resumes_as_the_same_run_and_learns_what_a_loaded_teacher_teaches(tmp_path):
    """One batch of rows in one order: the same bits. To transformers the log-probs are 1e-4 away, in float32."""
    words = (
        *OPD, "snapshot.teacher=embedded:tiny-arithmetic", "model.path=embedded:tiny-student", "token_budget=512",
        "algorithm.teacher_in=loss", "algorithm.top_k=4", "algorithm.reward_coef=1.0", "prompts.max_tokens=48",
    )  # fmt: skip
    again = "snapshot.teacher_gpu_memory_utilization=0.2"
    run, loaded = check_goes_on(tmp_path, (*words, "snapshot.teacher_engine=vllm"), 1, 2, again), tmp_path / "loaded"
    assert cli.run([*words, "steps=1", f"hydra.run.dir={loaded}"]) == 0
    (first, _), [same] = metrics(run), metrics(loaded)
    assert first.keys() == same.keys()
    for name in ("loss/teacher", "kl/teacher", "teacher/agreement"):
        assert first[name] == pytest.approx(same[name], abs=1e-4)
