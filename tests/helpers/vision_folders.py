"""Folders of tiny models with random weights that read images, each with the processor of its family."""

import json
from pathlib import Path
from typing import Any

import torch
from model_folders import TOKENIZER, text_sizes
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'SHOWN' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWN = {"idefics3": "<image>", "smolvlm": "<image>", "gemma3": "<start_of_image>", "gemma4": "<|image|>"}
"""{kind: what its template writes for an image}; of Qwen's it is `QWEN`."""
TILED = {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
TILED_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
SPECIAL = {
    "idefics3": TILED_TOKENS,
    "smolvlm": TILED_TOKENS,
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "gemma4": ["<|image>", "<|image|>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
}
NAMED = ("boi_token", "image_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
"""What Gemma's tokenizers call the first of these."""


def folder_of(
    folder: Path, kind: str, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> Path:
    """A model of this type with its tokenizer, its template and its processor of images; `text` and `vision` are other
    fields of its config."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.model_max_length = 4096
    special = SPECIAL.get(kind, ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE.replace("SHOWN", SHOWN.get(kind, QWEN))
    if kind.startswith("gemma"):
        tokenizer.init_kwargs |= dict(zip(NAMED, special, strict=False))
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    config = _config(kind, tokenizer, ids, text or {}, vision or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for name, weight in model.named_parameters():  # towers begin with weights of 0.02, whose images look alike
            if "visual" in name or "vision" in name or "connector" in name or "projector" in name:
                weight.data = weight.data * 5 if weight.dim() > 1 else weight.data
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(kind).save_pretrained(folder)
    fields = _fields_of_processor(kind)
    if fields:
        (folder / "processor_config.json").write_text(json.dumps(fields))
    return folder


def _fields_of_processor(kind: str) -> dict[str, Any]:
    if kind in TILED:
        return {"processor_class": TILED[kind], "image_seq_len": 4}
    return {"processor_class": "Gemma3Processor", "image_seq_length": 4} if kind == "gemma3" else {}


def _config(kind: str, tokenizer: Any, ids: dict[str, int], of_text: dict[str, Any], of_vision: dict[str, Any]) -> Any:
    text = text_sizes(vocab_size=len(tokenizer), num_hidden_layers=4, max_position_embeddings=4096)
    text |= of_text
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"num_position_embeddings": 16, "spatial_merge_size": 2, "out_hidden_size": text["hidden_size"]}
    vision |= of_vision
    qwen: dict[str, Any] = {"tie_word_embeddings": False}
    if kind.startswith("qwen"):
        names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
        qwen |= {f"{field}_token_id": ids[f"<|{token}|>"] for field, token in names.items()}
    if kind == "qwen3_5":
        linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        kinds = {"layer_types": ["linear_attention", "full_attention"] * 2}
        rope = {**sections, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        return Qwen3_5Config(text_config={**linear, **kinds, "rope_parameters": rope, **text},
                             vision_config=vision, **qwen)  # fmt: skip
    if kind == "qwen3_vl":
        rope = {**sections, "mrope_interleaved": True}
        deep = {**vision, "deepstack_visual_indexes": [0, 1]}
        return Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=deep, **qwen)
    if kind == "qwen2_5_vl":
        del text["head_dim"]
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        rope = {**sections, "mrope_section": [half - half // 2, half // 4, half // 4]}
        windows = {**vision, "window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=windows, **qwen)
    siglip = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **of_vision}
    if kind in TILED:
        tiled = SmolVLMConfig if kind == "smolvlm" else Idefics3Config
        tower = {**siglip, "image_size": 16, "patch_size": 4}
        sizes = {"image_token_id": ids["<image>"], "scale_factor": 2, "tie_word_embeddings": False}
        return tiled(text_config={**text, "model_type": "llama"}, vision_config=tower, **sizes)
    if kind == "gemma4":
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
        inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}
        ways = {"use_bidirectional_attention": "vision", "sliding_window": 48, "global_head_dim": 64}
        sizes = {"num_key_value_heads": 2, "head_dim": siglip["hidden_size"] // 2, "position_embedding_size": 256}
        return Gemma4Config(
            text_config={**text, **layers, **inputs, **ways},
            vision_config={**siglip, **sizes, "patch_size": 4, "pooling_kernel_size": 3},
            **{f"{name}_token_id": ids[f"<|{name}|>"] for name in ("image", "video", "audio")},
        )
    text |= {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
    tower = {**siglip, "image_size": 28, "patch_size": 7}
    sizes = {"mm_tokens_per_image": 4, "image_token_index": ids["<image_soft_token>"]}
    return Gemma3Config(text_config=text, vision_config=tower, **sizes)


def _image_processor(kind: str) -> Any:
    if kind.startswith("qwen"):
        size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    if kind in TILED:
        tiled = SmolVLMImageProcessorPil if kind == "smolvlm" else Idefics3ImageProcessorPil
        return tiled(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    if kind == "gemma4":
        return Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4)
