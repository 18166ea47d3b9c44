"""The plan of every type of model that transformers has ends in a plan or in one line, never in a traceback."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlft.config.compose import compose
from rlft.config.model import resolve_path
from rlft.config.resolved import resolve
from rlft.plan import prediction
from rlft.plan.prediction import predict
from rlft.plan.rewards.tester import Brief
from rlft.types import UserError

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
TOKENIZER = Path(resolve_path("embedded:tiny-arithmetic"))
RUN = (
    "generation=transformers", "model.device=cpu", "data.size=8", "data.held_out_size=2", "prompts_per_step=2",
    "eval.num_prompts=2", "reward=exact_match", "prompts.max_tokens=64",
)  # fmt: skip

# Types whose plans once ended in a traceback, or whose runs did after loading: {type: layers without an adapter}.
ONCE_WRONG = {
    "deepseek_v32": "indexer",
    "falcon_h1": "mamba.out_proj",
    "gemma3": "lm_head",
    "gemma4_text": "",
    "jamba": "mamba.dt_proj",
    "llama4_text": "feed_forward.router",
    "mamba2": "mixer.out_proj",
    "nemotron_h": "mixer.out_proj",
}


def parts_of(config):
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def shallow(model_type):
    """The default config of this type with a few layers, as far as that can be said of any config."""
    config = AutoConfig.for_model(model_type)
    for part in parts_of(config):
        number = getattr(part, "num_hidden_layers", None)
        if isinstance(number, int) and number > NUM_LAYERS and not getattr(part, "is_heterogeneous", False):
            for name, value in vars(part).items():
                if isinstance(value, list) and len(value) == number:
                    setattr(part, name, value[:NUM_LAYERS])
            part.num_hidden_layers = NUM_LAYERS
    return config


def folder_of(model_type, parent):
    """A model folder without weights; None if this installation cannot make the default config of that type."""
    folder = parent / model_type
    try:
        shallow(model_type).save_pretrained(folder)
    except Exception:
        return None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def plan_of(folder, plain):
    resolved = resolve({**plain, "model": {**plain["model"], "path": str(folder)}})
    return predict(resolved, None).as_dict()


def test_every_type_of_model_is_planned_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "brief_on", lambda plan: Brief())  # the rewards are the same for all
    transformers.logging.set_verbosity_error()
    types = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    plain, wrong, left_out = compose(RUN), {}, {}
    for model_type in types:
        folder = folder_of(model_type, tmp_path)
        if folder is None:
            continue
        try:
            found = plan_of(folder, plain)
        except UserError as refusal:
            if "\n" in str(refusal):
                wrong[model_type] = str(refusal)
        except Exception as error:
            wrong[model_type] = f"{type(error).__name__}: {error}"
        else:
            assert found["peak"] > 0
            left_out[model_type] = next(row["explanation"] for row in found["sizes"] if row["what"] == "adapted layers")
    assert not wrong, json.dumps(wrong, indent=2)
    for model_type, words in ONCE_WRONG.items():
        assert words in left_out[model_type]
    assert len(left_out) > len(types) / 3  # the others are encoders, or have no default config
