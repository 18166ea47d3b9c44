"""What tests all over the tree share: the embedded model, roles on it, typed configs, and batches from token lists."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_folders
import pytest
import torch
from run_processes import Nursery
from transformers import AutoModelForCausalLM, GPT2Config

import rlft
from rlft.config.compose import compose
from rlft.config.model import CriticConfig, CriticKind, LoraSettings, Old, RoutingSource, SnapshotConfig
from rlft.config.resolved import build
from rlft.data import reasoning_gym
from rlft.model.backbone import Backbone, load_backbone
from rlft.model.kernels import attention
from rlft.model.roles import Roles
from rlft.types import Batch, Prompt

pytest_plugins = ("done_once", "saved_runs")

collect_ignore = ["cuda"]
"""Its tests need a GPU: `make test-cuda` names that folder, and then it is collected."""

# The models here are so small that a second thread only gets in the way, most of all on a machine that has other work.
THREADS = int(os.environ.get("RLFT_TEST_THREADS", "1"))
torch.set_num_threads(THREADS)

# A shell starts what runs in the background with these ignored, which all processes that tests start would inherit.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


SLOWEST = {"whole_runs", "pretended_card", "vllm", "audit"}


def pytest_collection_modifyitems(items):
    """Refuses names that differ from process to process, and puts the folders of the slowest tests first."""
    for item in items:
        if " at 0x" in item.nodeid:  # pytest-xdist runs nothing when two of its workers see different names
            raise pytest.UsageError(f"{item.nodeid}: the name holds an address; give parametrize its ids")
    items.sort(key=lambda item: SLOWEST.isdisjoint(item.path.parts))


@pytest.fixture(scope="session", autouse=True)
def trackio_folder(tmp_path_factory):
    """The folder of trackio's databases, which it reads from the environment when anything, such as TRL, imports it."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


Row = tuple[int, Sequence[int], Sequence[int]]
"""(group, prompt ids, completion ids); a negative completion id is that token with its loss mask off."""


@pytest.fixture(scope="session")
def forks():
    """Runs `rlft` in processes of their own, forked from one that has imported torch: each import takes seconds."""
    nursery = Nursery(hash_seed=1, threads=THREADS)
    yield nursery
    nursery.close()


@pytest.fixture
def gym_here(monkeypatch):
    """Makes reasoning-gym's questions in this process: a process of their own imports the library for two seconds."""

    def make(task: str, options: str, *numbers: int) -> Any:
        return reasoning_gym.draw(task, json.loads(options), *numbers)

    monkeypatch.setattr(reasoning_gym, "make", make)


@pytest.fixture
def group():
    """Makes a group: `group(texts, answer="18", id="p0")`."""
    from reward_groups import make_group

    return make_group


@pytest.fixture(scope="session")
def tiny_path():
    """The folder of the embedded model."""
    return Path(rlft.__file__).parent / "assets" / "tiny-arithmetic"


@pytest.fixture(scope="session")
def half_folder(tmp_path_factory):
    """The folder of the embedded model with half of its layers."""
    return model_folders.of_half_its_layers(tmp_path_factory.mktemp("model") / "half")


@pytest.fixture(scope="session")
def long_context_path(tmp_path_factory, tiny_path):
    """The embedded model with the context that GSM8K's recipes ask for (rotary positions need no new weights)."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="session")
def model_config():
    """Builds the config of the embedded model in float32 on the CPU, with some keys changed."""

    embedded = replace(model_folders.settings(Path()), path="embedded:tiny-arithmetic")
    return lambda **keys: replace(embedded, **keys)


@pytest.fixture(scope="session")
def backbone(model_config):
    """The embedded model, loaded once. Tests leave it as they found it."""
    return load_backbone(model_config())


@pytest.fixture
def make_roles(backbone):
    """Builds roles on the embedded model (or another `backbone`) in place of those built before; takes them off again.

    `noise` is the standard deviation of what is added to the policy's weights: a fresh LoRA changes nothing.
    `teacher_forward` is that of a teacher with a separate model.
    """
    opened: list[Roles] = []

    def make(noise: float = 0.0, **keys: Any) -> Roles:
        lora: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear", "path": None}
        lora |= {"use_rslora": False, "use_dora": False, "experts": False, "router": False}
        snapshot: dict[str, Any] = {"reference": "none", "refresh_every": 0, "ema_decay": None, "old": Old.auto}
        snapshot |= {"routing": RoutingSource.free, "teacher": "none", "teacher_hint": None}
        critic = {"kind": CriticKind.none, "init": "base", "lr": 1e-3, "warmup_steps": 0, "normalize_values": False}
        others = {"backbone": backbone, "temperature": 1.0, "token_budget": 10**6, "seed": 0}
        own_teacher = {"teacher": keys.pop("teacher_forward", None)}
        for group in (lora, snapshot, critic, others):
            group.update({name: keys.pop(name) for name in list(keys) if name in group})
        assert not keys
        while opened:
            opened.pop().close()
        sections = {"snapshot": SnapshotConfig(**snapshot), "critic": CriticConfig(**critic)}
        roles = Roles(lora=LoraSettings(**lora), **sections, **others, **own_teacher)
        opened.append(roles)
        generator = torch.Generator().manual_seed(1)
        for _, parameter in roles.named_parameters():
            added = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data += noise * added.to(parameter.device)
        return roles

    yield make
    for roles in opened:
        roles.close()


@pytest.fixture(scope="session")
def make_double(backbone):
    """Builds a random model that computes in float64 throughout: transformers does nothing of GPT-2 in float32."""

    def make() -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sizes = GPT2Config(
                vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
                attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float64).eval().requires_grad_(False)
        attention.install(model)
        return Backbone(model=model, tokenizer=backbone.tokenizer, device=torch.device("cpu"), path="none")

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Builds a Batch from rows `(group, prompt ids, completion ids)`; see `Row`."""

    def build_batch(rows: Sequence[Row], rewards: Sequence[float] | None = None, dtype: Any = torch.float32) -> Batch:
        shape = len(rows), max(len(prompt) + len(completion) for _, prompt, completion in rows)
        token_ids = torch.zeros(shape, dtype=torch.int64)
        attention_mask, loss_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for b, (_, prompt, completion) in enumerate(rows):
            ids = torch.tensor([*prompt, *completion], dtype=torch.int64)
            token_ids[b, : len(ids)] = ids.abs()
            attention_mask[b, : len(ids)] = True
            loss_mask[b, : len(ids)] = ids > 0
            loss_mask[b, : len(prompt)] = False
        return Batch(
            token_ids=token_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            sampled_logprobs=torch.where(loss_mask, -1.0, 0.0).to(dtype),
            rewards=torch.zeros(len(rows)) if rewards is None else torch.tensor(rewards),
            group_ids=torch.tensor([group for group, _, _ in rows]),
        )

    return build_batch


@pytest.fixture(scope="session")
def make_prompt(backbone):
    """Builds a tokenised prompt of the embedded model from a question."""

    def build_prompt(question: str, answer: str = "0") -> Prompt:
        messages = ({"role": "user", "content": question},)
        ids = backbone.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return Prompt(id=question, messages=messages, answer=answer, token_ids=tuple(ids))

    return build_prompt


@pytest.fixture(scope="session")
def run_config():
    """Builds the typed config that command-line overrides give."""
    return lambda *overrides: build(compose(list(overrides)))
