"""`rlft plan`: what it tells of a run without loading a weight, and how near its memory is to what the run takes."""

import io
import json
import shlex
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import cast

import pytest
from in_one_test import each
from rich.console import Console as Terminal
from run_processes import start_fresh
from slow_cases import slow
from transformers import AutoConfig, AutoModelForCausalLM

import rlft
from rlft import cli
from rlft.commands.plan import print_trials, read_bytes
from rlft.commands.tables import rows_table
from rlft.config.keys import keys_of
from rlft.config.schema import RunConfig
from rlft.logger.console import grid
from rlft.logger.tables import Column, WordTable
from rlft.plan import prediction
from rlft.plan.cards import CARDS, read_card
from rlft.plan.rewards.tester import RewardTrial
from rlft.system.machine import host_rates
from rlft.system.terminal import CheckRow, Status, pip_install

PROBLEMS = Path(__file__).parents[1] / "data" / "gsm8k_mini"
SIZES = ("data.size=200", "data.held_out_size=40")
TASK = ("generation=transformers", *SIZES, "model.device=cpu")
ON_A_GPU = ("+recipe=grpo_arithmetic", *SIZES, "model.device=cuda")


@pytest.fixture(scope="module")
def rates():
    """What this machine does in a second, which every plan measures anew: measured once."""
    return cache(host_rates)


