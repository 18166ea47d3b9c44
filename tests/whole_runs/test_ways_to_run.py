"""Runs with plain kernels, with drafts, of DoRA adapters, and until the curve is flat: what they share with others."""

import json

import pytest
import torch
from run_folders import CONVERSATIONS, chain, check_goes_on, check_same, learned, metrics, rollouts, tiny
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli
from rlft.batch import score_sequences
from rlft.config.instantiate import from_mapping
from rlft.config.schema import RunConfig
from rlft.loop.driver import RunDriver
from rlft.model.backbone import load_backbone
from rlft.model.kernels import selection
from rlft.model.roles import policy_alone
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.run_status import Status

# -- model.kernels=plain: the same run as with rlft's kernels, and what is said of it ----------------------------------
PLAIN = (
    "steps=1", "prompts_per_step=2", "group_size=3", "generation=transformers", "generation.max_tokens=12",
    "lora.rank=2", "data.size=16", "data.held_out_size=4", "eval.every=0", "model.device=cpu", "scoring.workers=0",
    "trainer.lr=1e-3", "epochs=2", "algorithm=ppo", "critic.kind=adapter",
    "algorithm.entropy_coef=0.01",
)  # fmt: skip
NOT_COMPARED = ("waste/padding_fraction", "tokens/trained")


def plain_metrics(folder, *words):
    assert cli.run(["train", *PLAIN, *words, f"hydra.run.dir={folder}"]) == 0
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in metrics(folder)]


def said(folder):
    lines = [json.loads(line) for content in rollouts(folder).values() for line in content.splitlines()]
    return [(line["prompt_id"], line["token_ids"], line["logprobs"]) for line in lines]


def test_a_plain_run_is_the_same_run(tmp_path):
    ours, theirs = plain_metrics(tmp_path / "auto"), plain_metrics(tmp_path / "plain", "model.kernels=plain")
    assert [one[:2] for one in said(tmp_path / "auto")] == [one[:2] for one in said(tmp_path / "plain")]
    for one, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_a_fall_back_is_told_in_the_table_and_in_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selection.transformers, "__version__", "5.99.0")
    load_backbone.cache_clear()
    try:
        plain_metrics(tmp_path / "run")
    finally:
        load_backbone.cache_clear()
    shown = " ".join(capsys.readouterr().out.split())
    assert "transformers 5.99.0 is not among the tested releases (5.17 to 5.24)" in shown
    assert "model.kernels: plain instead of auto" in shown


# -- drafts: the completions of runs without them, and interrupted = uninterrupted -------------------------------------
DRAFTED = ("checkpoint.every=1", "checkpoint.keep=9", "trainer.lr=1e-3")
DRAFTS = ("generation.drafts=history", "generation.draft_rows=99")


