"""One base for trainer and engine on the pretended card, and a copy of the policy in an engine's own matrices."""

from typing import Any

import torch
from fused_engine import fused
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from pretended_card import BLOCK, COUNTS
from transformers import AutoModelForCausalLM, Qwen2Config

from rlft.generation.shared_base import share
from rlft.generation.vllm.copied_weights import CopiedWeights, parameters_of
from rlft.types import Adapter

CARD = torch.device("cuda")


def sizes(num_layers: int = 2) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip


def on_card(num_layers: int = 2) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(sizes(num_layers), dtype=torch.bfloat16)
    return model.requires_grad_(False).eval().to(CARD)


def main() -> dict[str, Any]:
    """What happens to the bytes on the card and to the bits of the base."""
    model = on_card()
    size = sum(-(-parameter.nbytes // BLOCK) * BLOCK for parameter in model.parameters())
    engine, ids = fused(model), torch.arange(3, 23, device=CARD)[None]
    before, live = model(ids).logits.cpu(), COUNTS.live
    shared = share(model, engine, CARD)
    shared.check_addresses()
    same = torch.equal(model(ids).logits.cpu(), before)
    return {"model": size, "freed": live - COUNTS.live, "same logits": same}


def copied() -> dict[str, Any]:
    """{number of layers: launches and waits of a publish and of its check, and what is wrong}, of a small model."""
    return {str(number): of_a_publish(number) for number in (2, 12)}


def of_a_publish(num_layers: int) -> dict[str, Any]:
    model = on_card(num_layers)
    engine = fused(model, wrapped=False)
    clean, adapters = bits(model), [adapter(num_layers, seed) for seed in (1, 2)]
    copied, found = CopiedWeights(parameters_of(model), engine, {}), dict[str, Any]()
    copied.load(adapters[0])  # which looks at each matrix once
    for name, work in {"load": lambda: copied.load(adapters[1]), "check": copied.held}.items():
        COUNTS.clear()
        work()
        found[name] = [sum(COUNTS.launches.values()), sum(COUNTS.waits.values())]
    rows = dict(engine.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"].data[:32]
    stem, lora = "base_model.model.model.layers.1.self_attn.q_proj", adapters[1].weights
    up, down = lora[f"{stem}.lora_B.weight"], lora[f"{stem}.lora_A.weight"]
    own = model.model.layers[1].self_attn.q_proj.weight.float()
    found["wrong"] = [
        not torch.equal(bits(model), clean),
        not torch.equal(rows.cpu(), (up @ down * 2.0 + own).to(torch.bfloat16).cpu()),
        bool(copied.held().faults),
    ]
    return found


def bits(model: Any) -> torch.Tensor:
    return torch.cat([parameter.data.view(torch.int16).flatten().cpu() for parameter in model.parameters()])


def adapter(num_layers: int, seed: int) -> Adapter:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        peft = get_peft_model(AutoModelForCausalLM.from_config(sizes(num_layers)), config)
    random = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(peft).items()}
    weights = {name: (0.05 * torch.randn(shape, generator=random)).to(CARD) for name, shape in shapes.items()}
    return Adapter(version=seed, weights=weights, config=peft.peft_config["default"].to_dict())
