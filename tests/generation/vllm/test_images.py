"""Prompts with images in the real vLLM engine: it reads them as the trainer does."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import vision_folders
from model_folders import settings
from real_engines import vllm_engine
from run_folders import learned, metrics
from run_processes import start_fresh
from slow_cases import slow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.prompts import tokenised
from rlft.data.shapes import drawing
from rlft.generation.memory import Load
from rlft.generation.vllm.images import CACHE_GB, check_tokens, image_options, read_as_the_trainer, request
from rlft.model.backbone import load_tokenizer
from rlft.plan.sizes import sizes_of
from rlft.tokens.images import EXACT, picture, processor_of
from rlft.types import IMAGE, Prompt, UserError
from tests.generation.vllm.torchvision_aside import torchvision_in

TOLERANCE = 1e-3
"""Nats; both sides compute in float32 with other kernels; seen: 5e-5, and 0.1 and more with another image."""
MEAN_IN_16_BITS = 0.05
"""Nats, the mean of a step's tokens in bfloat16; seen: 0.01 to 0.022, as without images; other images are refused."""

WIDER = {
    "qwen2_5_vl": {"hidden_size": 128},  # for heads of 32, the smallest of vLLM on a CPU
    "qwen3_5": {  # linear layers have heads of 64 and more there
        "hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "initializer_range": 0.1, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip

KEYS = (
    "+recipe=grpo_shapes", "data=jsonl", "data.path=rows.jsonl", "data.image_field=images", "data.answer_field=answer",
    "prompts.max_tokens=256", "generation=vllm", "generation.vllm.max_num_seqs=8", "generation.max_tokens=12",
    "prompts_per_step=4", "group_size=4", "steps=2", "minibatches=2", "model.device=cpu", "eval.every=0",
    "reward=repetition", "reward.repetition.unit=tokens", "reward.repetition.ngram=1",  # differs in random answers
    "scoring.workers=0", "console=null", "hydra.run.dir=run",
)  # fmt: skip


def asked(backbone_folder, *pictures):
    """A tokenised prompt with drawings of these names."""
    tokenizer = load_tokenizer(settings(backbone_folder), {})
    messages = ({"role": "user", "content": f"is {IMAGE * len(pictures)}so?"},)
    prompt = Prompt(id="a", messages=messages, answer="1", images=tuple(map(drawing, pictures)))
    return next(tokenised([prompt], tokenizer, "chat"))


@pytest.mark.parametrize("kind", EXACT)
def test_a_request_has_one_token_for_each_image_and_the_image(kind, tmp_path):
    folder = vision_folders.folder_of(tmp_path / kind, kind)
    prompt = asked(folder, "3-a", "4-b")
    made = request(prompt)
    assert made["prompt_token_ids"] == list(prompt.template_ids)
    assert made["multi_modal_uuids"] == {"image": [drawing(name).digest for name in ("3-a", "4-b")]}
    assert [image.mode for image in made["multi_modal_data"]["image"]] == ["RGB", "RGB"]
    tokenizer = load_tokenizer(settings(folder), {})
    shown = tokenizer.convert_tokens_to_ids(processor_of(tokenizer)._token)
    assert made["prompt_token_ids"].count(shown) == 2
    without = asked(folder)
    assert request(without) == {"prompt_token_ids": list(without.token_ids)}
    assert without.template_ids == ()
    ends = [ids[-4:] for ids in (prompt.template_ids, prompt.token_ids, without.token_ids)]
    assert ends[0] == ends[1] == ends[2]
    assert len(prompt.template_ids) < len(prompt.token_ids)


def test_a_prompt_that_the_engine_reads_as_other_tokens_is_refused(tmp_path):
    prompt = asked(vision_folders.folder_of(tmp_path / "qwen2_5_vl", "qwen2_5_vl"), "3-a")
    check_tokens(prompt, list(prompt.token_ids), "a/model")
    other = [*prompt.token_ids[:-1], prompt.token_ids[-1] + 1]
    for read in (other, prompt.token_ids[1:]):
        with pytest.raises(UserError, match=r"model\.path: vLLM reads the prompt 'a' with its images as "):
            check_tokens(prompt, read, "a/model")
    texts = replace(prompt, images=(), template_ids=())
    check_tokens(texts, list(texts.token_ids), "a/model")


def test_the_engine_reads_images_with_the_trainers_processor(tmp_path):
    tokenizer = load_tokenizer(settings(vision_folders.folder_of(tmp_path / "qwen3_vl", "qwen3_vl")), {})
    of_vllm = SimpleNamespace(image_processor=None)
    processing = SimpleNamespace(info=SimpleNamespace(get_hf_processor=lambda: of_vllm))
    renderer = SimpleNamespace(get_mm_processor=lambda: processing)
    read_as_the_trainer(SimpleNamespace(llm_engine=SimpleNamespace(renderer=renderer)), processor_of(tokenizer))
    assert type(of_vllm.image_processor) is Qwen2VLImageProcessorPil


def test_towers_are_loaded_for_images_alone_and_the_engine_holds_one_of_its_own():
    assert image_options(0, on_cpu=False) == {"language_model_only": True}
    config = resolve(compose(["+recipe=grpo_shapes"])).config
    model, keys = sizes_of(config.model, config.lora), vllm_engine(gpu_memory_utilization=0.01, share_base=False)
    for device in ("cpu", "cuda"):
        options = image_options(3, on_cpu=device == "cpu")
        assert options["limit_mm_per_prompt"] == {"image": 3, "video": 0, "audio": 0}
        assert options["mm_processor_cache_gb"] == CACHE_GB
        assert options["skip_mm_profiling"] is (device == "cpu")
        load = Load(decodings=(), max_tokens=8, max_sequence_tokens=64, device=device, device_memory=10**6)
        plain, towered = (keys.memory(model, each).parts for each in (load, replace(load, tower=10**9)))
        assert sum(part.bytes for part in towered) - sum(part.bytes for part in plain) == 10**9


@pytest.mark.parametrize(("kind", "words"), [
    ("qwen3_vl", ()),
    *(slow(kind, ()) for kind in ("qwen2_5_vl", "idefics3", "smolvlm")),
    slow("qwen3_vl", ("cluster.engines=1",)),
    slow("qwen3_5", ("model.dtype=bfloat16",)),  # linear layers are computed in 16 bits alone there
])  # fmt: skip
def test_a_run_samples_prompts_with_one_image_two_or_none(kind, words, tmp_path):
    model = vision_folders.folder_of(tmp_path / "model", kind, WIDER.get(kind))
    rows = []
    for number, pictures in enumerate([(), ("3-a", "4-b"), ("1-c",), ("2-d", "5-e")] * 2):
        files = [tmp_path / f"{name}.png" for name in pictures]
        for file, name in zip(files, pictures, strict=True):
            picture(drawing(name)).resize((61, 43)).save(file)  # the processor resizes it
        rows.append({"prompt": f"{number} is so?", "images": list(map(str, files)), "answer": "1"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    variables = {"PYTHONPATH": torchvision_in(tmp_path / "aside"), "OMP_NUM_THREADS": "1"}
    ended = start_fresh("train", *KEYS, *words, f"model.path={model}", cwd=tmp_path, variables=variables).wait()
    assert ended.code == 0, ended.err
    assert learned(tmp_path / "run")
    steps = metrics(tmp_path / "run")
    assert len(steps) == 2
    gap, most = ("mean", MEAN_IN_16_BITS) if kind == "qwen3_5" else ("max", TOLERANCE)
    assert all(step[f"sampler/logprob_gap_{gap}"] < most for step in steps)
