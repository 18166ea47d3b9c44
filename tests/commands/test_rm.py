"""Reward models: what is learned of rankings, what is measured, and what a trained folder is good for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlft import cli
from rlft.algorithm.preference.bradley_terry import BradleyTerry
from rlft.commands.preferences import BIAS, REWARD, PreferenceTask, open_task
from rlft.config.compose import build, compose
from rlft.config.schema import RmConfig
from rlft.data.examples import RankedTokens, Rankings
from rlft.loop.engines import Engines
from rlft.loop.session import open_session
from rlft.model.backbone import Backbone
from rlft.model.roles import Roles
from rlft.model.rows import rows_of
from rlft.plan.preference_plan import PreferencePlan
from rlft.plan.preference_plan import make_plan as make_rm_plan
from rlft.plan.train_plan import make_plan
from rlft.runs import checkpoint
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.references import resolved
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2

P, Q = (5, 6, 7), (9, 10)
# Best first, ids under 60: a pair, three ranked ones of another prompt, and a pair of the first prompt once more.
RANKINGS = (
    RankedTokens(prompt=P, completions=((20, 21, 2), (22, 2)), scores=(1.0, 0.0)),
    RankedTokens(prompt=Q, completions=((30, 2), (31, 32, 33, 2), (34,)), scores=(3.0, 1.0, 0.5)),
    RankedTokens(prompt=P, completions=((23, 2), (20, 21, 2)), scores=(1.0, 0.0)),
)


def rankings(found: Sequence[RankedTokens]) -> Rankings:
    return Rankings(rankings=tuple(found), fingerprint="", note=None)


def plan(
    *keys: str, train: Sequence[RankedTokens] = RANKINGS, replay: Sequence[RankedTokens] | None = None
) -> PreferencePlan:
    fixed = ["preferences.path=unread"]
    if not any(key.startswith("rankings_per_step=") for key in keys):
        fixed.append(f"rankings_per_step={len(train)}")
    config = build(compose([*fixed, *keys], verb="rm"), RmConfig, "rm")
    return PreferencePlan(
        config=config,
        loss=BradleyTerry(margin=config.margin),
        plain={},
        engine=None,
        train=rankings(train),
        held_out=rankings(RANKINGS[:2]),
        replay=None if replay is None else rankings(replay),
        loggers=(),
        fingerprints={},
        notes=(),
    )


@pytest.fixture
def roles(make_roles: Callable[..., Roles], make_double: Callable[[], Backbone]) -> Roles:
    """A reward's adapter and head, not all zeros, on a model of float64."""
    made = make_roles(backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in made.named_parameters(REWARD):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def score(roles: Roles, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """The head at the last token, by the plainest forward there is; the role is the active one."""
    hidden = roles.backbone.model.base_model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state
    return roles.heads[REWARD](hidden[0, -1])


# -- a step ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_a_steps_gradient_is_that_of_the_mean_over_rankings_of_the_mean_over_pairs(roles: Roles, margin: float) -> None:
    """-log sigmoid(s_better - s_worse - margin x difference of ranks): of the second ranking's three pairs the mean."""
    by_name = [(name, p) for name, p in roles.named_parameters(REWARD) if name != BIAS]
    with roles.learning(REWARD):
        losses = []
        for ranking in RANKINGS:
            s = [score(roles, ranking.prompt, completion) for completion in ranking.completions]
            pairs = [(i, j) for i in range(len(s)) for j in range(i + 1, len(s))]
            leads = [s[i] - s[j] - margin * (ranking.scores[i] - ranking.scores[j]) for i, j in pairs]
            losses.append(torch.stack([torch.log1p(torch.exp(-lead)) for lead in leads]).mean())
        loss = torch.stack(losses).mean()
        expected = dict(
            zip([name for name, _ in by_name], torch.autograd.grad(loss, [p for _, p in by_name]), strict=True)
        )
    largest = max(g.abs().max() for g in expected.values())
    for token_budget in (1, 17, 40, 10**6):
        task = PreferenceTask(plan(f"margin={margin}", f"token_budget={max(token_budget, 2000)}"), roles)
        task.config = replace(task.config, token_budget=token_budget)
        metrics = task.backward(0)
        assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-9)
        assert [name for name, _ in task.parameters()] == list(expected)
        for name, parameter in task.parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad / largest, expected[name] / largest, rtol=1e-9, atol=1e-9)
            parameter.grad = None


