"""What is exported computes what was trained, however it is loaded; and nothing is half written or overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlft
from rlft.batch import score_sequences
from rlft.commands.export.command import export
from rlft.commands.export.model_card import facts, front_matter, measured_on, prepare, results
from rlft.commands.export.weights import MergeError, round_weights
from rlft.config.compose import compose
from rlft.model.backbone import Backbone, read_backbone
from rlft.model.kernels import elementwise
from rlft.model.reward_model import open_learned
from rlft.model.roles import Roles
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import CheckpointKind, NamedRun, find
from rlft.runs.lines import silent
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, UserError

CPU = torch.device("cpu")
TEXTS = ("What is 47 + 85?", "<think>47 + 85 = 132</think><answer>132</answer>", "x" * 60)


def exported(place: NamedRun, out: Path, kind: str | None = None, dtype: str | None = None) -> Path:
    return export(prepare(place, str(out), kind, dtype, silent), silent)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def score(model: Any, sequences: Sequence[Sequence[int]]) -> list[float]:
    with torch.no_grad():
        return [logprob for ids in sequences for logprob in score_sequences(model.eval(), [ids], CPU)[0]]


def largest_gap(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="session")
def sequences(backbone: Backbone) -> list[list[int]]:
    return [backbone.tokenizer(text)["input_ids"] for text in TEXTS]


def in_float64(model: Any) -> Any:
    """The same model without rounding; transformers' norms would go through float32 even so."""
    elementwise.install(model.double())
    return model


@pytest.fixture
def trainers(
    trained: Path, make_roles: Callable[..., Roles], model_config: Callable[..., Any], sequences: list[list[int]]
) -> list[float]:
    """The trainer's own log-probs with the policy of the last checkpoint, in float64; the base's are far from them."""
    backbone = read_backbone(model_config())
    backbone.model.double()
    roles = make_roles(backbone=backbone)
    base = [x for row in roles.score(sequences) for x in row]  # a fresh adapter changes nothing
    saved = checkpoint.load_newest(run_folder.checkpoints(trained), silent)
    assert saved is not None
    roles.restore(saved.adapters)
    found = [x for row in roles.score(sequences) for x in row]
    assert largest_gap(found, base) > 0.3, "there is something to lose"
    return found


# -- as the trainer --------------------------------------------------------------------------------------------------
def test_the_merged_model_says_what_the_trained_policy_says(
    trained: Path, trainers: list[float], sequences: list[list[int]], tmp_path: Path
) -> None:
    out = exported(find(trained), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    # float32 adds up W + B A before or after the product with the input; seen: 3e-6.
    assert largest_gap(score(model, sequences), trainers) < 1e-4


@pytest.mark.slow
def test_vllm_says_of_the_merged_model_what_the_trained_policy_says(
    trained: Path, trainers: list[float], sequences: list[list[int]], tmp_path: Path
) -> None:
    from real_engines import open_vllm

    out = exported(find(trained), tmp_path / "out")
    generator = open_vllm(out, lora_rank=1, max_sequence_tokens=128)
    try:
        found = [x for row in generator.score(sequences) for x in row]
    finally:
        generator.close()
    assert largest_gap(found, trainers) < 1e-4


def test_the_adapter_says_what_the_trained_policy_says_and_knows_where_its_base_is(
    trained: Path, trainers: list[float], sequences: list[list[int]], tiny_path: Path, tmp_path: Path
) -> None:
    out = exported(find(trained), tmp_path / "out", "adapter")
    on_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path), out)
    for model in (on_base, AutoPeftModelForCausalLM.from_pretrained(out)):
        # The same tensors in the same modules: only the order of additions may differ.
        assert largest_gap(score(in_float64(model), sequences), trainers) < 1e-6
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_path.resolve())
    tokenizer = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(f.name for f in out.iterdir()) == sorted(
        ["README.md", "adapter_config.json", "adapter_model.safetensors", "chain.jsonl", "rlft.json", *tokenizer]
    )


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_exported_files_have_the_modes_of_any_file(
    umask: int, file: int, folder: int, policy_run: Callable[..., NamedRun], tmp_path: Path
) -> None:
    place, before = policy_run(), os.umask(umask)
    try:
        outs = [exported(place, tmp_path / "exports" / kind, kind) for kind in ("model", "adapter")]
    finally:
        os.umask(before)
    for out in outs:
        assert out.stat().st_mode & 0o777 == folder
        assert {f.name: oct(f.stat().st_mode & 0o777) for f in out.iterdir()} == {
            f.name: oct(file) for f in out.iterdir()
        }