@pytest.fixture
def no_weights(here, monkeypatch, rates):
    """An empty folder to run in, on a machine without a GPU, where nothing loads weights."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("rlft.plan.duration.host_rates", rates)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    return here


def planned(capsys, *words):
    code = cli.run(["plan", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


def parts_of(found):
    """{part of the memory: bytes}."""
    return {part["part"]: part["bytes"] for part in found["memory"]["as_planned"]}


def test_it_says_how_often_a_run_evaluates_and_saves_and_what_an_hour_costs(no_weights, ran, capsys):
    words = ("+recipe=grpo_arithmetic", *TASK, "steps=10", "checkpoint.every=3")
    found = planned(capsys, *words, "eval.every=4", "price=2.5EUR/h")
    # Evaluated at 0, 4, 8 and 10, saved at 3, 6, 9 and 10.
    assert found["schedule"] == {"steps": 10, "first_evaluation": 4, "evaluations": 4, "checkpoints": 4}
    assert found["price"] == {"per_hour": 2.5, "currency": "EUR"}
    estimated = found["duration"]
    stages = {name: stage["seconds"] for name, stage in estimated["stages"].items()}
    assert list(stages) == ["sample", "update", "publish", "evaluate", "checkpoint"]
    seconds = 10 * estimated["step"]["seconds"] + 4 * (stages["evaluate"] + stages["checkpoint"])
    assert 0 < estimated["run"]["low"] < estimated["run"]["seconds"] < estimated["run"]["high"]
    assert estimated["run"]["seconds"] == pytest.approx(seconds)
    assert estimated["completion_tokens"] == [12, 48]
    page = " ".join(ran(["plan", *words, "eval.every=0", "price=$3/h"]).out.split())
    assert "steps 10 evaluations 0 none checkpoints 4 of the last step as well a step " in page
    assert "an estimate for this CPU, as fast as it is now: " in page
    assert "after 5 steps rlft watch says it from what they took price " in page
    assert "$ at 3.00 $/h, without the start" in page


def test_a_card_that_is_named_has_an_estimate_and_its_memory(no_weights, ran, capsys):
    unnamed = planned(capsys, *ON_A_GPU, "device_memory=24GiB")["duration"]
    assert unnamed == {"no_estimate": "unknown card: the GPU is not here; name it as card=4090"}
    there = planned(capsys, *ON_A_GPU[:-1], "card=rtx 4090", "price=2.5/h")  # it needs no model.device
    assert there["device_memory"] == CARDS["4090"].memory
    assert there["duration"]["machine"] == "4090, by its published rates"
    assert 0 < there["duration"]["run"]["low"] < there["duration"]["run"]["seconds"] < there["duration"]["run"]["high"]
    assert planned(capsys, *ON_A_GPU[:-1], "card=B200", "device_memory=24GiB")["device_memory"] == 24 * 2**30
    on_cpu = ("+recipe=grpo_arithmetic", *TASK)
    for words, told in (
        ((*ON_A_GPU, "card=A10G"), "card: no figures are known of this card, got A10G; use B200, "),
        ((*on_cpu, "card=H100"), "card: the run is planned for a CPU, got H100; leave out model.device=cpu"),
        ((*on_cpu, "price=3"), "price: must be an amount per hour, got 3; write it as 2.5/h or 2.5EUR/h"),
        (ON_A_GPU, "model.device: this machine has no such GPU, so its memory cannot be read"),
    ):
        said = ran(["plan", *words], ends=2).err
        assert f"rlft: {told}" in said if "H100" in told else said.startswith(f"rlft: {told}")
        assert "price" not in told or said == f"rlft: {told}\n"
    assert said.endswith(", got cuda; name it as card=4090, or its memory as device_memory=24GiB\n")


POLICY, PROMPTS = {"base (frozen)", "policy (learns)"}, ["train prompts", "held out prompts"]


@pytest.mark.parametrize(("recipe", "parameters", "data"), [
    ("grpo_arithmetic", POLICY, PROMPTS),
    slow("ppo_arithmetic", {*POLICY, "reference (does not learn)", "critic (learns)"}, PROMPTS),
    ("sft_arithmetic", POLICY, ["demonstrations", "held-out demonstrations"]),
    ("rm_arithmetic", {"base (frozen)", "reward (learns)"}, ["rankings", "held-out rankings"]),
])  # fmt: skip
def test_every_kind_of_run_is_planned_and_leaves_nothing(recipe, parameters, data, no_weights, capsys):
    found = planned(capsys, f"+recipe={recipe}")
    assert set(found["parameters"]) == parameters
    assert found["parameters"]["base (frozen)"] == 823_424
    assert [item["data"] for item in found["lengths"]] == data
    assert all(item["tokens"]["items"] > 0 for item in found["lengths"])
    assert found["fits"]
    assert found["peak"] == max(
        sum(part["bytes"] for part in found["memory"]["as_planned"] if part["when"] in ("always", when))
        for when in ("sampling", "updating")
    )
    assert list(no_weights.iterdir()) == []


def test_the_page_says_it_in_words(no_weights, ran):
    page = ran(["plan", "+recipe=grpo_arithmetic", *TASK]).out
    for told in (
        "Parameters", "policy (learns)", "Memory on cpu", "(this run)", "activations", "token_budget",
        "(this machine has free)", "train prompts: 200, by tokens", "What the rewards say, before their weights",
        "reference, in tags", "exact_match",
    ):  # fmt: skip
        assert told in page, told
    assert "fits: " in page
    assert "\x1b" not in page


def test_a_run_that_samples_alone_has_no_part_of_training(no_weights, ran, capsys):
    words = ("sample", "data.size=200", "prompts_per_step=8", "n=4", "generation.max_tokens=64")
    here, gpu = ("generation=transformers", "model.device=cpu"), ("model.device=cuda", "device_memory=24GiB")
    found = planned(capsys, *words, *here, "num_prompts=24")
    assert {name for name, size in parts_of(found).items() if size} == {
        "process and libraries", "base", "adapters", "base and policy added up", "keys and values", "decoding",
    }  # fmt: skip
    assert found["schedule"]["steps"] == 3
    assert found["duration"]["stages"].keys() == {"sample"}
    assert found["duration"]["run"]["seconds"] == pytest.approx(3 * found["duration"]["step"]["seconds"])
    assert [(item["data"], item["tokens"]["items"]) for item in found["lengths"]] == [("prompts", 200)]
    assert {trial["reward"] for trial in found["rewards"]} == {"exact_match", "format"}
    one_step = planned(capsys, *words, *here, "num_prompts=3")
    assert one_step["schedule"]["steps"] == 1
    assert one_step["duration"]["run"]["seconds"] < found["duration"]["step"]["seconds"]
    assert parts_of(one_step)["keys and values"] == pytest.approx(3 / 8 * parts_of(found)["keys and values"], rel=1e-3)
    assert parts_of(planned(capsys, *words, *gpu, "generation=vllm"))["vLLM, its base and KV cache"] > 0
    page = ran(["plan", *words, "model.device=cuda", "device_memory=512MiB", "generation=transformers"], ends=1).out
    assert "no value of a key makes it fit" in page
    assert "bytes  key" in page
    for absent in ("checkpoint", "lora.rank", "rlft watch"):
        assert absent not in page


def test_a_reward_that_cannot_be_computed_fails_the_plan(no_weights, ran, monkeypatch):
    (no_weights / "broken.py").write_text("def score(completions, **kwargs):\n    raise ValueError('no such thing')\n")
    (no_weights / "reward").mkdir()
    (no_weights / "reward" / "broken.yaml").write_text("# Bad.\nbroken:\n  _target_: broken.score\n  weight: 1.0\n")
    monkeypatch.chdir(no_weights)
    monkeypatch.syspath_prepend(no_weights)
    page = ran(["plan", "--config-dir", ".", "+recipe=grpo_arithmetic", *TASK, "reward=broken"], ends=1).out
    assert "fits: " in page
    assert "reward.broken failed: " in page


def test_what_does_not_fit_is_told_with_keys_that_make_it_fit(no_weights, ran, capsys, monkeypatch):
    monkeypatch.setattr(prediction, "resident_bytes", lambda: 500 * 2**20)  # this process grows from plan to plan
    words = ["+recipe=grpo_arithmetic", *TASK, "token_budget=16000", "model.gradient_checkpointing=false"]
    process = next(size for part, size in parts_of(planned(capsys, *words)).items() if part.startswith("process"))
    words.append(f"device_memory={process + 150 * 2**20}")
    found = planned(capsys, *words)
    assert not found["fits"]
    assert found["device_memory"] == process + 150 * 2**20
    budget = next(way["changes"]["token_budget"] for way in found["ways"] if "token_budget" in way["changes"])
    lower = [word if not word.startswith("token_budget") else f"token_budget={budget}" for word in words]
    assert planned(capsys, *lower)["peak"] < 1.02 * found["device_memory"]
    first, second, *page = ran(["plan", *words], ends=1).out.splitlines()
    assert first.startswith("does not fit: ")
    assert f"token_budget={budget} takes it to " in "\n".join(page)
    rlft_word, *fitting = shlex.split(second.removeprefix("this fits: "))
    assert (rlft_word, found["fitting"]) == ("rlft", second.removeprefix("this fits: "))
    fits = planned(capsys, *fitting[1:])
    assert fits["fits"], "one whole command, planned before it was named"
    others = [word for word in fitting if not word.startswith("device_memory")]
    for share, verdict in ((0.98, "tight"), (0.96, "fits"), (1.0, "tight")):
        cli.run([*others, f"device_memory={round(fits['peak'] / share)}"])
        assert capsys.readouterr().out.startswith(f"{verdict}: "), share


SAME, PLAIN = "tiles is the same as true", "model.kernels=plain"


@each(("how", "word", "why"), [
    ("tiles", "lora.dropout=0.0", None),
    ("tiles", "lora.dropout=0.1", f"lora.dropout is set; {SAME}"),
    ("tiles", "lora.use_dora=true", f"lora.use_dora is set; {SAME}"),
    ("tiles", "lora=null", f"all weights are trained; {SAME}"),
    ("tiles", PLAIN, f"the layers of a qwen2 are not fused; {SAME}"),
    ("offload", PLAIN, "the layers of a qwen2 are not fused; offload keeps their inputs in main memory and nothing "
     "else"),
    ("true", PLAIN, None),
])  # fmt: skip
def test_a_note_says_where_mlps_have_no_tiles(how, word, why, no_weights, capsys):
    keys = ("device_memory=24GiB", "generation=transformers", "model.dtype=float32", word)
    found = planned(capsys, *ON_A_GPU, *keys, f"model.gradient_checkpointing={how}")
    notes = [note for note in found["notes"] if note.startswith("model.gradient_checkpointing")]
    beginning = "model.gradient_checkpointing: MLPs are not computed in tiles, since "
    assert notes == ([] if why is None else [beginning + why])


def test_a_run_on_a_gpu_is_planned_on_a_machine_without_one(no_weights, capsys):
    found = planned(capsys, *ON_A_GPU, "device_memory=24GiB")
    parts, share = parts_of(found), int(0.45 * 24 * 2**30)
    assert parts["base"] == 2 * 823_424, "bfloat16"
    assert ("token budget", "32,768") in {(row["what"], row["value"]) for row in found["sizes"]}
    assert (found["fits"], found["device"]) == (True, "a GPU that is not here")
    assert parts["vLLM, its base and KV cache"] == share, "on a GPU generation=auto is vLLM, with a copy of the policy"
    assert parts["a block of the policy's weights"] > 0
    assert "keys and values" not in parts, "which decodes on its own base"
    assert found["peak"] - found["peak_without_engine"] == share
    shared = parts_of(planned(capsys, *ON_A_GPU, "device_memory=24GiB", "generation.vllm.share_base=true"))
    assert shared["vLLM, its KV cache (it shares the base)"] == share - parts["base"]


TEACHER = ("algorithm=opd", "snapshot.teacher=embedded:tiny-student", "snapshot.teacher_engine=vllm")


@each("keys", [("generation=vllm", "generation.vllm.weights=adapter"), ("lora.use_dora=true", *TEACHER)])
def test_vllm_on_another_gpu_takes_nothing_of_the_trainers(keys, no_weights, capsys):
    """As a run there, where vLLM has cuda:0."""
    found = planned(capsys, *ON_A_GPU[:-1], "device_memory=24GiB", "model.device=cuda:1", *keys)
    there = parts_of(found)
    assert not any("vLLM" in name for name in there)
    assert "a block of the policy's weights" not in there
    assert found["peak"] == found["peak_without_engine"]


@each(("who", "share", "keys"), [
    ("engine", "generation.vllm.gpu_memory_utilization", ("generation=vllm",)),
    ("teacher", "snapshot.teacher_gpu_memory_utilization", (*TEACHER, "generation=transformers")),
])  # fmt: skip
def test_a_share_in_which_vllm_does_not_start_is_told_with_one_in_which_it_does(
    who, share, keys, no_weights, ran, capsys
):
    words = (*ON_A_GPU[:-1], "device_memory=2GiB", "model.device=cuda:1")
    told, fitting, *_ = ran(["plan", *words, *keys, f"{share}=0.0001"], ends=1).out.splitlines()
    assert told.startswith(f"does not start: the {who}'s share of the device is ")
    assert f" {share}=0." in fitting
    assert planned(capsys, *shlex.split(fitting)[4:])["fits"]


def test_cards_have_consistent_figures_and_one_name_each():
    for name, card in CARDS.items():
        assert 0.85 < card.memory / 2**30 / card.gb < 1, "GiB of which CUDA reports a little less"
        assert 50 < card.rate / card.bandwidth < 450, "operations per byte"
        others = (f"RTX {name}", f"nvidia {name}", f"{name}-SXM", f"{name} {card.gb}GB", card.driver)
        for written in (name, name.lower(), *others):
            assert read_card(written) == name, written


def test_the_main_job_is_planned_on_a_laptop_without_vllm_or_a_gpu(no_weights, long_context_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # so that it can be neither found nor imported
    words = ["+recipe=gspo_gsm8k", f"model.path={long_context_path}", f"data.path={PROBLEMS}"]
    found = planned(capsys, *words, "model.device=cuda", "device_memory=24GiB")
    assert found["fits"]
    assert parts_of(found)["vLLM, its base and KV cache"] == int(0.45 * 24 * 2**30)
    remedy = pip_install("rlft[vllm]")
    lacks = f"vLLM is not installed here, and the run needs it where it runs: {remedy} (GPU) or"
    assert any(note.startswith(lacks) for note in found["notes"])
    assert cli.run(["train", *words, "model.device=cpu"]) == 2, "the run itself needs it"
    refused = f"rlft: generation.engine: vLLM is not installed, got vllm; {remedy}"
    assert capsys.readouterr().err.startswith(refused)


def test_a_model_of_the_hub_without_a_network_says_what_to_do(no_weights, capsys, monkeypatch):
    monkeypatch.setattr("rlft.model.network_files.hub_answers", lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("HF_HUB_CACHE", str(no_weights / "cache"))
    assert cli.run(["plan", "+recipe=grpo_gsm8k", "model.device=cuda", "device_memory=24GiB"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlft: model.path: the model cannot be read (")
    remedy = "connect to the network, or use local copies: model.path=<folder>, and for the data data.path=<folder or"
    assert f", got Qwen/Qwen2.5-0.5B-Instruct; {remedy}" in told


def test_an_engine_that_sleeps_is_not_there_during_updates_and_a_smaller_share_makes_room(no_weights, ran, capsys):
    words = [*ON_A_GPU, "token_budget=16000", "model.gradient_checkpointing=false", "device_memory=2GiB"]
    awake = planned(capsys, *words, "generation.vllm.gpu_memory_utilization=0.8")
    asleep = planned(capsys, *words, "generation.vllm.gpu_memory_utilization=0.8", "generation.vllm.sleep=true")
    parts = {part["part"]: part for part in asleep["memory"]["as_planned"]}
    engine, graphs = int(0.8 * 2 * 2**30) - parts["base"]["bytes"], parts["vLLM's CUDA graphs"]["bytes"]
    always = sum(part["bytes"] for part in parts.values() if part["when"] == "always")
    assert awake["peak"] == awake["peak_without_engine"] + engine
    assert asleep["peak"] == max(asleep["peak_without_engine"] + graphs, always + engine - graphs)
    assert not awake["fits"]
    ways = {key: value for way in awake["ways"] for key, value in way["changes"].items()}
    share = ways["generation.vllm.gpu_memory_utilization"]
    assert planned(capsys, *words, f"generation.vllm.gpu_memory_utilization={share}")["fits"]
    assert not planned(capsys, *words, f"generation.vllm.gpu_memory_utilization={float(share) + 0.02:.2f}")["fits"]
    assert "with vLLM on a device of its own the trainer would take " in ran(["plan", *words]).out


@pytest.mark.parametrize("how", ["tiles", slow("offload")])
def test_a_run_without_checkpointing_is_compared_with_the_kind_that_it_has(no_weights, ran, capsys, monkeypatch, how):
    monkeypatch.setenv("COLUMNS", "160")
    words = [*ON_A_GPU, "device_memory=24GiB", "token_budget=16000"]
    found, simple = (planned(capsys, *words, f"model.gradient_checkpointing={kind}") for kind in (how, "true"))
    assert found["memory"]["as_planned"] == found["memory"]["with_gradient_checkpointing"]
    assert found["peak"] < simple["peak"]
    lines = ran(["plan", *words, f"model.gradient_checkpointing={how}"]).out.splitlines()
    [marked] = [line.index("(this run)") for line in lines if "(this run)" in line]
    [titles] = [line for line in lines if "plain" in line and "key" in line]
    assert marked > titles.index("plain") + len("plain"), "under the second one"


def test_an_evaluation_that_decodes_more_than_a_step_is_what_is_planned(no_weights, capsys):
    words = ["+recipe=grpo_arithmetic", *TASK, "prompts_per_step=2", "group_size=8"]

    def keys_and_values(*more):
        return parts_of(planned(capsys, *words, *more))["keys and values"]

    config = AutoConfig.from_pretrained(Path(rlft.__file__).parent / "assets" / "tiny-arithmetic")
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    token = 2 * layers * heads * (config.hidden_size // config.num_attention_heads) * 4
    tokens = planned(capsys, *words)["lengths"]
    longest, held_out, completion = tokens[0]["tokens"]["longest"], tokens[1]["tokens"]["longest"], 64
    more = ["eval.num_prompts=40", "generation.max_tokens=64"]
    assert keys_and_values("eval.every=0", *more) == token * (2 * longest + 16 * completion)
    assert keys_and_values("eval.num_samples=4", *more) == token * (40 * held_out + 160 * completion)
    # 256 rows at a time (generation.transformers.batch_size) are 32 prompts of eight samples
    assert keys_and_values("eval.num_samples=8", *more) == token * (32 * held_out + 256 * completion)


def test_over_long_prompts_are_counted(no_weights, capsys):
    rows = [{"prompt": f"{i}" * (100 if i % 10 == 0 else 2), "answer": "1"} for i in range(60)]
    (no_weights / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=jsonl", "data.path=rows.jsonl", "prompts.max_tokens=60", "prompts.over_limit=drop"]
    found = planned(capsys, *words, "prompts_per_step=8")
    assert found["lengths"][0]["tokens"]["longest"] <= 60
    assert any("train prompts longer than prompts.max_tokens=60 were dropped" in note for note in found["notes"])


@pytest.mark.slow
def test_the_json_stays_small_however_large_the_data_are(no_weights, ran):
    rows = [{"prompt": f"{i} " * (1 + i % 40), "answer": f"{i} is " + "long " * 10_000} for i in range(4000)]
    (no_weights / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=jsonl", "data.path=rows.jsonl", "prompts.max_tokens=100", "prompts.over_limit=drop"]
    words += ["data.allow_unscorable=true", "model.device=cpu"]  # answers so long are never right
    out = ran(["plan", *words, "reward=[exact_match,format,math]", "--json"]).out
    assert len(out) < 2**16, "as the help says"
    train = json.loads(out)["lengths"][0]["tokens"]
    assert train["items"] > 1000
    assert sum(count for _, _, count in train["histogram"]) == train["items"]
    assert len(train["histogram"]) <= 32
    assert (train["histogram"][0][0], train["histogram"][-1][1]) == (train["shortest"], train["longest"])
    assert train["shortest"] < train["median"] <= train["p90"] <= train["p99"] <= train["longest"] <= 100


def test_lengths_are_summed_up():
    # of 1 to 100 the 50th is 50, the 90th (place 89 of 99, rounded down) is 90, and 32 ranges are 4 lengths wide: 25
    found = prediction.summary(list(range(100, 0, -1)))
    assert {name: found[name] for name in ("items", "total", "shortest", "median", "longest", "p90", "p99")} == {
        "items": 100, "total": 5050, "shortest": 1, "median": 50, "longest": 100, "p90": 90, "p99": 99,
    }  # fmt: skip
    assert found["histogram"] == [[1 + 4 * i, 4 + 4 * i, 4] for i in range(25)]
    assert prediction.summary([7])["histogram"] == [[7, 7, 1]]
    assert prediction.summary([]) == {"items": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "fresh"), [
    ("+recipe=grpo_arithmetic", False),
    ("+recipe=ppo_arithmetic token_budget=4000 steps=2", True),
    ("+recipe=grpo_arithmetic token_budget=16000 group_size=16 prompts_per_step=16", False),
    ("+recipe=grpo_arithmetic prompts_per_step=2 eval.num_samples=6 generation.max_tokens=400", False),
    ("+recipe=grpo_arithmetic lora.use_dora=true lora.dropout=0.1", True),
    ("+recipe=grpo_arithmetic algorithm.kl_coef=0.1 algorithm.kl_estimator=exact snapshot.reference=base "
     "token_budget=4000", False),
], ids=["grpo", "ppo", "large micro-batches", "large evaluation", "DoRA with dropout", "exact KL"])  # fmt: skip
def test_the_peak_is_within_15_percent_of_a_runs(words, fresh, forks, tmp_path):
    """A rehearsal takes the longest rows, so that even short completions leave the planned peak.

    A fork has 140 MB less of its own than a process that a user starts: what a plan is off by is a larger part of it.
    """
    typed = (*TASK, *(() if "steps=2" in words else ("steps=1",)), *words.split())
    start = start_fresh if fresh else forks.start
    planned = start("plan", *typed, "--json", cwd=tmp_path).wait()
    done = start("train", *typed, "console=null", "hydra.run.dir=run", cwd=tmp_path).wait()
    assert done.code == 0, done.err
    measured = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["memory/peak_bytes"]
    assert json.loads(planned.out)["peak"] == pytest.approx(measured, rel=0.15)
    assert measured > read_bytes("300MB")


@pytest.mark.parametrize("recipe", ["grpo_arithmetic", slow("sft_arithmetic"), slow("rm_arithmetic")])
def test_4_bit_weights_are_planned_without_a_gpu_or_bitsandbytes(recipe, no_weights, capsys, monkeypatch):
    monkeypatch.setattr("rlft.plan.model_rules.has_bitsandbytes", lambda: False)
    monkeypatch.setattr("rlft.plan.prediction.has_bitsandbytes", lambda: False)
    words = [f"+recipe={recipe}", "model.quantization=4bit", "lora.target_modules=[q_proj]"]
    found = planned(capsys, *words, "model.device=cuda", "device_memory=24GiB")
    parts = parts_of(found)
    config = AutoConfig.from_pretrained(Path(rlft.__file__).parent / "assets" / "tiny-arithmetic")
    head = config.hidden_size // config.num_attention_heads
    layer = 2 * config.hidden_size * head * (config.num_attention_heads + config.num_key_value_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    linear = config.num_hidden_layers * layer  # embeddings, norms and the output head stay in bfloat16
    # NF4: 4 bits a weight, 8 bits for each block of 64 and 32 bits for each 256 blocks
    assert parts["base"] == pytest.approx((823_424 - linear) * 2 + linear * (0.5 + 1 / 64), rel=1e-3)
    assert any(note.startswith("bitsandbytes is not installed here, and the run needs") for note in found["notes"])
    assert cli.run(["plan", *words, "model.device=cpu"]) == 2, "no machine can do this"
    assert "model.quantization: 4-bit weights need a CUDA device" in capsys.readouterr().err


def shape(hidden, inner, heads, layers, vocabulary=151936):
    """The config of a model as large as one of Qwen2.5's; up to 3B, embeddings and head are one matrix."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "vocab_size": vocabulary}
    sizes |= {"num_key_value_heads": 4 if hidden > 2048 else 2, "num_hidden_layers": layers}
    kinds = {"layer_types": ["full_attention"] * layers, "tie_word_embeddings": hidden <= 2048, "dtype": "bfloat16"}
    return {**sizes, **kinds, "max_position_embeddings": 32768}


