"""Every command that goes on from a run refuses a base that is not the run's, by what differs, before weights load."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slow_cases import slow

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.runs import checkpoint, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import with_named_runs
from rlft.runs.fingerprints import PARTS

SMALL = ("lora.rank=4", "lora.alpha=8", "model.device=cpu", "scoring.workers=0", "generation=transformers", "steps=3",
         "model.date=2026-11-25", "eval.every=0",
         "data.size=16", "data.held_out_size=4", "prompts_per_step=4", "group_size=4")  # fmt: skip
USES = {
    "resume": "resume run steps=4",
    "fork": "resume run/checkpoints/step_000002 hydra.run.dir=fork",
    "eval": "eval run=run",
    "export": "export run=run out=out",
    "export of the adapter": "export run=run out=out as=adapter",
    "chat": "chat run=run",
    "serve": "serve run=run serve.port=0",
    "sample": "sample run=run hydra.run.dir=samples",
    "lora.path": f"train {' '.join(SMALL)} model.path=base hydra.run.dir=new lora.path=run",
    "reference": f"train {' '.join(SMALL)} model.path=base hydra.run.dir=new algorithm.kl_coef=0.1 "
    "snapshot.reference=run",
    "teacher": f"train {' '.join(SMALL)} model.path=base hydra.run.dir=new algorithm=opd snapshot.teacher=run",
}
NOTED = ("lora.path", "reference", "teacher")
"""Uses of an adapter in another run, which may have another chat template and other ends: noted, not refused."""


def a_tensor(base):
    """Of a base in pytorch_model.bin."""
    tensors = torch.load(base / "pytorch_model.bin", weights_only=True)
    tensors["model.layers.1.self_attn.q_proj.weight"] += 1e-3
    torch.save(tensors, base / "pytorch_model.bin")


def edited(file, old, new):
    def edit(base):
        text = (base / file).read_text()
        assert old in text
        (base / file).write_text(text.replace(old, new))

    return edit


CHANGES = {
    "weights": a_tensor,
    "template": edited("chat_template.jinja", "<|im_start|>", "<|im_start|> "),
    "ends": edited("generation_config.json", '"eos_token_id": 2', '"eos_token_id": [2, 1]'),
    "config": edited("config.json", "10000.0", "10001.0"),
    "tokenizer": edited("tokenizer_config.json", '"pad_token": "<|endoftext|>"', '"pad_token": "<|im_start|>"'),
}


@pytest.fixture(scope="module")
def begun(tiny_path, tmp_path_factory):
    """A folder with `base`, whose weights are a pytorch_model.bin, and `run` on it, with a checkpoint of step 2."""
    place = tmp_path_factory.mktemp("begun")
    shutil.copytree(tiny_path, place / "base")
    torch.save(load_file(place / "base" / "model.safetensors"), place / "base" / "pytorch_model.bin")
    (place / "base" / "model.safetensors").unlink()
    return place


@pytest.fixture
def place(begun, here, make_roles):
    """The working directory, with base and run as they were."""
    if not (begun / "run").exists():
        roles = make_roles(noise=0.05)
        shutil.copytree(begun / "base", here / "base")
        plan = resolve(compose([*SMALL, "model.path=base"])).plan()
        Path("run").mkdir()
        run_folder.claim(Path("run"), plan.plain, plan.fingerprints, plan.num_steps)
        saved = Checkpoint(
            step=2, adapters={"policy": roles.weights("policy")}, adapter_config=roles.adapter_config(),
            optimizer={"nothing": torch.zeros(1)}, state={"seed": 0, **plan.fingerprints},
        )  # fmt: skip
        checkpoint.save(Path("run/checkpoints"), saved, keep=1)
        shutil.move("run", begun / "run")

    def fresh():
        for name in ("base", "run", "out", "fork", "new", "samples"):
            shutil.rmtree(here / name, ignore_errors=True)
        for name in ("base", "run"):
            shutil.copytree(begun / name, here / name)
        return here

    return fresh


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing loads weights."""

    def fail(*arguments, **options):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("rlft.model.backbone.load_model", fail)
    monkeypatch.setattr("rlft.commands.export.weights.load_float32", fail)


QUICK = [(use, [*CHANGES][n % 5]) for n, use in enumerate(USES)]
OTHERS = [(use, change) for use in USES for change in CHANGES if (use, change) not in QUICK]


def key_of(use):
    others = {"lora.path": "lora.path", "reference": "snapshot.reference", "teacher": "snapshot.teacher"}
    return {**others, "sample": "adapter"}.get(use, "model.path")


@pytest.mark.parametrize("cases", [QUICK, slow(OTHERS)], ids=["each once", "all"])
def test_every_use_of_a_run_names_what_differs_in_its_base(cases, place, capsys, unloaded):
    for use, change in cases:
        folder = place()
        CHANGES[change](folder / "base")
        if use in NOTED and change in ("template", "ends"):
            plan = resolve(with_named_runs(compose(USES[use].split()[1:]))).plan()
            start = f"{key_of(use)}: the base of its run had other {PARTS[change]} ("
            assert any(note.startswith(start) for note in plan.notes), (use, plan.notes)
            continue
        code, told = cli.run(USES[use].split()), capsys.readouterr().err
        assert code == 2, (use, change, told)
        [line] = [line for line in told.splitlines() if line.startswith("rlft: ")]
        assert line.startswith(f"rlft: {key_of(use)}: "), (use, line)
        if key_of(use) == "model.path" and use not in ("resume", "fork"):
            assert " is not the base this run was trained on: it has other " in line, (use, line)
            remedy = "leave it as it was, or, if the base has moved, write model.path=<its new folder>"
            assert f"), got base; {remedy}" in line, (use, line)
        assert [part for part in CHANGES if f" {PARTS[part]} (" in line] == [change], (use, line)
        assert not (folder / "out").exists()
