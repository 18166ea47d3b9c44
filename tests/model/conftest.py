"""Small random models of many architectures, and the plainest forward there is to hold the others to."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import flash_stand_in
import pytest
import torch
from attention_families import SIZES
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from rlft.config.model import KernelChoice
from rlft.generation.sending import AdapterFiles
from rlft.model import forward
from rlft.model.kernels import attention, decoder_layer, elementwise, flash_attention, lora_linear, selection
from rlft.model.packing import pack
from rlft.model.text_model import causal_class


@pytest.fixture
def head_calls(monkeypatch):
    """Grows by the number of hidden states each time that the packed forward asks for log-probs through the LM head."""
    calls = []
    plain = forward.head_logprobs

    def counted(head, hidden, *rest):
        calls.append(len(hidden))
        return plain(head, hidden, *rest)

    monkeypatch.setattr(forward, "head_logprobs", counted)
    return calls


@pytest.fixture
def stand_in():
    """CUDA's flash attention on a CPU."""
    library = flash_stand_in.install()
    flash_stand_in.CALLS.clear()
    yield
    library._destroy()


@pytest.fixture
def gpu(monkeypatch, stand_in):
    """Everything that asks for a CUDA GPU gets yes; counts the branches that are computed as one function."""
    monkeypatch.setattr(flash_attention, "takes", lambda *_, **__: True)
    monkeypatch.setattr(elementwise, "serves", lambda x: True)
    monkeypatch.setattr(forward, "pack", lambda batch, **_: pack(batch, prompts_first=True))
    calls = Counter()

    def counted(name, branch, *args):
        calls[name] += 1
        return branch(*args)

    for name in ("attention_branch", "mlp_branch", "decoded_attention", "decoded_mlp"):
        branch = partial(counted, name.removesuffix("_branch"), getattr(decoder_layer, name))
        monkeypatch.setattr(decoder_layer, name, branch)
    return calls


EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def entering():
    """[(rows, width)] of everything that goes through a model inside."""

    @contextmanager
    def note(model):
        seen = []
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
        yield seen
        hook.remove()

    return note


SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
FULL = {"layer_types": ["full_attention"] * 3}
CAPPED = {"head_dim": 16, "attn_logit_softcapping": 0.5}
MODELS = {
    **{kind: {} for kind in ("llama", "qwen2", "phi3", "olmo2", "falcon", "diffllama", "doge")},
    "llama_one_kv_head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2_window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen3": {"head_dim": 16},
    "qwen3_vl": {"head_dim": 8, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
    "smollm3": {"no_rope_layers": [1, 0, 1]} | FULL,
    "gemma": {"head_dim": 16},
    "gemma2": CAPPED | {"final_logit_softcapping": 2.0, "sliding_window": 4},
    "gemma2_full": CAPPED | FULL,
    "mistral": {"sliding_window": None},
    "mistral_window": {"sliding_window": 4},
    "mixtral": {"sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "starcoder2": {"sliding_window": None},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 48},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "gpt2": {
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 128,
    },
}  # fmt: skip
"""{kind: fields of its config}, of the type of models that the kind begins with."""


@pytest.fixture(scope="session")
def random_model():
    """Builds a random, frozen model with the attention that `load_backbone` would give it."""

    def build(kind, dtype=torch.float32, **keys):
        named = kind.removesuffix("_one_kv_head").removesuffix("_window").removesuffix("_full")
        model_type = f"{named}_text" if named.endswith("_vl") else named
        config = AutoConfig.for_model(model_type, **SIZES | MODELS[kind] | keys)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = causal_class(config)
            model = made._from_config(config, dtype=dtype)
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases, so that none of them is a bystander
                    parameter.data += 0.1 * torch.randn_like(parameter)
        attention.install(model)
        return model.requires_grad_(False).eval()

    return build


@pytest.fixture(scope="session")
def random_moe():
    """Builds a random, frozen model of this type with these fields, as transformers computes it."""

    def build(kind, keys, device="cpu"):
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **SIZES | {"head_dim": 8, "num_hidden_layers": 2} | dict(keys))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if "experts" in name and parameter.dim() > 1:
                    parameter.data = 0.2 * torch.randn_like(parameter)
        return model.requires_grad_(False).eval()

    return build


@pytest.fixture(scope="session")
def with_lora():
    """Puts an adapter that does something on these layers of a model, in PEFT's or our own; returns its parameters."""

    def wrap(model, targets="all-linear", *, ours=False, **settings):
        scaled = {"r": 2, "lora_alpha": 6 if ours else 2, "target_modules": targets}
        config = LoraConfig(**scaled, init_lora_weights=False, **settings)
        if ours:
            lora_linear.install(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=not ours).eval()
        return [p for p in wrapped.parameters() if p.requires_grad]

    return wrap