def test_one_checkpoint_of_a_run_can_be_named(trained: Path, tmp_path: Path) -> None:
    step_2, step_3 = checkpoint.finished(run_folder.checkpoints(trained))
    for folder in (step_2, step_3):
        out = exported(find(folder), tmp_path / folder.name, "adapter")
        name = "adapter_model.safetensors"
        assert (out / name).read_bytes() == (folder / "policy" / name).read_bytes()
    assert (tmp_path / "step_000002" / name).read_bytes() != (tmp_path / "step_000003" / name).read_bytes()


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_the_exported_tokenizer_is_the_bases(kind: str, trained: Path, tiny_path: Path, tmp_path: Path) -> None:
    out = exported(find(trained), tmp_path / "out", kind)
    mine, its = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(tiny_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1? é"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert mine.apply_chat_template(messages, **options) == its.apply_chat_template(messages, **options)
    assert mine.eos_token_id == its.eos_token_id


# -- dtypes ----------------------------------------------------------------------------------------------------------
def merged_by_hand(base: dict[str, torch.Tensor], policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank x B A in float32 by name, of the weights that have an adapter (here alpha / rank = 8 / 4)."""
    found = {}
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in policy:
            a, b = (policy[f"{module}.lora_{which}.weight"] for which in "AB")
            found[name] = weight.float() + 8 / 4 * (b @ a)
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(
    policy_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(base)
    before = files_of(base)
    place = policy_run(f"model.path={base}", "model.dtype=float32")
    found = weights_of(exported(place, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    own, [saved] = weights_of(base), checkpoint.finished(run_folder.checkpoints(place.run))
    expected = merged_by_hand(own, load_file(saved / "policy" / "adapter_model.safetensors"))
    assert len(expected) == 4 * 7  # four layers, seven linear modules in each
    for name, weight in own.items():
        # One unit of float32 before rounding may fall on either side of the middle between two bfloat16 numbers.
        different = found[name] != expected.get(name, weight).bfloat16()
        assert different.float().mean() < (1e-3 if name in expected else 1e-9), name
    assert files_of(base) == before, "the base is only read"


def test_a_dtype_can_be_asked_for(policy_run: Callable[..., NamedRun], tmp_path: Path) -> None:
    place = policy_run()
    exact = weights_of(exported(place, tmp_path / "exact"))
    half = weights_of(exported(place, tmp_path / "half", dtype="bfloat16"))
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert all(torch.equal(half[name], exact[name].bfloat16()) for name in exact)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_dtype_too_small_for_a_weight_is_refused() -> None:
    layer: Any = torch.nn.Linear(1, 1)
    layer.weight.data.fill_(1e5)  # float16 ends at 65504
    dtypes = dict.fromkeys(("weight", "bias"), torch.float32)
    with pytest.raises(UserError, match=r"^dtype: cannot hold the numbers of weight, got torch.float16; use dtype=bfl"):
        round_weights(layer, dtypes, "float16")


# -- the generation config -------------------------------------------------------------------------------------------
NEARLY_GREEDY = '{"do_sample": false, "temperature": 0.3, "top_k": 5, "eos_token_id": [2, 0]}'
"""transformers reads it, and would refuse to write it."""


@pytest.mark.parametrize("own", [NEARLY_GREEDY, None], ids=["a strange one", "none"])
def test_the_generation_config_is_the_bases_own(
    policy_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path, own: str | None
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_path, base)
    (base / "generation_config.json").unlink()
    if own is not None:
        (base / "generation_config.json").write_text(own)
    out = exported(policy_run(f"model.path={base}"), tmp_path / "out")
    found = out / "generation_config.json"
    assert (found.read_text() if found.exists() else None) == own


# -- what is refused -------------------------------------------------------------------------------------------------
def refusal(place: NamedRun, *words: str | None) -> str:
    with pytest.raises(UserError) as raised:
        export(prepare(place, *words, silent), silent)  # type: ignore[arg-type]
    return str(raised.value)


REFUSED = [
    ((None, None, None), "out: is missing; write out=<new folder>"),
    (("", None, None), "out: is empty"),
    (
        ("new", "modle", None),
        "as: is not a form that rlft writes, got modle; did you mean model? All: model, adapter",
    ),
    (("new", "", None), "as: is not a form that rlft writes, got nothing"),
    (
        ("new", "gguf", None),
        "as: is written by llama.cpp's converter, not by rlft, got gguf; use as=model, then "
        "`python llama.cpp/convert_hf_to_gguf.py new --outfile new.gguf --outtype auto`",
    ),
    (("new", None, "float8"), "dtype: is not a known dtype, got float8; did you mean float32? All: auto, float32"),
    (
        ("new", "adapter", "float32"),
        "dtype: applies to a model's weights only: an adapter keeps its own dtype, got float32",
    ),
    (("a_file", None, None), "out: exists already, and nothing is ever overwritten"),
    (("a_folder", None, None), "out: exists already"),
    (("a_link", None, None), "out: exists already"),
    (("a_file/new", None, None), "out: cannot be written (Not a directory), got a_file/new"),
    (("run/checkpoints/new", None, None), "out: lies among the run's checkpoints, which would no longer be whole"),
]


def test_words_that_cannot_be_done_are_refused(
    policy_run: Callable[..., NamedRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place = policy_run()
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for words, message in REFUSED:
        assert refusal(place, *words).startswith(message), words
        assert sorted(tmp_path.rglob("*")) == before, words


def test_damaged_checkpoints_are_passed_over_or_refused(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    older, newer = checkpoint.finished(run_folder.checkpoints(run))
    (newer / "policy" / "adapter_model.safetensors").write_bytes(b"torn")
    said: list[str] = []
    asked = prepare(find(run), str(tmp_path / "out"), None, None, said.append)
    assert asked.checkpoint == older
    problem = "policy/adapter_model.safetensors does not match its checksum"
    assert said == [f"checkpoint step_000003 is damaged ({problem}); going back to the one before"]
    message = refusal(find(newer), str(tmp_path / "out"), None, None)
    assert message.startswith(f"run: the checkpoint is damaged ({problem}), got ")
    (older / "MANIFEST").unlink()
    assert refusal(find(run), str(tmp_path / "out"), None, None).startswith("run: every checkpoint of this run is dam")


def change_config(model: Path, **fields: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_another_base_is_refused(
    policy_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path, kind: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_path, base)
    place = policy_run(f"model.path={base}")
    change_config(base, rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    message = refusal(place, str(tmp_path / "out"), kind, None)
    assert message.startswith("model.path: is not the base this run was trained on: it has other files (")
    assert f"), got {base}; leave it as it was" in message
    assert not (tmp_path / "out").exists()


def test_a_base_whose_weights_are_quantised_is_not_merged_into(
    policy_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_path, base)
    change_config(base, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    place = policy_run(f"model.path={base}")
    assert refusal(place, str(tmp_path / "out"), None, None).startswith("as: the base's own weights are quantised")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["base", "run"]
    exported(place, tmp_path / "out", "adapter")


def test_a_merge_that_would_change_what_the_policy_says_is_refused(
    save_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path
) -> None:
    # The embedding's matrix is the LM head's too: merged, the adapter of the one would also change the other.
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    own: Any = {"save_embedding_layers": False}
    weights = {name: torch.randn_like(t) * 0.3 for name, t in get_peft_model_state_dict(model, **own).items()}
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in model.peft_config["default"].to_dict().items()}
    place = save_run(adapters={"policy": weights}, config=config)
    asked = prepare(place, str(tmp_path / "out"), None, None, silent)
    with pytest.raises(MergeError, match=r"log-probs differ from the adapter's by .* use as=adapter$"):
        export(asked, silent)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run"]


# -- whole or not there ----------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from transformers import PreTrainedModel
from rlft.commands.export import command as export_command
from rlft.runs.find import find
from pathlib import Path

original = PreTrainedModel.save_pretrained

def killed(*arguments, **keywords):
    original(*arguments, **keywords)
    os.kill(os.getpid(), signal.SIGKILL)

PreTrainedModel.save_pretrained = killed
asked = export_command.prepare(find(Path(sys.argv[1])), sys.argv[2], None, None, print)
export_command.export(asked, print)
"""


@pytest.mark.slow
def test_a_kill_leaves_no_export_and_the_next_one_cleans_up(
    policy_run: Callable[..., NamedRun], tmp_path: Path
) -> None:
    place, out = policy_run(), tmp_path / "exports" / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(rlft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(place.run), str(out)], env=environment, check=False)
    assert done.returncode == -9
    [left] = out.parent.iterdir()
    assert left.name == ".out.writing"
    (left / "model.safetensors.index.json").touch()  # of a larger model that was exported to the same place
    exported(place, out)
    assert [f.name for f in out.parent.iterdir()] == ["out"]
    assert not (out / "model.safetensors.index.json").exists()


def test_the_run_is_only_read(trained: Path, tmp_path: Path) -> None:
    before = files_of(trained)
    exported(find(trained), tmp_path / "model")
    exported(find(trained), tmp_path / "adapter", "adapter")
    assert files_of(trained) == before


# -- runs of other kinds ---------------------------------------------------------------------------------------------
@pytest.fixture
def weights_run(policy_run: Callable[..., NamedRun], tiny_path: Path) -> NamedRun:
    """A run whose checkpoint holds a whole model and no adapter; the base it began from is gone."""
    place = policy_run()
    [folder] = checkpoint.finished(run_folder.checkpoints(place.run))
    shutil.rmtree(folder / "policy")
    shutil.copytree(tiny_path, folder / "model")
    checkpoint._write_manifest(folder)
    return NamedRun(run=place.run, config={**place.config, "lora": None}, checkpoint=None)


def test_a_run_of_all_weights_is_exported_as_its_model(weights_run: NamedRun, tiny_path: Path, tmp_path: Path) -> None:
    gone = {**weights_run.config, "model": {**weights_run.config["model"], "path": "/gone"}}
    out = exported(NamedRun(run=weights_run.run, config=gone, checkpoint=None), tmp_path / "out")
    found, own = files_of(out), files_of(tiny_path)
    assert found.pop("README.md") != own.pop("README.md")
    assert found == own
    half = weights_of(exported(weights_run, tmp_path / "half", dtype="bfloat16"))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in weights_of(tiny_path).items())


