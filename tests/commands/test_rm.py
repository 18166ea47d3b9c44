"""Reward models: what is learned of rankings, what is measured, and what a trained folder is good for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlft import cli
from rlft.commands.preferences import REWARD, open_task
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.examples import RankedTokens
from rlft.loop.engines import Engines
from rlft.loop.session import open_session
from rlft.model.roles import Roles
from rlft.runs import checkpoint
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import with_named_runs
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2


def write_pairs(file: Path, numbers: Sequence[int]) -> Path:
    rows = [{"prompt": f"What is {n} + 1?", "chosen": f"{n + 1}", "rejected": f"{n + 2}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_earlier_preferences_are_read_as_the_new_ones_are_with_a_split_of_their_own(tmp_path: Path) -> None:
    words = [f"preferences.path={write_pairs(tmp_path / 'new.jsonl', range(40))}", "max_completion_tokens=16"]
    words += [f"replay.path={write_pairs(tmp_path / 'old.jsonl', range(100, 140))}", "rankings_per_step=8"]
    held_out = f"preferences.held_out_path={write_pairs(tmp_path / 'held_out.jsonl', range(200, 204))}"
    made = resolve(compose([*words, held_out], verb="rm")).plan()
    assert made.replay is not None
    assert (len(made.train.rankings), len(made.held_out.rankings)) == (40, 4)
    assert 30 <= len(made.replay.rankings) < 40  # a tenth of the old questions, by their hash, stays held out
    from_hub = resolve(compose([*words, "preferences=hub"], verb="rm")).plan()
    assert from_hub.replay is not None
    assert from_hub.replay.rankings == made.replay.rankings


# -- a run -------------------------------------------------------------------------------------------------------------
LORA = ("lora.rank=4", "lora.alpha=8")
TINY = (
    "+recipe=rm_arithmetic",
    *LORA,
    "steps=3",
    "rankings_per_step=8",
    "model.device=cpu",
    "eval.num_rankings=12",
    "logger=[jsonl]",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert cli.run(["rm", *TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_runs_bias_is_the_whole_difference_that_centring_makes(trained: Path, tmp_path: Path) -> None:
    assert cli.run(["rm", *TINY, "center=false", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    newest = Path("checkpoints") / "step_000003"
    for file in (newest / "optimizer.safetensors", newest / "reward" / "adapter_model.safetensors", Path("eval.jsonl")):
        assert (trained / file).read_bytes() == (tmp_path / "run" / file).read_bytes()
    heads = [load_file(folder / newest / "reward" / "head.safetensors") for folder in (trained, tmp_path / "run")]
    assert torch.equal(heads[0]["weight"], heads[1]["weight"])
    assert heads[1]["bias"].item() == 0 != heads[0]["bias"].item()


@pytest.fixture
def policy_run(trained: Path, tmp_path: Path) -> Iterator[Any]:
    """A session of `rlft train` whose reward is the run's model, and whose critic begins as it."""
    words = ["reward=[exact_match,learned]", f"reward.learned.path={trained}", "critic.init=reward", *LORA]
    words += ["algorithm=ppo", "critic.kind=adapter", "generation=transformers", "logger=[]", "scoring.workers=0"]
    plain = with_named_runs(compose([*words, "model.device=cpu", "data.size=64", "data.held_out_size=8"]))
    with Engines() as engines, open_session(resolve(plain).plan(), tmp_path, engines, lambda text: None) as session:
        yield session


def test_a_trained_folder_is_a_reward_and_where_a_critic_begins(trained: Path, policy_run: Any) -> None:
    """Its scores are the run's own, moved so that the best held-out completions have a mean of 0."""
    last = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    held_out = resolve(compose(TINY, verb="rm")).plan().held_out.rankings[:12]
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


def group(ranking: RankedTokens) -> Group:
    prompt = Prompt(id=str(ranking.prompt), messages=(), answer="0", token_ids=ranking.prompt)
    completions = (
        Completion(text="", token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=FinishReason.stop)
        for ids in ranking.completions
    )
    rollouts = tuple(Rollout(prompt=prompt, completion=c, policy_version=0) for c in completions)
    return Group(prompt=prompt, rollouts=rollouts)


def test_another_round_goes_on_from_a_trained_reward_model(trained: Path, tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("steps=")]
    assert cli.run(["rm", *words, "steps=1", f"lora.path={trained}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    ended = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    began = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert began["step"] == 0
    for name in ("eval/pairs", "eval/loss", "eval/score_best", "eval/score_worst"):
        assert began[name] == pytest.approx(ended[name], abs=1e-6), name


def test_a_reward_model_may_begin_as_a_policys_adapter_with_a_head_of_zeros(
    make_roles: Callable[..., Roles], tmp_path: Path
) -> None:
    policy = make_roles(noise=0.05)
    weights = policy.weights("policy")
    saved = Checkpoint(
        step=1, adapters={"policy": weights}, adapter_config=policy.adapter_config(), optimizer={}, state={}
    )
    folder = checkpoint.save(tmp_path, saved, keep=1) / "policy"
    policy.close()
    words = [word for word in TINY if not word.startswith("+recipe=")]
    words += ["preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", f"lora.path={folder}"]
    with ExitStack() as stack:
        task = open_task(resolve(compose(words, verb="rm")).plan(), stack)
        for name, tensor in task.roles.weights(REWARD).items():
            assert torch.equal(tensor, weights[name]), name
        assert task.roles.heads[REWARD].weight.abs().max() == 0
        assert task.evaluate(0).accuracy == 0.5
