"""What families.json says of each family of models is what a tiny random model of it shows."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoConfig

from rlft import cli
from rlft.commands import lists
from rlft.model import families as data, forward
from rlft.model.backbone import read_config
from rlft.model.families import SHORT, Family, known, limit_of, probed_beginnings, windows_of
from rlft.model.forward import _probe, choose, packed_forward, padded_forward
from rlft.types import UserError
from tests.model import write_families
from tests.model.family_models import TOKENIZER, families, tiny_config
from tests.model.family_probe import DECODES_OTHERWISE, WRONG_FORWARD, probe, settings

OF_EACH_KIND = (
    "bert",  # an encoder
    "gpt2",  # packed, learned positions, Conv1D
    "llama",
    "qwen3_5_text",  # gated delta nets
)
PARTS = 12


def differences(kinds, folder):
    """{family: (what was found, what families.json says)} where they differ, but for vLLM."""
    found = {}
    for kind in kinds:
        place = folder / kind
        place.mkdir()
        tried, expected = probe(kind, place), replace(known().by_type[kind], vllm=None)
        shutil.rmtree(place)
        if tried != expected:
            found[kind] = tried, expected
    return found


def test_a_family_of_each_kind_is_what_the_file_says(tmp_path):
    assert not differences(list(OF_EACH_KIND), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_is_what_the_file_says(part, tmp_path):
    assert set(families()) == set(known().by_type) or transformers.__version__ != known().transformers
    assert not differences([kind for kind in families() if kind in known().by_type][part::PARTS], tmp_path)


# -- refusals ----------------------------------------------------------------------------------------------------------
def config_folder(kind, folder):
    """A model's folder without weights."""
    tiny_config(kind).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


RUN = "generation=transformers model.device=cpu data.size=8 data.held_out_size=2 prompts_per_step=2 eval.num_prompts=2"


def test_a_family_that_was_seen_to_fail_is_refused_by_name_before_weights_are_loaded(tmp_path, monkeypatch, capfd):
    here, folder = transformers.__version__, config_folder("llama", tmp_path / "model")
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # the folder has a config alone
    run = ["train", *RUN.split(), f"model.path={folder}", f"hydra.run.dir={tmp_path / 'run'}"]
    for family in (Family(wrong=WRONG_FORWARD), Family(decoding=DECODES_OTHERWISE)):
        monkeypatch.setattr(data, "known", lambda family=family: data.Families({"llama": family}, here, ""))
        assert cli.run(run) == 2
        problem = f"with a llama, {family.wrong or family.decoding}, got {folder}; use "
        assert capfd.readouterr().err.startswith(f"rlft: model.path: {problem}")
        # What another release of transformers does is seen when a run starts.
        monkeypatch.setattr(data, "known", lambda family=family: data.Families({"llama": family}, "4.0.0", ""))
        assert read_config(settings(folder)).model_type == "llama"


