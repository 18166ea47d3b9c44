"""Whole runs of the commands, and updates, on the pretended card, with the numbers that they have on the CPU."""

import json
import math

import pytest
from card_updates import CASES, QUICK, ROUNDINGS, far
from run_folders import KILLED, checkpoints, metrics
from slow_cases import slow, slow_but

SMALL = "lora.rank=4 lora.dropout=0 model.dtype=float32 console=null eval.every=0 trainer.eps=1e-2"
OF_SUMS = "data.size=16 data.held_out_size=4"
DATA = f"{OF_SUMS} scoring.workers=0"
TRAIN = f"{SMALL} {DATA} generation=pinned prompts_per_step=2 group_size=4"
OF_ALL_WEIGHTS = SMALL.replace("lora.rank=4 lora.dropout=0", "lora=null")
SAMPLED_FEW = (
    "generation=transformers generation.max_tokens=6 prompts_per_step=2 group_size=3 steps=1"
    " algorithm.entropy_coef=0.01"  # completions of 6 tokens have no other gradient
)
RUNS = {
    "dynamic sampling": f"train +recipe=dapo_arithmetic {TRAIN} steps=1",
    "a learned reward": f"train +recipe=iterative_grpo_arithmetic {TRAIN} reward=[exact_match,format,learned] steps=1 "
    "reward_model.refresh_every=1 snapshot.refresh_every=1",
    "tools": f"train +recipe=grpo_calculator {TRAIN} steps=1",
    "images": f"train +recipe=grpo_shapes {SMALL} {DATA} {SAMPLED_FEW}",
    "all weights": f"train +recipe=grpo_arithmetic {OF_ALL_WEIGHTS} {DATA} {SAMPLED_FEW}",
    "sft": f"sft +recipe=sft_arithmetic {SMALL} steps=1 examples_per_step=4",
    "rm": f"rm +recipe=rm_arithmetic {SMALL} steps=1 rankings_per_step=4 margin=0.1",
    "dpo": f"dpo +recipe=dpo_arithmetic {SMALL} steps=1 rankings_per_step=4",
}
ANSWERS = """\
defaults: [scripted]
scripted:
  answers:
    "*":
    - <think></think><answer>{answer}</answer>
    - <think>6+6=12</think><answer>12</answer>
    - [CALL, "<answer>{answer}</answer>"]
    - [CALL, "<answer>4</answer>"]
"""
CALL = '<call tool="calculate"><expression>2+3</expression></call>'
SAMPLED = (
    "train +recipe=grpo_arithmetic model.device=cuda generation=transformers generation.max_tokens=6 prompts_per_step=2"
    f" group_size=3 steps=2 checkpoint.every=1 model.dtype=bfloat16 lora.dropout=0.1 {DATA} lora.rank=4 console=null"
    " eval.every=0 hydra.run.dir=run"
)


@pytest.mark.parametrize("name", slow_but("dpo", RUNS))
def test_a_step_on_the_card_has_the_numbers_of_the_cpu(on_card, half, tmp_path, name):
    write_answers(tmp_path)
    found = {}
    for device in ("cpu", "cuda"):
        folder = f"{name.replace(' ', '_')}_{device}"
        places = ("--config-dir", "configs", f"hydra.run.dir={folder}", f"model.device={device}")
        model = [] if name == "images" else [half]
        on_card.run(*RUNS[name].split(), *model, *places, cwd=tmp_path)
        [found[device]] = metrics(tmp_path / folder)
    assert far(found["cpu"], found["cuda"]) == {}
    assert sum(on_card.counts()["launches"].values()) > 1000


BETWEEN = "eval.every=1 checkpoint.every=2 checkpoint.on_signal=now steps=3 console=null hydra.run.dir=run"
TIMED = {
    "train": f"train +recipe=ppo_arithmetic {DATA} lora.rank=4 generation=transformers generation.max_tokens=6"
    " prompts_per_step=2 group_size=3 eval.num_prompts=2 eval.num_samples=1 token_values.every=1 rollouts.every=1"
    " epochs=1 minibatches=2",
    "dpo": "dpo +recipe=dpo_arithmetic lora.rank=4 rankings_per_step=4 eval.num_rankings=4",
}
STAGES = {"train": {"sample", "score", "credit", "inspect", "update", "publish"}, "dpo": {"update"}}
BEFORE_A_STEP = [set(), {"log"}, {"log", "checkpoint"}]


