"""Makes a tiny mixture of experts from a dense model: each MLP becomes four experts, of which a token goes to two.

    python scripts/make_tiny_mixture.py --out /tmp/mixture
    rlft train +recipe=grpo_arithmetic model.path=/tmp/mixture snapshot.routing=engine

The experts are the dense MLP with noise (a tenth of its weights' standard deviation), so that the mixture knows about
as much as the dense model, and it matters which experts a token goes to. Routers are random.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import rlft

BASE = Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"
EXPERTS, CHOSEN, NOISE = 4, 2, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    out = parser.parse_args().out
    torch.manual_seed(0)
    mixture().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(BASE / name, out)


def mixture() -> Qwen2MoeForCausalLM:
    """The embedded arithmetic model, a Qwen2, as a Qwen2-MoE, whose shared expert gives 0."""
    dense = AutoModelForCausalLM.from_pretrained(BASE)
    known, own = Qwen2MoeConfig().to_dict(), ("model_type", "architectures", "transformers_version")
    keys = {name: value for name, value in dense.config.to_dict().items() if name in known and name not in own}
    of_experts = {"moe_intermediate_size": dense.config.intermediate_size, "shared_expert_intermediate_size": 8}
    routing = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**keys, **of_experts, **routing))
    model.load_state_dict({n: t for n, t in dense.state_dict().items() if ".mlp." not in n}, strict=False)
    for sparse, layer in zip(model.model.layers, dense.model.layers, strict=True):
        mlp, block = layer.mlp, cast(Any, sparse).mlp
        block.experts.gate_up_proj.data = noisy(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        block.experts.down_proj.data = noisy(mlp.down_proj.weight)
        torch.nn.init.normal_(block.gate.weight, std=0.1)
        torch.nn.init.zeros_(block.shared_expert.down_proj.weight)
    return model


def noisy(weight: torch.Tensor) -> torch.Tensor:
    """`[experts, out, in]`: the matrix for each expert, with noise of its own."""
    return weight.detach() + NOISE * weight.std() * torch.randn(EXPERTS, *weight.shape)


if __name__ == "__main__":
    main()
