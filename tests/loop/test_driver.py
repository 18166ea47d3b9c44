"""What every run does before its first step: the rehearsal takes the longest shapes, and changes nothing of the run."""

import pytest
import torch
from slow_cases import slow, slow_but
from transformers import AutoConfig

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.transformers import TransformersGenerator
from rlft.logger.loggers import Loggers
from rlft.loop.driver import RunDriver
from rlft.model.forward import Forward
from rlft.model.kernels.prefix_cache import PrefixCache

TINY = (
    "steps=2", "prompts_per_step=2", "group_size=3", "generation=transformers", "generation.max_tokens=20",
    "lora.rank=2", "lora.alpha=4", "data.size=16", "data.held_out_size=8", "eval.every=0", "model.device=cpu",
    "scoring.workers=0", "console=null", "trainer.lr=1e-3",
)  # fmt: skip
PROMPT = 22  # tokens of every question
LONGEST = 2 * (PROMPT + 3 * 20)  # both groups, of the longest completions
RECIPES = ["algorithm=grpo", "algorithm=ppo critic.kind=adapter", "algorithm=grpo algorithm.entropy_coef=0.01"]


def run(folder, *words):
    given = {word.partition("=")[0] for word in words}
    common = [word for word in TINY if word.partition("=")[0] not in given]
    assert cli.run(["train", *common, *words, f"hydra.run.dir={folder}"]) == 0
    files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


@pytest.mark.parametrize("words", slow_but(RECIPES[1], RECIPES))
def test_a_run_is_the_same_with_and_without_it(words, tmp_path, monkeypatch):
    rehearsed = run(tmp_path / "a", *words.split(), "lora.dropout=0.1")
    monkeypatch.setattr(RunDriver, "rehearse", lambda self, step: None)
    assert run(tmp_path / "b", *words.split(), "lora.dropout=0.1") == rehearsed


@pytest.fixture
def forwards(monkeypatch):
    """(whether gradients were on, real tokens) of every forward."""
    seen, call = [], Forward.__call__

    def spy(self, batch, *args, **keys):
        seen.append((torch.is_grad_enabled(), self.real_tokens(batch)))
        return call(self, batch, *args, **keys)

    monkeypatch.setattr(Forward, "__call__", spy)
    return seen


def test_the_first_forward_with_gradient_is_of_the_longest_rows(forwards, tmp_path, tiny_path, monkeypatch):
    fill, filled, stages = PrefixCache.fill, [], []

    def filling(self):
        fill(self)
        filled.append(sum(room.numel() for pair in self._own for room in pair))

    monkeypatch.setattr(Loggers, "stage", lambda self, name: stages.append(name))
    monkeypatch.setattr(PrefixCache, "fill", filling)
    run(tmp_path / "run", "steps=1")
    tokens = [number for _, number in forwards]
    assert tokens[0] == max(tokens) == LONGEST
    config = AutoConfig.from_pretrained(tiny_path)
    size = config.hidden_size // config.num_attention_heads
    assert stages[: stages.index("sample")] == ["rehearse sampling", "rehearse update", "seal"]
    assert filled == [2 * config.num_hidden_layers * config.num_key_value_heads * size * (2 * 3) * 20]


def test_a_teacher_reads_rows_as_long_as_any_with_its_hint_before_the_first_forward_with_gradient(forwards, tmp_path):
    words = ["algorithm=opd", "snapshot.teacher=embedded:tiny-student", "snapshot.teacher_hint='It is {answer}.'"]
    run(tmp_path / "run", *words, "steps=1")
    of_the_hint = resolve(compose([*TINY, *words])).plan().teacher_row_tokens - 20 - PROMPT
    assert of_the_hint >= 5
    assert forwards[:2] == [(False, LONGEST + 2 * of_the_hint), (True, LONGEST)]
    assert max(tokens for _, tokens in forwards) == LONGEST + 2 * of_the_hint


@pytest.mark.parametrize("command", [slow("train"), "sft"])
def test_an_evaluation_is_rehearsed_with_all_its_samples(command, tmp_path, monkeypatch):
    rehearsed = []
    whole = TransformersGenerator.rehearse

    def spy(self, prompts, n, *how):
        rehearsed.append((len(prompts), n))
        assert self.version == 0, "base and adapter are added up by then"
        whole(self, prompts, n, *how)

    monkeypatch.setattr(TransformersGenerator, "rehearse", spy)
    words = ["eval.every=2", "eval.num_prompts=5", "eval.num_samples=7"]
    if command == "train":
        run(tmp_path / "run", *words)
        assert rehearsed == [(5, 7), (2, 3)]
        return
    teach = ["demonstrations.path=embedded:arithmetic-demonstrations", "max_completion_tokens=64", "steps=1"]
    teach += ["examples_per_step=2", "lora.rank=2", "model.device=cpu", "console=null", "data.held_out_size=8"]
    teach += ["data=arithmetic", "data.size=16", "generation=transformers", "generation.max_tokens=8"]
    assert cli.run(["sft", *teach, *words, "reward=exact_match", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert rehearsed == [(5, 7)]
