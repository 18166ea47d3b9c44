"""Forks of supervised runs, and which keys a checkpoint fits; forks of `rlft train` are seen in whole runs."""

import json

import pytest
import yaml
from slow_cases import slow

from rlft import cli
from rlft.config.compose import changed, compose
from rlft.runs import checkpoint, fork as forks, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.fork import open_fork
from rlft.types import UserError

COMMON = ("model.device=cpu", "lora.rank=2", "max_completion_tokens=64", "prompts.max_tokens=64", "steps=3")
OFTEN = ("checkpoint.every=1", "checkpoint.keep=9", "eval.every=2", "console=null")
SFT = ("sft", *COMMON, *OFTEN, "demonstrations.path=embedded:arithmetic-demonstrations", "examples_per_step=2")
RM = ("rm", *COMMON, *OFTEN, "preferences.path=embedded:arithmetic-preferences", "rankings_per_step=2")


def checkpoint_of(run, step):
    return run / "checkpoints" / f"step_{step:06d}"


@pytest.mark.parametrize("words", [SFT, slow(RM)], ids=["sft", "rm"])
def test_a_fork_of_a_supervised_run_does_what_the_run_did(words, tmp_path):
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert cli.run([*words, f"hydra.run.dir={run}"]) == 0
    assert cli.run(["resume", str(checkpoint_of(run, 2)), f"hydra.run.dir={fork}"]) == 0
    for file in sorted(checkpoint_of(run, 3).rglob("*")):
        if file.is_file():
            assert (fork / file.relative_to(run)).read_bytes() == file.read_bytes(), file.name
    assert (fork / "eval.jsonl").read_bytes() == (run / "eval.jsonl").read_bytes()
    record = yaml.safe_load((fork / "config.yaml").read_text())["origin"]["forked_from"]
    assert (record["run"], record["step"], record["changed"]) == ("../run", 2, {})
    for command in ("runs", "report", "diff"):
        places = [str(tmp_path)] if command == "runs" else [str(run), str(fork)]
        out = [f"out={tmp_path / 'both.html'}"] if command == "report" else []
        assert cli.run([command, *places, *out]) == 0


@pytest.fixture
def make_fork(tmp_path):
    """Makes a run with a checkpoint of step 4, and gives its fork with the config that these changes make."""

    def make(*changes, begun_with=(), state=None):
        run = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        run.mkdir()
        plain = compose(["+recipe=grpo_arithmetic", *begun_with])
        run_folder.write_config(run, plain, {"data_fingerprint": "a", "base_fingerprint": "b"})
        saved = Checkpoint(step=4, adapters={"policy": {}}, adapter_config={}, optimizer={}, state=state or {})
        folder = checkpoint.save(run_folder.checkpoints(run), saved, keep=1)
        return open_fork(run, folder), changed(plain, list(changes), None)

    return make


FITS = (
    "trainer.lr=1", "trainer.schedule=cosine", "trainer.beta1=0.5", "trainer.warmup=3", "algorithm.kl_coef=0.3",
    "algorithm=gspo", "seed=3", "group_size=4", "prompts_per_step=4", "epochs=2", "minibatches=2", "steps=7",
    "generation.temperature=0.7", "generation.max_tokens=12", "reward=[exact_match]", "reward.format.weight=0.7",
    "snapshot.reference=base", "lora.dropout=0.1", "eval.every=3", "alarms=null", "data.size=64",
    "dynamic_sampling.max_rounds=1", "critic.lr=1", "name=other", "model.gradient_checkpointing=true",
)  # fmt: skip
FITS_NOT = {
    "lora.rank=3": (), "lora.alpha=3": (), "lora.target_modules=[q_proj]": (), "lora.path=x": (),
    "model.dtype=bfloat16": (), "model.quantization=4bit": (), "snapshot.reference=ema": (), "snapshot.old=copy": (),
    "snapshot.reference=base": ("snapshot.reference=copy",), "critic.kind=shared": (),
    "critic.normalize_values=true": (), "reward_model.refresh_every=5": (),
    "reward.learned.path=x": ("reward=[exact_match,learned]", "reward_model.refresh_every=5"),
}  # fmt: skip
"""{change: words that the run was begun with}."""


def test_what_a_checkpoint_fits_may_change(make_fork):
    fork, config = make_fork()
    for change in FITS:
        forks.check(fork, changed(config, [change], None), {"data_fingerprint": "a", "base_fingerprint": "b"}, 9)


def test_what_a_checkpoint_does_not_fit_is_refused_by_its_key(make_fork):
    for change, begun_with in FITS_NOT.items():
        fork, config = make_fork(change, begun_with=begun_with)
        with pytest.raises(UserError, match="made with other values") as error:
            forks.check(fork, config, {}, 9)
        assert f"({change.partition('=')[0]}: " in error.value.problem


def test_data_may_be_replaced_but_not_change_by_themselves_and_the_base_never(make_fork):
    fork, config = make_fork("data.size=64")
    other = {"data_fingerprint": "other", "base_fingerprint": "b"}
    forks.check(fork, config, other, 9)
    with pytest.raises(UserError, match=r"^data\.path: the training data changed since the run began"):
        forks.check(fork, fork.before, other, 9)
    with pytest.raises(UserError, match=r"^model\.path: the base changed since the run began"):
        forks.check(fork, {**config, "model": {**config["model"], "path": "elsewhere"}}, {"base_fingerprint": "c"}, 9)
    with pytest.raises(UserError, match=r"^steps: the new run begins after step 4, got 4; raise it"):
        forks.check(fork, fork.before, {}, 4)


@pytest.mark.parametrize(("change", "kept"), [("algorithm.kl_coef=0.3", {}), ("trainer.lr=1", {"kl_coef": 0.9})])
def test_a_coefficient_that_is_changed_is_not_what_a_controller_had_made_of_it(change, kept, make_fork, tmp_path):
    fork, config = make_fork(change, state={"algorithm": {"kl_coef": 0.9}, "seed": 0})
    (tmp_path / "new").mkdir()
    forks.begin(fork, tmp_path / "new", config, {}, 9)
    copied = checkpoint_of(tmp_path / "new", 4)
    assert checkpoint.find_damage(copied) is None
    assert json.loads((copied / "state.json").read_text()) == {"algorithm": kept, "format": 1, "seed": 0, "step": 4}


def test_a_folder_with_other_checkpoints_is_refused(make_fork, tmp_path):
    fork, config = make_fork()
    theirs = tmp_path / "new" / "checkpoints" / "mine.txt"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(UserError, match=r"^hydra\.run\.dir: there is a mine\.txt in its checkpoints"):
        forks.begin(fork, tmp_path / "new", config, {}, 9)
    assert theirs.exists()