@pytest.mark.parametrize(
    ("command", "device"), [("train", "cuda"), slow("train", "cpu"), slow("dpo", "cuda"), slow("dpo", "cpu")]
)
def test_the_times_of_a_step_add_up_to_that_of_the_loop(on_card, half, tmp_path, command, device):
    words = f"{TIMED[command]} {BETWEEN} model.device={device}"
    on_card.run(*words.split(), half, cwd=tmp_path, RLFT_COUNTED="yes")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line, more in zip(lines, BEFORE_A_STEP, strict=True):
        parts = {name[5:]: calls for name, calls in line.items() if name.startswith("time/")}
        whole = parts.pop("step")
        assert parts.keys() == STAGES[command] | {"evaluate", "seal"} | more
        assert 1000 < 0.98 * whole <= sum(parts.values()) <= whole, parts


WHOLE_STEP = (
    f"train +recipe=grpo_arithmetic {DATA} generation=transformers generation.max_tokens=8 lora.rank=4"
    " prompts_per_step=2 group_size=3 steps=6 checkpoint.every=0 eval.every=0 console=null model.device=cuda"
    " model.dtype=bfloat16 algorithm.entropy_coef=0.01 minibatches=1 epochs=1"
)
MOST = {"waits": 8, "uploads": 16, "launches": 130}
"""Of a step without fixed tokens to compare; launches are those outside of sampling and updates, for two layers."""


def test_a_step_waits_and_uploads_a_few_times(on_card, half, tmp_path):
    """Of completions of eight tokens, which the host reads at once."""
    steps = on_card.found(
        "card_updates:of_whole_steps", *WHOLE_STEP.split(), half, f"hydra.run.dir={tmp_path / 'run'}"
    )[1:-1]
    assert len(steps) == 3
    for step in steps:
        counted = {kind: {(stage, line): n for stage in step for line, n in step[stage][kind].items()} for kind in MOST}
        assert not any(stage == "" for lines in counted.values() for stage, _ in lines), "nothing is done in no stage"
        elsewhere = {place: n for place, n in counted["launches"].items() if place[0] not in ("sample", "update")}
        sums = {kind: sum(lines.values()) for kind, lines in (counted | {"launches": elsewhere}).items()}
        assert all(0 < sums[kind] <= most for kind, most in MOST.items()), (sums, counted["waits"], counted["uploads"])


OTHER_KINDS = {"rocm": "cuda", "xpu": "xpu", "mps": "mps"}
SAMPLED_BY_TRANSFORMERS = f"train +recipe=grpo_arithmetic {DATA} generation=transformers generation.max_tokens=6"
LEARNED = "model.dtype=float32 trainer.eps=1e-2 console=null eval.every=0 lora.rank=4"
OF_OTHER_KINDS = {
    # Without an entropy in the loss, completions of 6 tokens would have no gradient.
    "train": f"{SAMPLED_BY_TRANSFORMERS} {LEARNED} prompts_per_step=2 group_size=3 steps=1 algorithm.entropy_coef=0.01",
    "sft": f"sft +recipe=sft_arithmetic {LEARNED} steps=1 examples_per_step=4",
}
RECOMPUTED = "model.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("kind", "commands"),
    [("mps", ["train"]), slow("mps", ["sft"]), *(slow(k, OF_OTHER_KINDS) for k in ("rocm", "xpu"))],
)
def test_cards_of_other_kinds_have_the_numbers_of_the_cpu_by_torchs_own_operators(
    on_card, half, tmp_path, kind, commands
):
    """An op in float64 raises on `mps`; what is dropped is dropped again where activations are recomputed.

    On CUDA rows are packed in another order, and so a kind that torch calls so drops other numbers than the CPU.
    """
    dropout = f"lora.dropout={0.0 if kind == 'rocm' else 0.3}"
    for command in commands:
        found = []
        for device in ("cpu", OTHER_KINDS[kind]):
            places = (half, f"hydra.run.dir={command}_{device}", f"model.device={device}", dropout, RECOMPUTED)
            on_card.run(*OF_OTHER_KINDS[command].split(), *places, cwd=tmp_path, RLFT_CARD=kind)
            found += metrics(tmp_path / f"{command}_{device}")
        assert found[0]["policy/grad_norm"] > 1e-4
        assert far(*found) == {}
        launches = on_card.counts()["launches"]
        assert launches["mm"] > 100
        assert not [name for name in launches if "flash" in name or "compiled" in name]