def trained(folder, *words):
    assert cli.run([*tiny(*DRAFTED, *words), f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize("words", [
    ("dynamic_sampling.max_rounds=1",),
    slow(("overlap.lag=1", "algorithm.mismatch=token_truncate")),
    slow(tuple(word for word in CONVERSATIONS if word.startswith("environment"))),
], ids=["plain", "sampled ahead", "conversations"])  # fmt: skip
def test_a_run_with_drafts_says_the_same_and_resumes_exactly(tmp_path, words):
    plain = trained(tmp_path / "plain", *words, "steps=3")
    drafted = trained(tmp_path / "drafted", *words, *DRAFTS, "steps=3", "eval.every=1")
    for one, other in zip(said(plain), said(drafted), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], abs=1e-5, rel=1e-5)
    assert said(plain) != said(drafted), "the last bits follow the width of a pass"
    numbers = [(line["drafts/accepted_share"], line["drafts/tokens_per_pass"]) for line in metrics(drafted)[1:]]
    assert len(numbers) == 2, "before the first step there is nothing to draft from"
    assert all(0 < share < 1 < tokens for share, tokens in numbers)
    halted = trained(tmp_path / "halted", *words, *DRAFTS, "steps=2", "eval.every=1")
    assert cli.run(["resume", str(halted), "steps=3"]) == 0
    assert metrics(halted) == metrics(drafted)
    assert rollouts(halted) == rollouts(drafted)
    assert chain(halted) == chain(drafted)
    assert cli.run(["resume", str(halted / "checkpoints" / "step_000002"), f"hydra.run.dir={tmp_path / 'fork'}"]) == 0
    check_same(tmp_path / "fork", halted)
    # With a lag this one holds completions that were sampled ahead.
    assert cli.run(["resume", str(drafted / "checkpoints" / "step_000002"), f"hydra.run.dir={tmp_path / 'ahead'}"]) == 0
    check_same(tmp_path / "ahead", drafted)
    other = trained(tmp_path / "other", *words, *DRAFTS, "steps=3", "eval.every=0")
    assert rollouts(other) == rollouts(drafted), "training does not depend on evaluations"


# -- DoRA adapters with rsLoRA's scale, by Muon: resumed, exported, begun from each other ------------------------------
BOTH = ("lora.use_dora=true", "lora.use_rslora=true", "lora.rank=4", "lora.alpha=8", "model.device=cpu")
DORA = (
    "train", "+recipe=ppo_arithmetic", *BOTH, "critic.kind=adapter", "snapshot.reference=ema",
    "snapshot.ema_decay=0.9", "trainer.optimizer=muon",
    "algorithm.kl_coef=0.02", "trainer.lr=0.02", "critic.lr=0.01", "prompts_per_step=2",
    "group_size=4", "generation=transformers", "generation.max_tokens=12", "eval.every=2", "eval.num_prompts=2",
    "eval.num_samples=2", "scoring.workers=0", "console=null",
    "generation.stop=['=']", "checkpoint.every=1", "checkpoint.keep=99",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps without an interruption; the freshness check has passed after each."""
    folder = tmp_path_factory.mktemp("kinds") / "run"
    assert cli.run([*DORA, "steps=4", f"hydra.run.dir={folder}"]) == 0
    assert learned(folder)
    return folder


@pytest.mark.slow
def test_resumed_it_is_the_same_run(run, tmp_path):
    check_goes_on(tmp_path, DORA, 2, 4, whole=run)


@pytest.mark.slow
def test_merged_it_says_what_the_trainer_says(run, tmp_path):
    assert cli.run(["export", f"run={run}", f"out={tmp_path / 'merged'}"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = tokenizer("What is 47 + 85? <think>47 + 85 = 132</think><answer>132</answer>")["input_ids"]
    plain = run_folder.read(run)
    plain.pop(run_folder.ORIGIN)
    config: RunConfig = from_mapping(RunConfig, {**plain, "token_budget": 4096}, "")
    saved = checkpoint.load_newest(run_folder.checkpoints(run), print)
    assert saved is not None
    roles = policy_alone(load_backbone(config.model), config.lora, token_budget=4096, seed=0)
    [base] = roles.score([ids])
    roles.restore({"policy": saved.adapters["policy"]})
    [expected] = roles.score([ids])
    roles.close()
    with torch.no_grad():
        found = score_sequences(merged, [ids], torch.device("cpu"))[0]
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 0.1, "there is something to lose"
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_it_samples_and_is_evaluated_as_itself(run, tmp_path, capsys):
    few = ["generation.max_tokens=24", "scoring.workers=0"]
    assert cli.run(["eval", f"run={run}", "eval.num_prompts=3", "eval.num_samples=2", *few]) == 0
    sampled = tmp_path / "sampled"
    # The policy is published to the engine and must prove that it arrived (`freshness`).
    assert cli.run(["sample", f"run={run}", "num_prompts=3", "n=2", *few, f"hydra.run.dir={sampled}"]) == 0
    assert len((sampled / "samples.jsonl").read_text().splitlines()) > 0


@pytest.mark.parametrize("command", ["sft", slow("rm")])
def test_supervised_commands_learn_such_adapters(command, tmp_path):
    words = [f"+recipe={command}_arithmetic", *BOTH, "steps=2", "console=null", "eval.every=0", "checkpoint.every=0"]
    assert cli.run([command, *words, f"hydra.run.dir={tmp_path / command}"]) == 0
    saved = checkpoint.load_newest(run_folder.checkpoints(tmp_path / command), print)
    assert saved is not None
    [weights] = saved.adapters.values()
    magnitudes = [weight for name, weight in weights.items() if "magnitude" in name]
    assert len(magnitudes) == 28


# -- stop.when=flat ends a run after a whole step, and a resumed one at the same step ----------------------------------
# Nothing is learned at this rate, so the sixth evaluation, after step 5, shows that the curve is flat.
FLAT = (
    "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64", "rankings_per_step=2", "steps=6",
    "lora.rank=2", "lora.alpha=4", "model.device=cpu", "console=null", "eval.every=1", "eval.num_rankings=4",
    "trainer.lr=1e-12", "checkpoint.every=2",
)  # fmt: skip


def steps_in(folder, name):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def test_a_flat_curve_ends_the_run_where_it_would_end_without_an_interruption(tmp_path, monkeypatch, capsys):
    folder, again = tmp_path / "run", tmp_path / "again"
    assert cli.run(["dpo", *FLAT, "stop.when=flat", f"hydra.run.dir={folder}"]) == 0
    assert (steps_in(folder, "metrics.jsonl"), steps_in(folder, "eval.jsonl")) == ([*range(1, 6)], [*range(6)])
    assert saved(folder)[-1] == "step_000005"
    assert run_status.read(folder)[0] is Status.finished

    judge = RunDriver.judge

    def fail_at_5(self: RunDriver, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt
        judge(self, step)

    with monkeypatch.context() as patched:  # it ends at once after the evaluation, before its checkpoint
        patched.setattr(RunDriver, "judge", fail_at_5)
        assert cli.run(["dpo", *FLAT, "stop.when=flat", f"hydra.run.dir={again}"]) == 130
    assert saved(again)[-1] == "step_000004"
    for _ in range(2):  # the second time there is nothing more to do
        assert cli.run(["resume", str(again)]) == 0
        assert (steps_in(again, "metrics.jsonl"), steps_in(again, "eval.jsonl")) == ([*range(1, 6)], [*range(6)])
        assert (saved(again), run_status.read(again)[0]) == (saved(folder), Status.finished)
    capsys.readouterr()
    assert cli.run(["resume", str(again), "stop.when=never"]) == 0
    assert steps_in(again, "metrics.jsonl") == [*range(1, 7)]