def test_encoders_and_models_without_layers_for_an_adapter_are_refused_by_key(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # the folders have a config alone
    for kind, problem in {
        "bert": "a bert is an encoder, which also reads the tokens behind",
        "bart": "a bart is an encoder-decoder, whose decoder reads more than the tokens before",
        "reformer": "a reformer has no linear layer that an adapter can learn on",
        "mllama": "transformers has no class of causal language models for a mllama_text_model",
    }.items():
        folder = config_folder(kind, tmp_path / kind)
        code = cli.run(["train", *RUN.split(), f"model.path={folder}", f"hydra.run.dir={tmp_path / 'run'}"])
        refusal = capfd.readouterr().err
        assert (code, refusal.startswith(f"rlft: model.path: {problem}")) == (2, True), refusal
        assert "; use " in refusal


# -- rlft models -------------------------------------------------------------------------------------------------------
def test_the_page_of_families_says_what_the_file_does():
    assert write_families.page() == write_families.DOCS.read_text(encoding="utf-8")


def test_families_are_listed_by_pattern(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def listed(*words):
        assert cli.run(["models", *words]) == 0
        return capsys.readouterr().out

    lines = listed("Qwen3").splitlines()
    assert "qwen3: packed training; generates with transformers; vLLM with LoRA; merged export" in lines
    assert "    LoRA on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; not lm_head" in lines
    names = [line.partition(":")[0] for line in lines if line[:1].isalpha()]
    assert names[:-2] == [*sorted(kind for kind in known().by_type if "qwen3" in kind), "qwen3_vl"]
    assert lines[-2] == "images in prompts: qwen2_5_vl, qwen3_vl, qwen3_5, idefics3, smolvlm, gemma3, gemma4"
    assert lines[-1].startswith(f"tried with transformers {known().transformers} and vLLM {known().vllm}")
    assert sorted(json.loads(listed("gemma?", "--json"))) == ["gemma2", "gemma3", "gemma4"]
    # Families that read images are found, though their language model stands under its own name.
    assert listed("qwen3-vl").startswith("qwen3_vl: reads images in prompts, and its language model is trained;")
    assert json.loads(listed("qwen3-vl", "--json"))["qwen3_vl"]["note"].startswith("reads images in prompts")


def test_a_word_that_names_no_family_is_refused_with_the_one_that_was_meant():
    for words, message in (
        (["quen3"], "models: there is no such family of causal language models, got quen3; did you mean qwen3?"),
        (["a", "b"], "models: takes one pattern, got a b; write rlft models <pattern>"),
        (["--yaml"], "models: has no such option, got --yaml; use --json"),
    ):
        with pytest.raises(UserError) as refusal:
            lists.models(words)
        assert str(refusal.value) == message


# -- lengths of rows ---------------------------------------------------------------------------------------------------
LIMIT = 16
FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}
FACTORS_OF_128 = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
# Phi-4-mini's shape: three quarters of each head are rotated, 6 of 8 numbers, so 3 factors.
PHI4_MINI = {
    "original_max_position_embeddings": LIMIT,
    "rope_parameters": LONGROPE | FACTORS | {"partial_rotary_factor": 0.75},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0}
OF_A_BATCH = [
    ("phi3", PHI4_MINI),
    ("llama", {"rope_parameters": LONGROPE | {name: [*factors, 2.0] for name, factors in FACTORS.items()}}),
    ("llama", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC | {"factor": 4.0}}),
    ("qwen2", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC | {"factor": 2.0}}),
]


def rows_of(make_batch, completions):
    """Rows of one group with a prompt of 6 tokens and completions of these lengths, and one short row of another."""
    prompt, other = [3, 17, 5, 99, 42, 8], [11, 4]
    rows = [(5, prompt, [9 + 7 * i + j for j in range(length)]) for i, length in enumerate(completions)]
    return make_batch([*rows, (2, other, [70, 71, 72])])


def test_rows_up_to_the_limit_are_exact_and_longer_ones_are_refused_by_name(random_model, plain, make_batch):
    for kind, keys in OF_A_BATCH:
        model = random_model(kind, **keys)
        forward = choose(model)
        assert forward.packed, forward.reason
        batch = rows_of(make_batch, (LIMIT - 6, 1, 4))
        expected, _ = plain(model, batch)
        padded = padded_forward(model, batch, 1.0, False)
        for outputs in (forward(batch, 1.0), padded):
            torch.testing.assert_close(outputs.logprobs, expected, rtol=1e-5, atol=1e-5)
        longer = rows_of(make_batch, (LIMIT - 5, 1, 4))
        alone, _ = plain(model, longer)
        # The refusal is needed: beside a longer row the short ones have other log-probs than alone.
        assert (padded_forward(model, longer, 1.0, False).logprobs - alone)[1:].abs().max() > 1e-3
        words = f"model.path: a row exceeds the model's context of {LIMIT} tokens, .* RoPE makes a row depend on its"
        with pytest.raises(UserError, match=words):
            forward(longer, 1.0)
        with pytest.raises(UserError, match=words):
            forward.most_likely(longer, 2, 90)


