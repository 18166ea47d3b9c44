"""One base for trainer and engine on the pretended card, and an adapter added to it for sampling."""

from __future__ import annotations

from typing import Any

import torch
from fused_engine import fused
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from pretended_card import BLOCK, COUNTS
from transformers import AutoModelForCausalLM, Qwen2Config

from rlft.generation.merged_weights import MergedWeights
from rlft.generation.shared_base import share
from rlft.types import Adapter

SIZES = Qwen2Config(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
)  # fmt: skip
CARD = torch.device("cuda")


def main() -> dict[str, Any]:
    """What happens to the bytes on the card and to the bits of the base."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(SIZES, dtype=torch.bfloat16).requires_grad_(False).eval().to(CARD)
    size = sum(-(-parameter.nbytes // BLOCK) * BLOCK for parameter in model.parameters())
    engine, ids = fused(model), torch.arange(3, 23, device=CARD)[None]
    before, live = model(ids).logits.cpu(), COUNTS.live
    shared = share(model, engine, CARD)
    found: dict[str, Any] = {"model": size, "freed": live - COUNTS.live}
    found["same logits"] = torch.equal(model(ids).logits.cpu(), before)
    clean, merger = bits(engine), MergedWeights(shared, model)
    merger.load(adapter())
    with merger.merged():
        shared.check_addresses()
        found["merged"] = not torch.equal(bits(engine), clean)
    found["merged until the trainer computes"] = not torch.equal(bits(engine), clean)
    merger.take_back()
    found["taken back"] = torch.equal(bits(engine), clean)
    found["logits afterwards"] = torch.equal(model(ids).logits.cpu(), before)
    return found


def bits(engine: Any) -> torch.Tensor:
    return torch.cat([parameter.data.view(torch.int16).flatten().cpu() for parameter in engine.parameters()])


def adapter() -> Adapter:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        peft = get_peft_model(AutoModelForCausalLM.from_config(SIZES), config)
    random = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(peft).items()}
    weights = {name: 0.05 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return Adapter(version=1, weights=weights, config=peft.peft_config["default"].to_dict())