def test_a_run_of_all_weights_has_no_adapter(weights_run: NamedRun, tmp_path: Path) -> None:
    message = refusal(weights_run, str(tmp_path / "out"), "adapter", None)
    assert message == "as: the run trained all weights and has no adapter, got adapter; use as=model"


@pytest.fixture
def reward_run(make_roles: Callable[..., Roles], save_run: Callable[..., NamedRun]) -> NamedRun:
    """A run whose checkpoint holds a reward model and no policy."""
    roles = make_roles(noise=0.05)
    generator = torch.Generator().manual_seed(3)
    head = {"weight": torch.randn(1, 128, generator=generator), "bias": torch.randn(1, generator=generator)}
    adapters = {"reward": roles.weights("policy")}
    return save_run(adapters=adapters, config=roles.adapter_config(), heads={"reward": head})


def test_a_reward_model_is_exported_as_what_a_learned_reward_takes(
    reward_run: NamedRun, make_roles: Callable[..., Roles], make_prompt: Callable[..., Prompt], tmp_path: Path
) -> None:
    out = exported(reward_run, tmp_path / "out", "adapter")
    [folder] = checkpoint.finished(run_folder.checkpoints(reward_run.run))
    prompt = make_prompt("What is 1 + 2?")
    said = Completion(text="", token_ids=(51, 52, 2), logprobs=(0.0,) * 3, finish_reason=FinishReason.stop)
    group = Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=said, policy_version=0),))
    scores = []
    for path in (out, folder / "reward"):
        learned = open_learned("x", str(path), make_roles(), token_budget=999, center=0.0, scale=1.0)
        scores.append(learned([group])[0][0])
    assert scores[0] == scores[1] != 0