PLACED = {
    "pairs": ("7,5", {"run": "5", "rlft-rank-1": "7", "rlft-engine-0": "5", "rlft-engine-1": "7"}),
    "divided": ("7,5,3,2", {"run": "5", "rlft-rank-1": "7", "rlft-engine-0": "3", "rlft-engine-1": "2"}),
}
"""{placement: (the cards, of which the run has the second, cuda:1; the card of each process)}"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACED)
def test_ranks_and_engines_compute_on_the_cards_of_their_placement_and_on_no_other(on_card, tmp_path, placement):
    words = f"{SAMPLED_BY_TRANSFORMERS} {LEARNED} lora.dropout=0 prompts_per_step=2 group_size=3 steps=1 minibatches=1"
    words += " algorithm.entropy_coef=0.01 model.device=cuda:1 cluster.lanes=2"
    cards, expected = PLACED[placement]
    workers = f"cluster.ranks=2 cluster.engines=2 cluster.placement={placement}"
    alone = on_card.run(*words.split(), "hydra.run.dir=alone", cwd=tmp_path, CUDA_VISIBLE_DEVICES="7,5")
    done = on_card.run(*f"{words} {workers} hydra.run.dir=run".split(), cwd=tmp_path, CUDA_VISIBLE_DEVICES=cards)
    assert {"run": set(on_card.counts()["tensors"]), **on_card.cards_of_workers()} == {
        process: {card} for process, card in expected.items()
    }
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")
    assert "UserWarning" not in alone.err + done.err, "torch warns where random numbers of all cards are forked"


def write_answers(folder):
    (folder / "configs" / "generation").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "generation" / "pinned.yaml").write_text(ANSWERS.replace("CALL", json.dumps(CALL)))


def test_a_run_that_is_killed_goes_on_to_the_same_bits(on_card, half, tmp_path):
    """With dropout and flash attention, in bfloat16, and sampled by the transformers engine in CUDA graphs."""
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    on_card.run(*SAMPLED.split(), half, cwd=tmp_path / "whole")
    assert on_card.counts()["launches"]["graph"] > 5
    kill = {"at": "rlft.generation.transformers:TransformersGenerator.sample", "call": 3, "do": "kill", "when": "after"}
    on_card.run(*SAMPLED.split(), half, cwd=tmp_path / "killed", events=[kill], ends=KILLED)
    assert [line["step"] for line in metrics(tmp_path / "killed" / "run")] == [1]
    on_card.run("resume", "run", cwd=tmp_path / "killed")
    whole, killed = (tmp_path / folder / "run" for folder in ("whole", "killed"))
    assert metrics(whole) == metrics(killed)
    assert weights(whole) == weights(killed)


def weights(run):
    """The tensors of the last checkpoint."""
    last = checkpoints(run)[-1]
    return {str(file.relative_to(last)): file.read_bytes() for file in sorted(last.rglob("*.safetensors"))}


DOCTOR = (
    "doctor --json model.device=cuda generation=transformers prompts_per_step=2"
    " group_size=2 generation.max_tokens=4 prompts.max_tokens=32"
)
MEASURED = ("memory", "disk", "sampling", "update", "publish", "memory plan")
"""Rows about this machine, and of a model so small that its plan is one of small change."""


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_with_the_card(on_card, half, tmp_path):
    done = on_card.run(*DOCTOR.split(), half, cwd=tmp_path, ends=None)
    rows = {row["name"]: (row["status"], row["value"]) for row in json.loads(done.out)["rows"]}
    assert rows.keys() - set(MEASURED) == {
        "driver", "card", "model", "engine", "log-prob gap", "adapter swap", "kernels",
    }  # fmt: skip
    assert rows["kernels"][0] in ("ok", "slow"), "the speed of a simulated card says nothing"
    assert {name: row for name, row in rows.items() if row[0] != "ok" and name not in (*MEASURED, "kernels")} == {}


# -- updates: the host hardly ever waits for the card ------------------------------------------------------------------
MOST_WAITS, MOST_UPLOADS = 3, 3
OF_TRANSFORMERS = {"plain kernels": 2}
"""Waits of a micro-batch inside of transformers, which looks whether a mask is all True before it makes its own."""

SLACK = 1.25
"""In 16 bits the card, which rounds less often, may be so much farther from float32 than the CPU is."""


@pytest.mark.parametrize("names", [QUICK, slow([name for name in CASES if name not in QUICK])], ids=["quick", "others"])
def test_numbers_are_those_of_the_cpu_with_few_waits_and_uploads_for_any_number_of_micro_batches(on_card, names):
    wrong, of_cases = [], on_card.found("card_updates:main", *names)
    assert [*of_cases] == [*names]
    for name, found in of_cases.items():
        host, card = found["metrics"]
        assert all(map(math.isfinite, card.values())), name
        if found["to_truth"] is None:
            differ = far(host, card)
            wrong += [(name, differ, found["distance"])] if differ or found["distance"] > ROUNDINGS else []
        else:
            of_host, of_card = found["to_truth"]
            wrong += [(name, of_host, of_card)] if of_card > SLACK * of_host else []
        for number, counts in found["counts"].items():
            most_waits = MOST_WAITS + OF_TRANSFORMERS.get(name, 0) * int(number)
            if sum(counts["waits"].values()) > most_waits or sum(counts["uploads"].values()) > MOST_UPLOADS:
                wrong.append((name, number, counts["waits"], counts["uploads"]))
    assert not wrong