def test_a_token_budget_parts_rankings_but_tears_none(roles: Roles) -> None:
    """Each row is a token longer than it is, and a prompt is read once: 3 + 4 + 3 tokens, 2 + 3 + 5 + 2, 3 + 3 + 4."""
    task = PreferenceTask(plan(), roles)

    def parts(token_budget: int) -> list[int]:
        task.config = replace(task.config, token_budget=token_budget)
        return [len(part) for part in task.micro_batches(RANKINGS)]

    assert parts(1) == [1, 1, 1]
    assert parts(22) == [2, 1]
    assert parts(21) == [1, 1, 1]
    assert parts(29) == [3]  # the first prompt's rows are one group: 3 + 4 + 3 + 3 + 4 and the second's 12
    assert parts(28) == [2, 1]


def test_completions_of_one_prompt_are_a_group_even_in_two_rankings() -> None:
    assert [(group, completion) for group, _, completion in rows_of(RANKINGS)] == [
        (0, (20, 21, 2)), (0, (22, 2)), (1, (30, 2)), (1, (31, 32, 33, 2)), (1, (34,)), (0, (23, 2)), (0, (20, 21, 2)),
    ]  # fmt: skip


def test_a_head_of_zeros_is_right_by_half_and_loses_log_2(make_roles: Callable[..., Roles], make_double: Any) -> None:
    made = make_roles(backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    task = PreferenceTask(plan(), made)
    evaluation = task.evaluate(0)
    assert (evaluation.accuracy, evaluation.accuracy_se) == (0.5, 0.0)
    assert evaluation.metrics["eval/loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert task.backward(0)["accuracy/pairs"] == 0.5


def test_the_evaluation_is_of_the_held_out_rankings_without_a_margin(roles: Roles) -> None:
    task = PreferenceTask(plan("margin=5"), roles)
    with roles.learning(REWARD):
        s = [[score(roles, r.prompt, c).item() for c in r.completions] for r in RANKINGS[:2]]
    found = task.evaluate(7).metrics
    pairs = [[s[0][0] - s[0][1]], [s[1][0] - s[1][1], s[1][0] - s[1][2], s[1][1] - s[1][2]]]
    right = [sum(lead > 0 for lead in leads) / len(leads) for leads in pairs]
    losses = [sum(math.log1p(math.exp(-lead)) for lead in leads) / len(leads) for leads in pairs]
    assert found["eval/pairs"] == pytest.approx(sum(right) / 2, abs=1e-12)
    assert found["eval/loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)
    assert found["eval/score_best"] == pytest.approx((s[0][0] + s[1][0]) / 2, rel=1e-9)
    assert found["eval/score_worst"] == pytest.approx((s[0][1] + s[1][2]) / 2, rel=1e-9)


# -- centring ----------------------------------------------------------------------------------------------------------
def best_scores(roles: Roles, head: dict[str, Tensor]) -> list[float]:
    """Of the held-out rankings' best completions, with this head."""
    running = roles.heads[REWARD].weights()
    roles.heads[REWARD].restore(head)
    with roles.learning(REWARD), torch.no_grad():
        found = [score(roles, r.prompt, r.completions[0]).item() for r in RANKINGS[:2]]
    roles.heads[REWARD].restore(running)
    return found


def test_the_saved_head_gives_the_best_held_out_completions_a_mean_of_0(roles: Roles) -> None:
    centred = dict(PreferenceTask(plan(), roles).saved(1, {}, {}).heads[REWARD])
    plain = dict(PreferenceTask(plan("center=false"), roles).saved(1, {}, {}).heads[REWARD])
    assert sum(best_scores(roles, centred)) / 2 == pytest.approx(0, abs=1e-12)
    assert abs(sum(best_scores(roles, plain)) / 2) > 1e-3
    assert plain["bias"].tolist() == [0.0]
    assert torch.equal(centred["weight"], plain["weight"])


def test_centring_changes_nothing_that_is_learned(roles: Roles) -> None:
    """The bias is no parameter of the run, it is 0 in it, and 0 again after a resume from a centred checkpoint."""
    task = PreferenceTask(plan(), roles)
    before = {name: p.detach().clone() for name, p in roles.named_parameters(REWARD)}
    saved = task.saved(1, {}, {})
    assert saved.heads[REWARD]["bias"].item() != 0
    assert before[BIAS].item() == 0
    task.restore(saved)
    for name, parameter in roles.named_parameters(REWARD):
        assert torch.equal(parameter, before[name]), name
    assert BIAS not in dict(task.parameters())


# -- replay ------------------------------------------------------------------------------------------------------------
EARLIER = tuple(RankedTokens(prompt=(50 + i,), completions=((1,), (2,)), scores=(1.0, 0.0)) for i in range(6))
NEW = tuple(RankedTokens(prompt=(20 + i,), completions=((1,), (2,)), scores=(1.0, 0.0)) for i in range(12))


def at(made: PreferencePlan, step: int) -> list[RankedTokens]:
    """The rankings of the update after `step` steps."""
    return [*(made.train.rankings[i] for i in made.positions(step)), *made.replayed(step)]


@pytest.mark.parametrize(
    ("size", "fraction", "num_replayed"),
    [(10, 0.1, 1), (10, 0.25, 2), (10, 0.35, 4), (4, 0.1, 0), (4, 0.5, 2), (4, 0.0, 0), (4, 0.9, 3), (1, 0.9, 0)],
)
def test_of_an_update_this_share_is_replayed_and_one_ranking_at_least_is_new(
    size: int, fraction: float, num_replayed: int
) -> None:
    # Rounded to the nearest: 10 x 0.25 = 2.5 and 10 x 0.35 = 3.5 go to the even one.
    made = plan(f"rankings_per_step={size}", f"replay.fraction={fraction}", train=NEW, replay=EARLIER)
    for step in range(5):
        found = at(made, step)
        assert len(found) == size
        assert sum(r in EARLIER for r in found) == num_replayed
        assert at(made, step) == found
    assert made.num_steps == max(1, 12 // (size - num_replayed))


def test_without_replay_all_rankings_are_new() -> None:
    made = plan("rankings_per_step=4", "replay.fraction=0.5", train=NEW)
    passed = [ranking for step in range(3) for ranking in at(made, step)]
    assert set(passed) == set(NEW)
    assert made.num_steps == 3


def test_replayed_rankings_repeat_where_they_are_few() -> None:
    made = plan("rankings_per_step=8", "replay.fraction=0.5", train=NEW, replay=EARLIER[:1])
    assert [r in EARLIER for r in at(made, 0)] == [False] * 4 + [True] * 4


def write_pairs(file: Path, numbers: Sequence[int]) -> Path:
    rows = [{"prompt": f"What is {n} + 1?", "chosen": f"{n + 1}", "rejected": f"{n + 2}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_earlier_preferences_are_read_as_the_new_ones_are_with_a_split_of_their_own(tmp_path: Path) -> None:
    words = [f"preferences.path={write_pairs(tmp_path / 'new.jsonl', range(40))}", "max_completion_tokens=16"]
    words += [f"replay.path={write_pairs(tmp_path / 'old.jsonl', range(100, 140))}", "rankings_per_step=8"]
    held_out = f"preferences.held_out_path={write_pairs(tmp_path / 'held_out.jsonl', range(200, 204))}"
    made = make_rm_plan(compose([*words, held_out], verb="rm"))
    assert made.replay is not None
    assert (len(made.train.rankings), len(made.held_out.rankings)) == (40, 4)
    assert 30 <= len(made.replay.rankings) < 40  # a tenth of the old questions, by their hash, stays held out
    from_hub = make_rm_plan(compose([*words, "preferences=hub"], verb="rm"))
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
    plain = resolved(compose([*words, "model.device=cpu", "data.size=64", "data.held_out_size=8"]))
    with Engines() as engines, open_session(make_plan(plain), tmp_path, engines, lambda text: None) as session:
        yield session


def test_a_trained_folder_is_a_reward_and_where_a_critic_begins(trained: Path, policy_run: Any) -> None:
    """Its scores are the run's own, moved so that the best held-out completions have a mean of 0."""
    last = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    held_out = make_rm_plan(compose(TINY, verb="rm")).held_out.rankings[:12]
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
        task = open_task(make_rm_plan(compose(words, verb="rm")), stack)
        for name, tensor in task.roles.weights(REWARD).items():
            assert torch.equal(tensor, weights[name]), name
        assert task.roles.heads[REWARD].weight.abs().max() == 0
        assert task.evaluate(0).accuracy == 0.5
