"""Prompts with images: the trainer's log-probs are those of the folder's own class, and the engine decodes them."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import flash_stand_in
import pytest
import torch
import vision_folders
from given_drafts import GivenDrafts, anything
from model_folders import settings, with_noise
from peft import PeftModel
from safetensors.torch import load_file, save_file
from slow_cases import slow
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from rlft.config.model import LoraSettings
from rlft.generation.transformers import TransformersGenerator
from rlft.model.backbone import read_backbone
from rlft.model.forward import packed_forward, padded_forward
from rlft.model.images import ImageMasks
from rlft.model.kernels import flash_attention
from rlft.model.roles import policy_alone
from rlft.tokens.images import picture, processor_of
from rlft.types import IMAGE, Sampling, Scores, UserError
from tests.model.image_batches import of_two, prompts

LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear", path=None)
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "smolvlm", "gemma3", "gemma4")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a model of this kind."""
    top = tmp_path_factory.mktemp("models")
    return cache(lambda kind: vision_folders.folder_of(top / kind, kind))


@pytest.fixture
def roles_of(folder_of):
    """Builds a policy that says something on a model of this kind."""
    opened = []

    def build(kind):
        backbone = read_backbone(settings(folder_of(kind)))
        opened.append(with_noise(policy_alone(backbone, LORA, token_budget=4096, seed=0)))
        return opened[-1]

    yield build
    for roles in opened:
        roles.close()


@torch.no_grad()
def by_own_class(model, backbone, rollout):
    """(the prompt's tokens, the log-probs of the completion's) by transformers' own processor and model alone."""
    prompt, said = rollout.prompt, list(rollout.completion.token_ids)
    processor = processor_of(backbone.tokenizer)._processor
    pieces = prompt.messages[0]["content"].replace(IMAGE, f"\0{IMAGE}\0").split("\0")
    parts = [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces if piece]
    conversation = [{"role": "user", "content": parts}]
    text = backbone.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    images = [picture(image) for image in prompt.images] or None
    inputs = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    more = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    for types in {"token_type_ids", "mm_token_type_ids"} & more.keys():
        more[types] = torch.nn.functional.pad(more[types], (0, len(said)))
    logits = model(input_ids=torch.tensor([ids + said]), **more).logits[0]
    logp = logits[len(ids) - 1 : -1].log_softmax(-1)
    return ids, logp.gather(-1, torch.tensor(said)[:, None])[:, 0]


def quick(*kinds):
    return [kind if kind in kinds else slow(kind) for kind in KINDS]


@pytest.mark.parametrize("kind", quick("qwen3_vl", "smolvlm", "gemma3"))
def test_log_probs_are_those_of_the_folders_own_class_and_gradients_those_of_padded_rows(
    kind, roles_of, folder_of, written
):
    roles = roles_of(kind)
    backbone = roles.backbone
    assert roles.forward.packed, roles.forward.reason
    groups, batch = of_two(backbone)
    assert batch.images is not None
    packed = roles.forward.logprobs(batch, 4096)
    split = roles.forward.logprobs(batch, 40)  # a micro-batch for each row, with its own images
    with torch.no_grad():
        padded = padded_forward(backbone.model, batch, 1.0, False).logprobs
    without = roles.forward.logprobs(replace(batch, images=None), 4096)
    own = AutoModelForImageTextToText.from_pretrained(folder_of(kind), dtype=torch.float32)
    own = PeftModel.from_pretrained(own, str(written(roles.publish(1)))).eval()
    rollouts = [rollout for each in groups for rollout in each.rollouts]
    for b, rollout in enumerate(rollouts):
        ids, expected = by_own_class(own, backbone, rollout)
        assert ids == list(rollout.prompt.token_ids)
        for found in (packed, split, padded):
            # All compute in float32, with other kernels; seen: at most 2e-5.
            assert (found[b, len(ids) : len(ids) + len(expected)] - expected).abs().max() < 1e-4
        blind = (without[b, len(ids) : len(ids) + len(expected)] - expected).abs().max()
        assert blind > 0.1 if rollout.prompt.images else blind < 1e-4

    names, weights = zip(*roles.named_parameters(), strict=True)
    gradients = (
        torch.autograd.grad((forward(backbone.model, batch, 1.0, False).logprobs ** 2).sum(), weights)
        for forward in (packed_forward, padded_forward)
    )
    for name, one, other in zip(names, *gradients, strict=True):
        assert one.norm() > 0, name
        assert (one - other).norm() < 1e-4 * other.norm(), name  # seen: at most 2e-5