@pytest.fixture
def on_base(backbone):
    """Makes a backbone of a model, as `read_backbone` leaves it with these kernels."""

    def make(model, choice=KernelChoice.auto):
        kernels = selection.install(model, choice, own_attention=True)
        return replace(backbone, model=model, path="none", kernels=kernels)

    return make


@pytest.fixture
def written(tmp_path):
    """Writes a published adapter into a folder, as for an engine."""
    files = AdapterFiles(tmp_path)
    yield files.write
    files.close()


@pytest.fixture
def adapter(make_roles, written):
    """(an adapter's folder as another run leaves it, its weights)."""
    roles = make_roles(noise=0.05, seed=5)
    published = roles.publish(3)
    roles.close()
    return str(written(published)), dict(published.weights)


@pytest.fixture
def nobody():
    """Of four rows those with zero gradient."""
    return torch.zeros(4, dtype=torch.bool)


@pytest.fixture(scope="session")
def weighted():
    """A loss in which every token has its own weight, so that no error can cancel another."""

    def loss(*values):
        dice = torch.Generator().manual_seed(3)
        return torch.stack([(torch.randn(v.shape, generator=dice).to(v) * v).sum() for v in values]).sum()

    return loss


@pytest.fixture(scope="session")
def plain():
    """(log-probs, entropy, values if there is a head for them) `[B, T]`, a row at a time: no padding, no packing, eager
    attention, no chunks."""

    def forward(model, batch, temperature=1.0, head=None):
        mine = model.config._attn_implementation
        if model._can_set_attn_implementation():
            model.set_attn_implementation("eager")
        rows = []
        for ids, real, mask in zip(batch.token_ids, batch.attention_mask, batch.loss_mask, strict=True):
            logits = model(input_ids=ids[real][None], use_cache=False).logits[0, :-1] / temperature
            log_p = logits.log_softmax(-1)
            row = [log_p.gather(-1, ids[real][1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
            if head is not None:
                row.append(head(model.base_model(input_ids=ids[real][None], use_cache=False).last_hidden_state[0])[:-1])
            rows.append(torch.nn.functional.pad(torch.stack(row), (1, len(ids) - int(real.sum()))) * mask)
        if model._can_set_attn_implementation():
            model.set_attn_implementation(mine)
        return tuple(torch.stack(rows, 1))

    return forward


@pytest.fixture(scope="session")
def awkward_batch(make_batch):
    """Three groups of unlike lengths: masked tokens inside a completion, an empty completion, a row alone."""
    one, two, three = [3, 17, 5, 99, 42, 8], [11, 4], [7, 7, 7, 23]
    return make_batch([
        (5, one, [9, 30, 31, 2]), (5, one, [9, 30, -55, -56, 57, 58, 59, 2]), (2, two, []), (5, one, [61]),
        (2, two, [70, 71, 72]), (9, three, [80, 81, 82, 83, 84, 85, 86, 87, 88]),
    ])  # fmt: skip


@pytest.fixture
def tree_batch(make_batch):
    """(rows with branches, the same as linear rows written by hand, of each linear row the own columns in the first).

    Branches leave their trunk, another branch, and the prompt before its end; one begins with a sampled token, and
    siblings read the same places.
    """
    one, two = [3, 17, 5, 99, 42, 8], [11, 4, 6, 7]
    trees = make_batch([
        (5, one, [9, 30, 31, 2, -55, 56, 57, -60, 61, -62, -63, 64]), (5, one, [9, 30, -55, 56, 70, -71, 72, -73, 74]),
        (5, one, [61]), (2, two, [70, 71, 72, -80, 81]),
    ])  # fmt: skip
    width = trees.token_ids.shape[1]
    previous = torch.arange(-1, width - 1).repeat(4, 1)
    for row, column, before in ((0, 10, 7), (0, 13, 5), (0, 15, 3), (1, 10, 6), (1, 13, 10), (3, 7, 4)):
        previous[row, column] = before
    linear = [
        ((5, one, [9, 30, 31, 2]), 0, 6, 6), ((5, one, [-9, -30, -55, 56, 57]), 0, 10, 8),
        ((5, one, [-60, 61]), 0, 13, 6), ((5, one[:4], [-62, -63, 64]), 0, 15, 4),
        ((5, one, [9, 30, -55, 56]), 1, 6, 6), ((5, one, [-9, 70, -71, 72]), 1, 10, 7),
        ((5, one, [-9, -70, -73, 74]), 1, 13, 8), ((5, one, [61]), 2, 6, 6),
        ((2, two, [70, 71, 72]), 3, 4, 4), ((2, two, [-70, -80, 81]), 3, 7, 5),
    ]  # fmt: skip
    paths = make_batch([row for row, _, _, _ in linear])
    own = [
        [(b, column + k - depth) for k in range(depth, len(prompt) + len(completion))]
        for (_, prompt, completion), b, column, depth in linear
    ]
    return replace(trees, previous=previous), paths, own