def test_a_reward_model_is_no_language_model(reward_run: NamedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = refusal(reward_run, str(out), None, None)
    assert message.startswith("as: a reward model is an adapter with a scalar head, which no causal language model hol")
    assert message.endswith(f"got model; use as=adapter; then reward.learned.path={out}")


# -- the card --------------------------------------------------------------------------------------------------------
def card_of(out: Path) -> tuple[dict[str, Any], str]:
    """The front matter, and the text."""
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_the_run_folder_says(trained: Path, tmp_path: Path) -> None:
    front, text = card_of(exported(find(trained), tmp_path / "out"))
    assert front == {  # the embedded base is no hub id
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlft", "reinforcement-learning", "grpo", "lora"],
    }
    assert text.startswith("\n# grpo_arithmetic\n\nA model, trained with rlft for 3 steps.\n")
    first, *_, last = (json.loads(line) for line in (trained / "eval.jsonl").read_text().splitlines())
    assert (first["step"], last["step"]) == (0, 3)
    assert "|  | step 0 | step 3 |" in text
    assert "| samples of each prompt | 2 | 2 |" in text
    for name in ("eval/exact_match", "eval/pass@2"):
        told = [f"{line[name]:.4f} ± {line[f'{name}_se']:.4f}" for line in (first, last)]
        assert f"| {name[5:]} | {told[0]} | {told[1]} |" in text
    assert "Held-out prompts, at most 8, sampled as in training; " in text
    assert "| Base | embedded:tiny-arithmetic |" in text
    assert "| Data | arithmetic: difficulty=2, " in text
    assert "| Rewards | exact_match x 1.0, format x " in text
    assert "| A step | 4 prompts x 8 completions |" in text
    origin = run_folder.read(trained)["origin"]
    assert f"commit {origin['commit']}" in text
    assert f"torch {origin['torch']}" in text
    assert "base_fingerprint" in text
    assert "Not recorded in the run" in text
    assert str(trained.parent) not in text


def test_the_card_of_an_older_checkpoint_tells_no_later_result(trained: Path, tmp_path: Path) -> None:
    older, _ = checkpoint.finished(run_folder.checkpoints(trained))
    _, text = card_of(exported(find(older), tmp_path / "out"))
    assert "for 2 steps" in text
    assert "|  | step 0 | step 2 |" in text


def test_the_card_asks_with_the_runs_own_prompt(policy_run: Callable[..., NamedRun], tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").touch()
    data = ["data=jsonl", f"data.path={tmp_path / 'my.jsonl'}", "data.system_prompt='Say \"yes\"'"]
    place = policy_run(*data, "data.prompt_template='Q|: {question}'")
    _, text = card_of(exported(place, tmp_path / "out"))
    assert '{"role": "system", "content": "Say \\"yes\\""},' in text
    assert '{"role": "user", "content": "Q|: What is 17 + 25?"},' in text
    assert "| Data | jsonl: path=my.jsonl, held_out_fraction=0.1, " in text
    assert str(tmp_path) not in text
    assert "## Results" not in text, "there was no evaluation"


def test_the_card_says_what_runs_of_other_commands_learned_from_and_were_measured_on() -> None:
    line = {"step": 3, "eval/loss": 0.5, "eval/accuracy": 0.75, "eval/accuracy_se": 0.1}
    sft = compose(["demonstrations.path=mine/a.jsonl"], command="sft")
    assert ("A step", "32 demonstrations") in facts(sft)
    assert dict(facts(sft))["Demonstrations"].startswith("demonstrations: path=a.jsonl, ")
    assert measured_on(sft) == "demonstrations, at most 128"
    told = results([line], sft)
    assert ("loss", "0.5000") in told
    assert all("samples" not in name for name, _ in told)
    assert measured_on({**sft, "data": {"x": 1}}) == "prompts, at most 128, sampled as in training"
    rm = compose(["preferences.path=mine/a.jsonl"], command="rm")
    assert ("A step", "32 rankings") in facts(rm)
    assert measured_on(rm) == "rankings, at most 512"
    assert results([line], rm) == [("", "step 3"), ("loss", "0.5000"), ("accuracy", "0.7500 ± 0.1000")]


def test_hub_ids_stand_in_the_front_matter(policy_run: Callable[..., NamedRun]) -> None:
    config = policy_run("data=gsm8k").config
    config = {**config, "model": {**config["model"], "path": "Qwen/Qwen2.5-0.5B-Instruct"}}
    front = yaml.safe_load(front_matter(config, CheckpointKind.policy, is_model=False))
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "peft"
    assert front["datasets"] == ["openai/gsm8k"]


@pytest.mark.parametrize(
    ("kind", "template"),
    [("adapter", True), slow("model", True), slow("adapter", False), slow("model", False)],
)
def test_the_python_of_the_card_runs(
    policy_run: Callable[..., NamedRun],
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    template: bool,
) -> None:
    base, variables = tmp_path / "base", list[str]()
    shutil.copytree(tiny_path, base)
    if not template:
        (base / "chat_template.jinja").unlink()
    else:
        file = base / "chat_template.jinja"
        file.write_text("{% if brief is defined %}Be brief.{% endif %}" + file.read_text())
        variables = ["prompts.template_variables={brief: true}"]
    defaults = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**defaults, "repetition_penalty": 1.5, "typical_p": 1.0}))
    place = policy_run(f"model.path={base}", "generation.max_tokens=8", *variables, noise=0.0)
    _, text = card_of(exported(place, tmp_path / "out", kind))
    by_transformers, by_vllm = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(by_vllm, "card", "exec")
    assert "repetition_penalty=1.0" in by_transformers, "the run sampled without the base's"
    assert "typical_p" not in by_transformers
    assert "has `repetition_penalty: 1.5`: the run sampled without it" in text
    assert ('"brief": True' in by_transformers) == ("chat_template_kwargs={'brief': True}" in by_vllm) == template
    assert 'LLM(base, dtype="float32"' in by_vllm, "vLLM would make bfloat16 of it"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(by_transformers, {})
    assert capsys.readouterr().out.strip(), "it answers"


def test_the_card_of_a_reward_model_says_how_to_train_with_it(reward_run: NamedRun, tmp_path: Path) -> None:
    front, text = card_of(exported(reward_run, tmp_path / "mine", "adapter"))
    assert front["library_name"] == "peft"
    assert "pipeline_tag" not in front
    assert text.startswith("\n# run\n\nA reward model, trained with rlft for 7 steps.\n")
    assert "reward.learned.path=mine lora.rank=4 lora.alpha=8" in text


def test_what_is_asked_is_checked_before_torch_is_imported() -> None:
    code = "import sys, rlft.commands.export.command, rlft.commands.chat; "
    code += "print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(rlft.__file__).parents[1])}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == "set()\n"