DECODERS = ("blocks", "flash calls", "transformers' cache")


@pytest.mark.parametrize(("kind", "decoder"), [
    ("qwen3_vl", "blocks"),
    *(("gemma3", decoder) for decoder in DECODERS[1:]),
    *(slow(kind, "blocks") for kind in KINDS if kind != "qwen3_vl"),
    *(slow("gemma4", decoder) for decoder in DECODERS[1:]),
])  # fmt: skip
def test_decoding_gives_the_log_probs_of_the_trainers_forward(kind, decoder, stand_in, roles_of, monkeypatch):
    roles = roles_of(kind)
    backbone = roles.backbone
    generator = TransformersGenerator(roles, backbone.tokenizer, CPU, 8, ends=[0])
    generator.load(roles.publish(1))
    asked = prompts(backbone)
    with monkeypatch.context() as patch:
        if decoder == "flash calls":
            patch.setattr(flash_attention, "takes", lambda *_, **__: True)
        if decoder == "transformers' cache":
            patch.setattr(type(roles), "prefix_cache", lambda *_: None)
        sampling = Sampling(max_tokens=12, temperature=1.0)
        groups = generator.sample(asked, 3, [10, 20, 30, 40], sampling)
        drafts = replace(sampling, drafts=GivenDrafts(anything(50)))
        for drafted, group in zip(generator.sample(asked, 3, [10, 20, 30, 40], drafts), groups, strict=True):
            for one, other in zip(drafted.rollouts, group.rollouts, strict=True):
                assert one.completion.token_ids == other.completion.token_ids
                assert one.completion.logprobs == pytest.approx(other.completion.logprobs, abs=1e-5, rel=1e-5)
    assert bool(flash_stand_in.CALLS) == (decoder == "flash calls")
    batch = backbone.collated(groups, Scores(total=torch.zeros(4, 3), by_reward={}))
    found = roles.forward.logprobs(batch, 4096)
    assert (found - batch.sampled_logprobs).abs()[batch.loss_mask].max() < 1e-4


def test_which_layers_read_images_both_ways_is_found_in_the_masks_of_the_own_class():
    def kinds(own, config):
        masks = ImageMasks.of(own, config)
        return None if masks is None else set(masks.kinds)

    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    gemma3 = Gemma3Config(text_config=layers)
    gemma4, small = (
        Gemma4Config(text_config={**layers, "use_bidirectional_attention": which}) for which in ("vision", None)
    )
    assert kinds(Gemma3ForConditionalGeneration, gemma3) == {"sliding_attention", "full_attention"}
    assert kinds(Gemma4ForConditionalGeneration, gemma4) == {"sliding_attention"}
    assert kinds(Gemma4ForConditionalGeneration, small) is None
    assert kinds(Qwen3VLForConditionalGeneration, Qwen3VLConfig()) is None
    with pytest.raises(UserError, match=r"^model\.path: the tokens of a paligemma see others than those before them"):
        kinds(PaliGemmaForConditionalGeneration, PaliGemmaConfig())


@pytest.mark.parametrize("kind", quick("gemma3"))
def test_the_tower_is_read_alone_and_whole(kind, folder_of, capfd):
    backbone = read_backbone(settings(folder_of(kind)))
    own = AutoModelForImageTextToText.from_pretrained(folder_of(kind), dtype=torch.float32)
    text = own.get_decoder()
    expected = {
        name: p for name, p in own.model.named_parameters() if all(p is not other for other in text.parameters())
    }
    prompt = prompts(backbone)[0]
    capfd.readouterr()
    backbone.images.rows_of([prompt], 200)
    assert "LOAD REPORT" not in capfd.readouterr().err
    found = dict(backbone.images._tower.named_parameters())
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_folder_without_the_weights_of_its_tower_is_refused(folder_of, tmp_path):
    folder = Path(shutil.copytree(folder_of("gemma3"), tmp_path / "gemma3"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "vision_tower" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    backbone = read_backbone(settings(folder))
    with pytest.raises(UserError, match=r"^model\.path: its files lack model\.vision_tower\."):
        backbone.image_rows(prompts(backbone)[:1], 200)
