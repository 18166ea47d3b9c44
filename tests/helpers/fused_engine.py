"""An engine whose weights lie as vLLM's do on a GPU, on a CPU: q, k, v and gate, up in one tensor, padded embeddings,
linear layers inside `.base_layer`. It decodes by transformers on views of them, and lends them to the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from rlft.generation.engine import Engine, EngineArgs, Generator
from rlft.generation.shared_base import share
from rlft.types import Adapter, Completion, FinishReason, Group, Prompt, Rollout, Sampling

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
WRAPPED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj", "embed_tokens")


def fused(model: Any, *, pad_to: int = 64, wrapped: bool = True) -> nn.Module:
    """A module tree with copies of this model's weights, laid out as vLLM's, a tied head under both names."""
    own = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, parameter in own.items():
        layer = name.split(".")[-2]
        whole = next((whole for whole, layers in FUSED.items() if layer in layers), None)
        if whole is not None:
            parts = [own[name.replace(f".{layer}.", f".{sibling}.")] for sibling in FUSED[whole]]
            tensors[name.replace(f".{layer}.", f".{whole}.")] = torch.cat([part.data for part in parts])
        elif layer in ("embed_tokens", "lm_head"):
            padding = -len(parameter) % pad_to
            tensors[name] = torch.cat([parameter.data, parameter.new_zeros(padding, *parameter.shape[1:])])
        else:
            tensors[name] = parameter.data.clone()
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        if wrapped and path[-1] in WRAPPED:
            path.append("base_layer")
        _submodule(root, path).register_parameter(leaf, Parameter(tensor, requires_grad=False))
    if "lm_head.weight" not in tensors:
        [embeddings] = [p for n, p in root.named_parameters() if "embed_tokens" in n]
        _submodule(root, ["lm_head"]).register_parameter("weight", embeddings)
    return root


def _submodule(root: nn.Module, path: Sequence[str]) -> nn.Module:
    for name in path:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused(Engine):
    """lends: whether the trainer's base lies on its storage. spoils: it changes a number of it at its second load."""

    title: ClassVar[str] = "the fused engine"
    shared: ClassVar[bool] = True
    may_change: ClassVar[tuple[str, ...]] = ("lends",)

    lends: bool = True
    spoils: bool = False

    def base_sharing_obstacle(self, *, device: str, itemsize: int, quantized: bool) -> str | None:
        return None if self.lends else "lends is false"

    def open(self, args: EngineArgs) -> Any:
        return FusedGenerator(args, self.spoils)


class FusedGenerator(Generator):
    def __init__(self, args: EngineArgs, spoils: bool) -> None:
        base = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype))
        self.weights = fused(base)
        share(base.requires_grad_(False).eval(), self.weights, torch.device("cpu"))
        self.base, self.model, self.spoils = base, None, spoils
        self.version: int | None = None

    def adopt(self, model: nn.Module, device: torch.device) -> None:
        self.shared_base = share(model, self.weights, device)

    def load(self, adapter: Adapter) -> None:
        if self.model is None:
            config: Mapping[str, Any] = adapter.config
            self.model = PeftModel(self.base, LoraConfig(**{**config, "inference_mode": True}), adapter_name="engine")
        set_peft_model_state_dict(self.model, dict(adapter.weights), adapter_name="engine")
        self.version = adapter.version
        if self.spoils and adapter.version:
            next(self.weights.parameters()).view(-1)[0] += 1
        self._check()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        groups = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            rollouts = [self._rollout(prompt, seed + i, sampling) for i in range(n)]
            groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
        self._check()
        return groups

    @torch.no_grad()
    def _rollout(self, prompt: Prompt, seed: int, sampling: Sampling) -> Rollout:
        draw, ids, logprobs = torch.Generator().manual_seed(seed), list(prompt.token_ids), []
        for _ in range(sampling.max_tokens):
            scores = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=draw)))
            logprobs.append(float(scores[ids[-1]]))
        text = "<think>so</think><answer>1</answer>" if sum(ids) % 2 else "?"
        said, reason = tuple(ids[len(prompt.token_ids) :]), FinishReason.length
        completion = Completion(text=text, token_ids=said, logprobs=tuple(logprobs), finish_reason=reason)
        return Rollout(prompt=prompt, completion=completion, policy_version=self.version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return logprobs_of(self.model, sequences)

    def sleep(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.shared_base is not None:
            self.shared_base.check_addresses()

    def close(self) -> None:
        if self.shared_base is not None:
            self.shared_base.release()


@torch.no_grad()
def logprobs_of(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probs of every token but the first, each sequence by itself in the model's own forward."""
    rows = []
    for ids in sequences:
        tokens = torch.tensor([list(ids)])
        logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
        rows.append(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return rows