QWEN = {
    "0.5B": shape(896, 4864, 14, 24),
    "1.5B": shape(1536, 8960, 12, 28),
    "3B": shape(2048, 11008, 16, 36),
    "7B": shape(3584, 18944, 28, 28, 152064),
}


def gsm8k_with(size, folder):
    """The words of the recipe's plan for a model of this size, without weights."""
    embedded, model = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic", folder / size
    shutil.copytree(embedded, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((embedded / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | QWEN[size]))
    return ["+recipe=grpo_gsm8k", f"model.path={model}", f"data.path={PROBLEMS}", "model.device=cuda"]


def rows_of(page):
    """The cells of the lines of a page's tables that give a number of GiB."""
    lines = (Path(__file__).parents[2] / page).read_text().splitlines()
    return [line.strip("| \n").split(" | ") for line in lines if line.startswith("|") and " GiB | " in line]


@pytest.mark.slow
def test_requirements_are_those_that_are_planned(no_weights, capsys):
    found, told = {}, {(size, words.strip("`")): peak for size, words, peak, _ in rows_of("README.md")}
    assert {size for size, _ in told} == {*QWEN}
    keys = {("7B", "card=4090"): [row[0].strip("`").split() for row in rows_of("docs/how-to/7b-on-24gb.md")][3]}
    for size, words in told:
        with tempfile.TemporaryDirectory() as folder:
            plan = planned(capsys, *gsm8k_with(size, Path(folder)), words, *keys.get((size, words), ()))
        assert plan["fits"], (size, words)
        found[size, words] = f"{plan['peak'] / 2**30:.1f} GiB"
    assert found == told


@pytest.mark.slow
def test_a_7b_model_is_planned_for_24_gb_as_the_page_says(no_weights, ran, capsys):
    """Each row of the page's table: settings, whether they fit, the peak, and the part that is vLLM's own."""
    words = [*gsm8k_with("7B", no_weights), "card=4090"]
    rows = rows_of("docs/how-to/7b-on-24gb.md")
    assert len(rows) == 6
    for settings, verdict, peak, engine in rows:
        found = planned(capsys, *words, *settings.strip("`").split())
        parts = [size for part, size in parts_of(found).items() if part.startswith("vLLM,")]
        assert ("yes" if found["fits"] else "no") == verdict, settings
        assert [peak, engine] == [f"{size / 2**30:.1f} GiB" for size in (found["peak"], *parts)], settings
    page = ran(["plan", *words], ends=1).out
    assert "does not start: the engine's share of the device is " in page
    [told, *_] = [line for line in page.splitlines() if " takes it to " in line]
    assert "generation.vllm.gpu_memory_utilization=0." in told
    assert planned(capsys, *words, *told.split(" takes it to ")[0].split())["fits"]


def test_no_page_cuts_a_key_and_each_number_is_shown_whole():
    keys = sorted(key for key in keys_of(RunConfig) if "_" in key)
    keys = [*sorted(keys, key=len)[-4:], "generation.vllm.gpu_memory_utilization", "a_reward_with_a_long_name"]
    scores = dict(zip(keys, (-0.125, 0.25, 17.5, 12.25, 0.375, 3.5), strict=True))
    trials = [
        RewardTrial(reward=key, kind=kind, prompt="gsm8k-train-000017", completion="9" * 70, score=score)
        for kind in ("wrong, in tags", "reference, in tags")
        for key, score in scores.items()
    ]
    numbers = (Column("plain", right=True), Column("checkpointing", right=True))
    memory = (Column("part"), Column("when"), *numbers, Column("key"))
    rows = [CheckRow(f"{key}: gold answers", Status.limit, f"see {key}", f"set {key}=0") for key in keys]
    for width in (60, 80, 100, 120, 200):
        terminal = Terminal(width=width, file=io.StringIO(), color_system=None)
        print_trials(terminal, trials)
        terminal.print(grid((key, f"set {key} to {score}", f"as {key} says") for key, score in scores.items()))
        long = "vLLM, its KV cache (it shares the base)"
        terminal.print(WordTable(memory, [(long, "updating", s, "10.53 GiB", key) for key, s in scores.items()]))
        terminal.print(rows_table(rows))
        page = cast("io.StringIO", terminal.file).getvalue()
        for key, score in scores.items():
            words = page.replace("=", " ").replace(":", " ").split()
            assert words.count(key) >= 8, (width, key, page)
            assert words.count(f"{score:g}") >= 4, (width, key, page)
        assert max(map(len, page.splitlines())) <= width
