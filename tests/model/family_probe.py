"""Tries what rlft does with a tiny random model of a family; write_families.py writes the results down."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from torch import Tensor

from rlft.batch import collate, score_sequences
from rlft.commands.export import weights as exported
from rlft.config.model import LoraSettings
from rlft.data.prompts import PromptSet
from rlft.generation.sending import AdapterFiles
from rlft.generation.transformers import TransformersGenerator, Weights
from rlft.loop.freshness import Limits, check_decoding
from rlft.model import backbone as backbones
from rlft.model.activations import peft_is_quiet
from rlft.model.adapter_folder import load_file, own_tensors
from rlft.model.backbone import Backbone, read_backbone, read_config
from rlft.model.experts import mixture_of, replay_obstacle
from rlft.model.families import Family
from rlft.model.lora_config import adapted_words
from rlft.model.roles import Roles, policy_alone
from rlft.plan.model_rules import check_targets
from rlft.plan.sizes import sizes_of
from rlft.types import Adapter, Batch, Prompt, Scores, UserError
from tests.helpers.model_folders import settings, with_noise
from tests.helpers.reward_groups import group_of
from tests.model.family_models import class_of, model_folder, tiny_config

WRONG_FORWARD = "log-probs are not those of transformers' model on one row at a time"
DECODES_OTHERWISE = "decoding in the transformers engine does not give the log-probs of its forward"
NO_CACHE = "decoding in the transformers engine needs a cache of transformers, which its class lacks"
FAILS_TO_DECODE = "decoding in the transformers engine fails"

LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear", path=None)
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""The largest difference of log-probs, in nats, between two float32 computations of one network."""

RUN = SimpleNamespace(
    generation=SimpleNamespace(max_tokens=20), prompts=SimpleNamespace(max_tokens=64), token_budget=256
)
PROMPTS = tuple(
    Prompt(id=str(p), messages=(), answer="", token_ids=tuple(8 + (11 * i + 7 * p) % 250 for i in range(length)))
    for p, length in enumerate((6, 20, 13))
)
DATA = PromptSet(prompts=list(PROMPTS), num_tokens=[len(p.token_ids) for p in PROMPTS], fingerprint="", notes=())


def rows() -> tuple[Batch, list[list[int]]]:
    """(two groups of two rows on both sides of the models' windows of 16 tokens, the token ids of each row)."""
    groups = []
    for p, (prompt, lengths) in enumerate(zip(PROMPTS, ((3, 9), (14, 5)), strict=False)):
        groups.append(group_of(prompt, [[8 + (13 * i + 5 * n + p) % 250 for i in range(n)] for n in lengths]))
    scores = Scores(total=torch.zeros(2, 2), by_reward={})
    ids = [[*r.prompt.token_ids, *r.completion.token_ids] for group in groups for r in group.rollouts]
    return collate(groups, scores, lambda ids: ""), ids


def probe(kind: str, folder: Path) -> Family:
    """What holds for this family; what rlft refuses by a rule has its words."""
    model = settings(folder)
    try:
        model_folder(kind, folder)
    except Exception as error:  # of the model's own code, which may raise anything
        try:
            tiny_config(kind).save_pretrained(folder)
            read_config(model)
        except UserError as refusal:
            return Family(refused=refusal.problem)
        except Exception:  # neither can its config be read: why the model cannot be made says more
            pass
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Family(untried=f"no tiny model of it can be made ({first[:80]})")
    # What is refused because an earlier probe failed is tried again.
    with patch.object(backbones, "recorded_family", lambda *types: Family()):
        try:
            config = read_config(model)
            check_targets(LORA, model, config)
            sizes_of(model, LORA)
            backbone = read_backbone(model)
            roles = policy_alone(backbone, LORA, token_budget=256, seed=0)
        except UserError as refusal:
            return Family(refused=refusal.problem)
        return _of_roles(folder, backbone, roles)