def test_a_row_with_branches_is_as_long_as_its_longest_path(random_model, tree_batch):
    trees, paths, _ = tree_batch
    longest, all_tokens = int(paths.attention_mask.sum(1).max()), int(trees.attention_mask.sum(1).max())
    assert longest <= LIMIT < all_tokens
    choose(random_model("phi3", **PHI4_MINI))(trees, 1.0)


def test_the_limit_is_the_smallest_length_that_the_config_names():
    nested = {
        "full_attention": LONGROPE | {"short_factor": [1.0] * 128, "long_factor": [2.0] * 128},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    for name, keys, expected in (
        ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 64}, (64, "context of 64 tokens")),
        ("llama", {"rope_parameters": linear}, (128, "context of 128 tokens")),
        ("llama", {"rope_parameters": yarn}, (128, "context of 128 tokens")),
        ("gemma3_text", {"rope_parameters": nested}, (LIMIT, "longrope RoPE")),
        ("gemma3", {"text_config": {"rope_parameters": nested}}, (LIMIT, "longrope RoPE")),
        ("llama4_text", {"floor_scale": 32, "attn_temperature_tuning": True}, (31, "a floor_scale of 32")),
        ("llama4_text", {"floor_scale": 32, "attn_temperature_tuning": False}, (128, "context of 128 tokens")),
        ("gpt2", {"max_position_embeddings": 50}, (50, "context of 50 tokens")),
    ):
        limit = limit_of(AutoConfig.for_model(name, **{"max_position_embeddings": 128} | keys))
        assert limit.tokens == expected[0]
        assert expected[1] in limit.words
    assert limit_of(AutoConfig.for_model("mamba2")) is None


def test_the_probe_has_rows_on_both_sides_of_every_window_that_a_row_may_reach(random_model):
    for kind, keys, expected in (
        ("mistral_window", {"sliding_window": 24}, [24]),
        ("mistral_window", {"sliding_window": 400, "max_position_embeddings": 1024}, [400]),
        ("mistral_window", {"sliding_window": 126}, []),  # rows of 129 tokens do not fit the context
        ("mistral_window", {"sliding_window": 4000, "max_position_embeddings": 8192}, []),
        ("llama", {}, []),
    ):
        model = random_model(kind, **keys)
        batch, first = _probe(model)
        lengths, context = batch.attention_mask.sum(1).tolist(), model.config.max_position_embeddings
        assert lengths[:4] == [9, 7, 9, 4]
        assert sorted(lengths[4:-2]) == sorted(n for window in expected for n in (window - 1, window + 3))
        assert first.tolist() == [0] * (len(lengths) - 2) + [context - SHORT] * 2
        assert lengths[-2] == SHORT
        assert windows_of(model.config) in ([], [keys.get("sliding_window")])
        choose(model)


def test_the_probe_has_rows_on_both_sides_of_the_contexts_that_rope_extends_and_at_the_end():
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    for kind, keys, expected in (
        ("llama", {"rope_parameters": yarn}, [60, 119]),
        ("llama", {"rope_parameters": yarn | {"original_max_position_embeddings": 126}}, [119]),
        ("llama", {"rope_parameters": LONGROPE | FACTORS_OF_128}, [LIMIT - SHORT]),  # no row exceeds its first limit
        ("gpt2", {}, [119]),
        ("llama", {"max_position_embeddings": SHORT}, []),
    ):
        config = AutoConfig.for_model(kind, **{"max_position_embeddings": 128} | keys)
        assert probed_beginnings(config) == expected, kind


def test_a_packed_forward_that_is_wrong_at_the_end_of_the_context_is_not_used(random_model, monkeypatch):
    model = random_model("llama")
    assert choose(model).packed

    def wrong(*args, layout, **keys):
        moved = replace(layout, position_ids=layout.position_ids.clamp(max=122))
        return packed_forward(*args, layout=moved, **keys)

    monkeypatch.setattr(forward, "packed_forward", wrong)
    found = choose(model)
    assert not found.packed
    assert "packed and padded log-probs differ" in found.reason
