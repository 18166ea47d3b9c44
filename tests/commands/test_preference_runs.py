"""Runs of `rlft rm` and `rlft dpo`: what is learned of rankings, what is measured, and what a folder is good for."""

import io
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.loop.parts import Engines
from rlft.loop.session import open_session
from rlft.loop.supervised import REFERENCE_LOGPROBS, REWARD, open_preferences
from rlft.runs import checkpoint
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import with_named_runs
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2


def write_pairs(file, numbers):
    rows = [{"prompt": f"What is {n} + 1?", "chosen": f"{n + 1}", "rejected": f"{n + 2}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_earlier_preferences_are_read_as_the_new_ones_are_with_a_split_of_their_own(tmp_path):
    words = [f"preferences.path={write_pairs(tmp_path / 'new.jsonl', range(40))}", "max_completion_tokens=16"]
    words += [f"replay.path={write_pairs(tmp_path / 'old.jsonl', range(100, 140))}", "rankings_per_step=8"]
    held_out = f"preferences.held_out_path={write_pairs(tmp_path / 'held_out.jsonl', range(200, 204))}"
    made = resolve(compose([*words, held_out], command="rm")).plan()
    assert (len(made.train.rankings), len(made.held_out.rankings)) == (40, 4)
    assert 30 <= len(made.replay.rankings) < 40  # a tenth of the old questions, by their hash, stays held out
    from_hub = resolve(compose([*words, "preferences=hub"], command="rm")).plan()
    assert from_hub.replay.rankings == made.replay.rankings


# -- a run -------------------------------------------------------------------------------------------------------------
LORA = ("lora.rank=4", "lora.alpha=8")
SMALL = (*LORA, "rankings_per_step=8", "model.device=cpu", "eval.num_rankings=12", "console=null")
RM = ("+recipe=rm_arithmetic", *SMALL)
DPO = ("+recipe=dpo_arithmetic", *SMALL, "steps=3")


def run(folder, command, *words):
    """The folder, with a finished run."""
    assert cli.run([command, *words, f"hydra.run.dir={folder}"]) == 0
    return folder


def evaluations(folder):
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained") / "run", "rm", *RM, "steps=3")


@pytest.mark.slow
def test_a_runs_bias_is_the_whole_difference_that_centring_makes(trained, tmp_path):
    plain = run(tmp_path / "run", "rm", *RM, "steps=3", "center=false")
    newest = Path("checkpoints") / "step_000003"
    for file in (newest / "optimizer.safetensors", newest / "reward" / "adapter_model.safetensors", Path("eval.jsonl")):
        assert (trained / file).read_bytes() == (plain / file).read_bytes()
    heads = [load_file(folder / newest / "reward" / "head.safetensors") for folder in (trained, plain)]
    assert torch.equal(heads[0]["weight"], heads[1]["weight"])
    assert heads[1]["bias"].item() == 0 != heads[0]["bias"].item()


@pytest.fixture
def policy_run(trained, tmp_path):
    """A session of `rlft train` whose reward is the run's model, and whose critic begins as it."""
    words = ["reward=[exact_match,learned]", f"reward.learned.path={trained}", "critic.init=reward", *LORA]
    words += ["algorithm=ppo", "critic.kind=adapter", "generation=transformers", "console=null", "scoring.workers=0"]
    plain = with_named_runs(compose([*words, "model.device=cpu", "data.size=64", "data.held_out_size=8"]))
    with Engines() as engines, open_session(resolve(plain).plan(), tmp_path, engines, lambda text: None) as session:
        yield session


def test_a_trained_folder_is_a_reward_and_where_a_critic_begins(trained, policy_run):
    """Its scores are the run's own, moved so that the best held-out completions have a mean of 0."""
    last = evaluations(trained)[-1]
    held_out = resolve(compose(RM, command="rm")).plan().held_out.rankings[:12]
    groups = [group(ranking) for ranking in held_out]
    scores = policy_run.scorer(groups).by_reward["learned"]
    best, worst = scores[:, 0].double(), scores[:, 1].double()
    assert best.mean().item() == pytest.approx(0, abs=1e-5)
    assert (best - worst).mean().item() == pytest.approx(last["eval/score_best"] - last["eval/score_worst"], abs=1e-5)
    assert last["eval/score_best"] != last["eval/score_worst"]
    weights = policy_run.roles.weights
    for name, tensor in weights("reward_learned").items():
        assert torch.equal(weights("critic")[name], tensor), name
    critic, reward = (policy_run.roles.heads[role].weights() for role in ("critic", "reward_learned"))
    assert torch.equal(critic["weight"], reward["weight"])
    assert reward["weight"].abs().max() > 0


def group(ranking):
    prompt = Prompt(id=str(ranking.prompt), messages=(), answer="0", token_ids=ranking.prompt)
    completions = (
        Completion(text="", token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=FinishReason.stop)
        for ids in ranking.completions
    )
    rollouts = tuple(Rollout(prompt=prompt, completion=c, policy_version=0) for c in completions)
    return Group(prompt=prompt, rollouts=rollouts)


def test_another_round_goes_on_from_a_trained_reward_model(trained, tmp_path):
    began = evaluations(run(tmp_path / "run", "rm", *RM, "steps=1", f"lora.path={trained}"))[0]
    ended = evaluations(trained)[-1]
    assert began["step"] == 0
    for name in ("eval/pairs", "eval/loss", "eval/score_best", "eval/score_worst"):
        assert began[name] == pytest.approx(ended[name], abs=1e-6), name


def test_a_reward_model_may_begin_as_a_policys_adapter_with_a_head_of_zeros(make_roles, tmp_path):
    policy = make_roles(noise=0.05)
    weights = policy.weights("policy")
    saved = Checkpoint(
        step=1, adapters={"policy": weights}, adapter_config=policy.adapter_config(), optimizer={}, state={}
    )
    folder = checkpoint.save(tmp_path, saved, keep=1) / "policy"
    policy.close()
    words = [*SMALL, "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64"]
    words.append(f"lora.path={folder}")
    with ExitStack() as stack:
        task = open_preferences(resolve(compose(words, command="rm")).plan(), stack)
        for name, tensor in task.roles.weights(REWARD).items():
            assert torch.equal(tensor, weights[name]), name
        assert task.roles.heads[REWARD].weight.abs().max() == 0
        assert task.evaluate(0).accuracy == 0.5


# -- a policy ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def optimised(tmp_path_factory):
    return run(tmp_path_factory.mktemp("optimised") / "run", "dpo", *DPO)


def test_three_updates_move_the_pairs_apart(optimised):
    first, last = evaluations(optimised)
    assert (first["eval/margin"], first["accuracy"]) == (0.0, 0.5)
    assert last["eval/margin"] > 0.005
    assert last["accuracy"] > 0.7
    files = {file.name for file in (optimised / "checkpoints" / "step_000003").iterdir()}
    assert {"policy", f"{REFERENCE_LOGPROBS}.safetensors"} < files
    kept = load_file(optimised / "checkpoints" / "step_000003" / f"{REFERENCE_LOGPROBS}.safetensors")
    assert (len(kept["positions"]), len(kept["logprobs"])) == (24, 48)  # 3 updates x 8 pairs, and both ends of each


@pytest.mark.slow
def test_another_round_begins_as_its_reference_wherever_the_first_one_ended(optimised):
    """lora.path=<run> is the policy's start and, by snapshot.reference=auto, the reference: their log-ratios are 0."""
    with ExitStack() as stack:
        task = open_preferences(
            resolve(with_named_runs(compose([*DPO, f"lora.path={optimised}"], command="dpo"))).plan(), stack
        )
        assert task.plan.reference == str(optimised / "checkpoints" / "step_000003" / "policy")
        metrics = task.evaluate(0).metrics
        assert metrics["eval/margin"] == 0.0
        assert metrics["eval/chosen_logprob"] == pytest.approx(
            evaluations(optimised)[-1]["eval/chosen_logprob"], rel=1e-5
        )
    with ExitStack() as stack:  # held to the base, it begins where the first round ended
        words = [*DPO, f"lora.path={optimised}", "snapshot.reference=base"]
        metrics = (
            open_preferences(resolve(with_named_runs(compose(words, command="dpo"))).plan(), stack).evaluate(0).metrics
        )
        assert metrics["eval/margin"] == pytest.approx(evaluations(optimised)[-1]["eval/margin"], rel=1e-4)


def test_its_run_is_evaluated_talked_to_and_exported_as_any_policys(optimised, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    small = ["generation=transformers", "generation.max_tokens=16", "model.device=cpu"]
    words = [f"run={optimised}", "data=arithmetic", "data.size=16", "data.held_out_size=4", "scoring.workers=0", *small]
    assert cli.run(["eval", *words, "eval.num_samples=2"]) == 0
    assert "pass@2" in capfd.readouterr().out
    assert cli.run(["chat", f"run={optimised}", "model.device=cpu"]) == 0
    assert cli.run(["export", f"run={optimised}", f"out={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| Loss | dpo: beta=0.1, " in card
    assert "- dpo" in card
    assert "| margin | 0.0000 |" in card


def test_its_plan_counts_the_log_probs_that_a_checkpoint_keeps():
    """926 pairs: a position and two log-probs each, of 8 bytes, are 2 x 3 x 926 numbers of 4; three copies are kept."""
    made = resolve(compose(DPO, command="dpo")).plan()
    free = resolve(compose([*DPO, "loss=simpo"], command="dpo")).plan()
    assert len(made.train.rankings) == 926
    every = made.config.checkpoint
    copies = min(every.keep + 1, 1 + (made.num_steps - 1) // every.every)
    assert made.disk_bytes()["checkpoints"] - free.disk_bytes()["checkpoints"] == copies * 4 * 2 * 3 * 926
