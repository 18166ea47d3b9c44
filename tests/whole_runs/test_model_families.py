"""Whole runs of families with recurrent layers or experts: what is sampled is what transformers computes of whole rows,
and updates that replay the experts of the engine or the old policy go on as the same run.
"""

import json
import shutil

import hybrid_models
import pytest
import torch
import transformers
from mixtures import MANY
from peft import PeftModel
from run_folders import check_goes_on, check_same, learned, metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, OlmoeForCausalLM, PreTrainedModel

from rlft import cli

pytestmark = pytest.mark.slow

KEYS = (
    "prompts_per_step=2", "generation=transformers", "generation.max_tokens=10", "lora.rank=2", "data.size=16",
    "data.held_out_size=4", "model.device=cpu", "scoring.workers=0", "console=null", "reward=[varied]",
    "checkpoint.every=1", "checkpoint.keep=9",
)  # fmt: skip
RECURRENT = ("group_size=3", "eval.every=0", "trainer.lr=0.03", "steps=2")
REPLAYS = ("group_size=4", "minibatches=2", "eval.every=1", "eval.num_prompts=2", "trainer.lr=0.1")


@pytest.fixture
def words_for(tmp_path, tiny_path, varied_reward):
    """What is typed for a run of a model, which gets the embedded model's tokenizer, with a reward that varies."""

    def words(model: PreTrainedModel, name: str, *more: str) -> list[str]:
        folder = tmp_path / name / "model"
        model.save_pretrained(folder)
        for file in (*tiny_path.glob("*token*"), *tiny_path.glob("*.jinja")):
            shutil.copy(file, folder)
        return ["train", "--config-dir", str(varied_reward), *KEYS, *more, f"model.path={folder}"]

    return words


def test_every_family_with_recurrent_layers_trains_and_agrees_with_transformers(words_for, tmp_path):
    kinds = hybrid_models.known()
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert release < (5, 19) or kinds == list(hybrid_models.HYBRIDS), "a release that has all of them"
    for kind in kinds:
        folder = tmp_path / kind
        words = words_for(hybrid_models.random_model(kind), kind, *RECURRENT, f"hydra.run.dir={folder / 'run'}")
        assert cli.run(words) == 0, kind
        steps = metrics(folder / "run")
        # The trainer's log-probs, of right-padded rows, against the engine's, of left-padded prompts and a cache.
        assert all(step["sampler/logprob_gap_max"] < 1e-4 for step in steps), (kind, steps)
        assert all(step["policy/grad_norm"] > 0 for step in steps), kind
        base = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()
        [adapter] = (folder / "run" / "checkpoints").glob("*1/policy")
        model = PeftModel.from_pretrained(base, str(adapter)).eval()
        [rollouts] = (folder / "run" / "rollouts").glob("*2.jsonl")
        moved = 0.0
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        for line in map(json.loads, rollouts.read_text().splitlines()):
            prompt = tokenizer.apply_chat_template(line["prompt"], add_generation_prompt=True, return_dict=False)
            row = torch.tensor([[*prompt, *line["token_ids"]]])
            with torch.no_grad():
                expected = of_row(model, row)[-len(line["token_ids"]) :]
                with model.disable_adapter():
                    moved = max(moved, (of_row(model, row)[-len(expected) :] - expected).abs().max().item())
            torch.testing.assert_close(torch.tensor(line["logprobs"]), expected, rtol=0, atol=1e-4, msg=kind)
        assert moved > 1e-2, f"the adapter of {kind} has an effect"


def of_row(model, row):
    """Log-probs of every token of a single row but the first."""
    logprobs = model(input_ids=row, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, row[0, 1:, None])[:, 0]


def test_a_model_without_a_cache_of_transformers_is_refused_before_weights_are_loaded(words_for, capsys):
    assert cli.run(words_for(hybrid_models.random_model("rwkv"), "rwkv", *RECURRENT)) == 2
    said = capsys.readouterr().err
    problem = "decoding in the transformers engine needs a cache of transformers, which its class lacks"
    assert f"model.path: with a rwkv, {problem}" in said


@pytest.fixture
def mixture(tiny_path, words_for):
    """What is typed for a run of a random mixture of four experts."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = OlmoeConfig(
            vocab_size=len(AutoTokenizer.from_pretrained(tiny_path)), intermediate_size=16, initializer_range=0.2,
            max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes, **MANY,
        )  # fmt: skip
        model = OlmoeForCausalLM(config)
    return lambda *more: words_for(model, "mixture", *REPLAYS, *more)


@pytest.mark.parametrize("words", ["routing=engine", "routing=old", "routing=old snapshot.old=copy"])
def test_a_run_that_replays_experts_goes_on_as_the_same_run(mixture, tmp_path, words):
    whole = check_goes_on(tmp_path, mixture(*f"snapshot.{words}".split()), 1, 2)
    assert learned(whole)
    replaced = [line["router/replaced_tokens"] for line in metrics(whole)]
    assert max(replaced) > 0, "the policy moved within a step, so that it would have chosen other experts"


def test_two_ranks_replay_the_same_experts(mixture, tmp_path):
    for name, how in (("alone", "cluster.lanes=2"), ("both", "cluster.ranks=2")):
        assert cli.run(mixture("snapshot.routing=engine", "steps=2", how, f"hydra.run.dir={tmp_path / name}")) == 0
    check_same(tmp_path / "both", tmp_path / "alone")