def _of_roles(folder: Path, backbone: Backbone, roles: Roles) -> Family:
    with_noise(roles)
    batch, ids = rows()
    with torch.no_grad():
        found = roles.forward.logprobs(batch, 64)
    adapter = roles.publish(1)
    not_reached = _without_gradient(roles, batch)
    decoding, routing = _decoding(backbone, roles, adapter), _routing(roles)
    adapted, others, _ = adapted_words(roles.model)
    forward = roles.forward
    roles.close()
    files = AdapterFiles(folder)
    path = files.write(adapter)
    expected, export = _reference(folder, path, ids, batch), _export(folder, path, backbone, ids, batch)
    wrong = WRONG_FORWARD if expected is not None and _gap(found, expected) > TOLERANCE else None
    return Family(
        wrong=f"no gradient reaches its {not_reached}" if not_reached else wrong, adapted=adapted, not_adapted=others,
        padded=None if forward.packed else forward.reason.removeprefix("padded rows: "), decoding=decoding,
        routing=routing, exported=export is not None and _gap(found, export) <= TOLERANCE,
    )  # fmt: skip


def _without_gradient(roles: Roles, batch: Batch) -> str | None:
    """A parameter that no gradient reaches in an update; None if there is none."""
    with roles.training():
        roles.outputs(batch, entropy=False).logprobs.sum().backward()
    return next((name for name, parameter in roles.named_parameters() if parameter.grad is None), None)


def _routing(roles: Roles) -> str | None:
    """Why no choice of experts can be imposed on the model; None if it can, or if there are none."""
    mixture = mixture_of(roles.backbone.model)
    has_experts = bool(mixture.stacked or mixture.linear)
    return (replay_obstacle(roles.backbone.model) or roles.routing.check()) if has_experts else None


def _decoding(backbone: Backbone, roles: Roles, adapter: Adapter) -> str | None:
    """What is wrong with decoding; None if nothing is."""
    engine = TransformersGenerator(roles, backbone.tokenizer, CPU, 16, weights=Weights.apart)
    engine.load(adapter)
    try:
        check_decoding(engine, roles, DATA, RUN, Limits(largest=TOLERANCE))
    except UserError as refusal:
        return DECODES_OTHERWISE if "log-probs" in refusal.problem else NO_CACHE
    except Exception:  # of the model's own code: that it fails is what is written down
        return FAILS_TO_DECODE
    return None


def _reference(folder: Path, adapter: Path, ids: Sequence[list[int]], batch: Batch) -> Tensor | None:
    """Log-probs `[B, T]` by transformers' eager model and PEFT, row by row; None if PEFT cannot load the adapter."""
    own = class_of(read_config(settings(folder)))
    model = own.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    try:
        with peft_is_quiet():
            adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    except ValueError:
        return None
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in own_tensors(adapted, "default").items():
        tensor.copy_(weights[name])
    return _one_by_one(adapted, ids, batch)


def _export(folder: Path, adapter: Path, backbone: Backbone, ids: Sequence[list[int]], batch: Batch) -> Tensor | None:
    """Log-probs `[B, T]` of the exported model; None if it cannot be exported."""
    model, merged, out = settings(folder), folder / "adapter", folder / "exported"
    try:
        merged.mkdir()
        exported.write_adapter(adapter, model, merged)
        whole, dtypes = exported.load_float32(model)
        whole = exported.merge(whole, backbone.tokenizer, merged)
        exported.round_weights(whole, dtypes, "auto")
        exported.save(whole, backbone.tokenizer, model, out)
        config = read_config(settings(out))
    except (exported.MergeError, ValueError, UserError):
        return None
    return _one_by_one(class_of(config).from_pretrained(out, dtype=torch.float32).eval(), ids, batch)


def _one_by_one(model: Any, ids: Sequence[list[int]], batch: Batch) -> Tensor:
    scores_BT = torch.zeros_like(batch.sampled_logprobs)
    with torch.no_grad():
        for b, row in enumerate(ids):
            scores_BT[b, 1 : len(row)] = torch.tensor(score_sequences(model, [row], CPU)[0])
    return scores_BT * batch.loss_mask


def _gap(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().nan_to_num(torch.inf).item()
