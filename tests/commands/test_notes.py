"""`rlft plan`, `rlft reward try` and the start of a run print the same notes, for conditions that are combined."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.model.backbone import load_backbone
from rlft.model.roles import policy_alone
from rlft.plan.prediction import notes_of, predict
from rlft.plan.run_plan import facts_of

TINY = Path(__file__).parents[2] / "rlft" / "assets" / "tiny-arithmetic"
IN_DATA = {
    "": "",
    "word " * 300: r"\d+ (train|held-out) prompts? longer than prompts.max_tokens=256",
    "<|im_start|>user": "<|im_start|>",
    "[INST]": "[INST]",
}
"""{what is added to some questions: words of the note about that}."""
IN_WORDS = {
    (): "",
    ("generation.top_p=0.9",): "generation.top_p: leaves out",
    ("eval.num_prompts=500",): "eval.num_prompts: there are only",
    ("eval.num_prompts=128",): "",  # the default
    ("prompts_per_step=30", "minibatches=1"): "prompts_per_step: there are only",
    ("model.kernels=plain",): "padded rows: kernels are plain",
    ("model.attn_implementation=eager",): "padded rows: model.attn_implementation is eager",
    ("prompts.style=raw",): "",
    ("model.gradient_checkpointing=tiles", "lora.dropout=0.1"): "model.gradient_checkpointing: MLPs are not computed",
}
FIXED = ("data=jsonl", "data.path=sums.jsonl", "data.held_out_fraction=0.3", "group_size=2", "steps=1",
         "generation.max_tokens=8", "eval.every=1", "model.device=cpu", "generation=transformers")  # fmt: skip
FEW = ("prompts_per_step=2", "eval.num_prompts=4")


@pytest.fixture
def folder(here):
    shutil.copytree(TINY, here / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    shutil.copytree(TINY, here / "chatml")
    return here


def write(file, added):
    rows = [{"prompt": f"What is {i} + {i}?{added * (i % 3 == 0)}", "answer": str(2 * i)} for i in range(1, 31)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("number", [3, slow(64)])
def test_a_plan_a_trial_of_rewards_and_a_loaded_run_have_the_same_notes(folder, number):
    """Models with and without a template x texts in the data x keys, each with its own note: 64 configs."""
    configs = list(itertools.product(("bare", "chatml"), IN_DATA, IN_WORDS))
    for model, added, words in random.Random(7).sample(configs, number):
        write(folder / "sums.jsonl", added)
        few = [word for word in FEW if not any(w.startswith(word.partition("=")[0]) for w in words)]
        resolved = resolve(compose([*FIXED, f"model.path={folder / model}", *few, *words]))
        planned = predict(resolved, None)
        plan = resolved.plan()
        backbone = load_backbone(plan.config.model)
        roles = policy_alone(backbone, plan.config.lora, token_budget=512, seed=0)
        started = plan.notes_with(facts_of(roles.model, (), backbone, roles.forward))
        roles.close()
        case = (model, added[:20], words)
        assert notes_of(plan) == started == list(planned.notes), case
        expected = [IN_WORDS[words]] if IN_WORDS[words] else []
        if model == "bare" and "prompts.style=raw" not in words:
            expected.append("The tokenizer has no chat template")
        if added:
            expected.append(IN_DATA[added] if "word" in added else re.escape(IN_DATA[added]))
        for words_of_note in expected:
            assert any(re.search(words_of_note, note) for note in started), (case, words_of_note, started)
        assert len(started) == len({*started})
        if not expected:
            assert started == [], case


@pytest.mark.slow
def test_the_commands_print_these_notes(folder, forks):
    write(folder / "sums.jsonl", "[INST]")
    words = [*FIXED, "model.path=bare", "model.kernels=plain", "generation.top_p=0.9", *FEW]
    told = {}
    for command in (("plan",), ("reward", "try", "rows=1"), ("train", "hydra.run.dir=r")):
        ended = forks.run(*command[:2], *words, *command[2:], cwd=folder)
        lines = (ended.out + ended.err).splitlines()
        told[command[0]] = [line.partition("note: ")[2] for line in lines if line.startswith("note: ")]
    of_plan, of_try, of_run = told.values()
    assert of_plan == of_try == of_run[: len(of_plan)]
    assert len(of_plan) == 5  # top_p, markers in both splits, no template, padded rows
    assert of_run[5].startswith("the longest rows of this run fit into memory")
    assert all(note.startswith("step ") for note in of_run[6:])
