"""Planned and counted bytes of updates on the pretended card, of models wide enough that each part matters.

Products give zeros here (`Counts.hollow`): only shapes count.
"""

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import four_bits
import vision_folders
from card_updates import rollouts
from pretended_card import COUNTS, KINDS
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlft.batch import collate
from rlft.commands.doctor.work import Size, Workload, make_model, write_prompts
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.memory import MemoryPart, When
from rlft.loop.parts import Engines, load_teacher, open_roles, open_trainer
from rlft.loop.supervised import open_demonstrations
from rlft.model.backbone import load_backbone
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import on_a_gpu, sizes_of
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.ranks import LaneShare

HIDDEN, LAYERS, PROMPTS, GROUP = 256, 4, 8, 4
"""Sizes of the models, which are Qwen2-shaped unless a case says otherwise, and of a step."""
TRAIN = (
    "steps=1 generation=transformers eval.every=0 data=jsonl data.held_out_fraction=0.1 prompts.style=raw"
    " scoring.workers=0"
)
SFT = "demonstrations=jsonl demonstrations.held_out_fraction=0.1 examples_per_step=16 prompts.style=raw steps=1"
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 384}
OF_64: dict[str, Any] = {"head_dim": 64, "intermediate_size": 768}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "block_ff_dim": 768,
    "block_auto_adjust_ff_dim": False,
}


class Case:
    """words: beside the usual ones. size: of Qwen2-shaped models, else HIDDEN, with so many layers and this vocabulary.
    rows: prompts, and completions of each. kind: of transformers' models, with fields of its config."""

    def __init__(
        self, words: str = "", *, dtype: str = "bfloat16", vocabulary: int = 4096, prompt: int = 64,
        completion: int = 64, command: str = "train", kind: str = "qwen2",
        layers: int = LAYERS, size: Size | None = None, rows: tuple[int, int] = (PROMPTS, GROUP), **fields: Any,
    ) -> None:  # fmt: skip
        self.words, self.dtype, self.command, self.rows = words, dtype, command, rows
        self.prompt, self.completion, self.kind, self.fields = prompt, completion, kind, fields
        usual = Size(hidden=HIDDEN, layers=layers, heads=4, key_heads=2, intermediate=768, vocabulary=vocabulary)
        self.size = usual if size is None else size


CASES = {
    "bfloat16": Case(),
    "49k tokens": Case(vocabulary=49152),
    "checkpointing": Case("model.gradient_checkpointing=true"),
    "a critic's adapter": Case("algorithm=ppo critic.kind=adapter"),
    "a teacher": Case("algorithm=opd algorithm.reward_coef=1 snapshot.teacher=MODEL"),
    "float32": Case(dtype="float32"),
    "151k tokens": Case(vocabulary=151936),
    "long completions": Case(prompt=32, completion=512),
    "a reference and an entropy": Case("snapshot.reference=copy algorithm.kl_coef=0.05 algorithm.entropy_coef=0.01"),
    "an exact KL": Case("algorithm.kl_estimator=exact snapshot.reference=base algorithm.kl_coef=0.1", vocabulary=49152),
    "an exact KL to old": Case(
        "algorithm=ppo_penalty algorithm.kl_estimator=exact snapshot.old=copy epochs=2 critic.kind=adapter",
        vocabulary=49152,
    ),
    "an exact KL in padded rows": Case(
        "algorithm.kl_estimator=exact snapshot.reference=copy algorithm.kl_coef=0.1 model.kernels=plain"
    ),
    "dora": Case("lora.use_dora=true"),
    "dropout": Case("lora.dropout=0.1"),
    "demonstrations": Case(SFT, command="sft"),
    "a whole model": Case(f"{SFT} lora=null", command="sft", dtype="float32"),
    "all weights and a copy": Case(
        "lora=null snapshot.reference=copy algorithm.kl_coef=0.05 algorithm.entropy_coef=0.01", dtype="float32"
    ),
    "all weights and a critic": Case("lora=null algorithm=ppo critic.kind=shared", dtype="float32"),
    "a padded model": Case("model.kernels=plain"),
    "4 bits": Case("model.quantization=4bit"),
    "4 bits, checkpointing": Case("model.quantization=4bit model.gradient_checkpointing=true"),
    "experts": Case(kind="olmoe", **MOE),
    "short convolutions": Case(kind="lfm2", **CONVOLUTIONS),
    "norms over heads": Case(kind="qwen3", **OF_64),
    "a gelu": Case(kind="gemma", **OF_64),
    "four norms and caps": Case(kind="gemma2", **OF_64),
    "four norms, and others over heads": Case(kind="gemma3_text", **OF_64),
    "norms behind branches": Case(kind="olmo2", intermediate_size=768),
    "norms behind branches, a small vocabulary": Case(kind="olmo2", intermediate_size=768, vocabulary=320),
    "one layer for queries, keys and values": Case(kind="phi3", intermediate_size=768),
    "an MLP without a gate": Case(kind="starcoder2", intermediate_size=768),
    "an activation of which its result alone is kept": Case(kind="opt", ffn_dim=768, word_embed_proj_dim=256),
}
NARROW = Size(hidden=96, layers=4, heads=12, key_heads=2, intermediate=560, vocabulary=4748)
"""A sixteenth of Qwen2.5-1.5B in width, with a small vocabulary and fewer of its 28 layers."""
LONG = {
    f"{how}, a row of {tokens}": Case(
        f"model.gradient_checkpointing={how} token_budget={tokens}", size=replace(NARROW, layers=layers), rows=(1, 2),
        prompt=256, completion=tokens - 256,
    )
    for tokens, layers in ((8192, 4), (32768, 8))
    for how in ("true", "tiles", "offload")
}  # fmt: skip
OF_1_5B = Size(hidden=1536, layers=2, heads=12, key_heads=2, intermediate=8960, vocabulary=4096)
SHARED = "cluster.ranks=2 cluster.sequence_ranks=2"
CASES |= LONG | {
    "heads of 128, a row of 8192": Case(
        "model.gradient_checkpointing=tiles token_budget=8192", size=OF_1_5B, rows=(1, 2), prompt=256, completion=7936
    ),
    "two ranks share tokens": Case(SHARED),
    "two ranks share a row of 8192": Case(
        f"model.gradient_checkpointing=tiles token_budget=8192 {SHARED}",
        size=NARROW, rows=(1, 2), prompt=256, completion=7936,
    ),
}  # fmt: skip
QUICK = "a critic's adapter", "all weights and a copy", "offload, a row of 8192", "an exact KL in padded rows"


def main(*names: str) -> dict[str, Any]:
    """{case: [planned bytes of always and of an update by part, counted bytes]}"""
    with tempfile.TemporaryDirectory() as folder, four_bits.stand_in():
        return {name: planned_and_counted(CASES[name], Path(folder)) for name in names}


def planned_and_counted(case: Case, folder: Path) -> list[Any]:
    load_backbone.cache_clear()
    gc.collect()
    before = COUNTS.live
    plan = planned(case, folder)
    of_updates = of_an_update(parts_of(plan))
    with updates(plan, case) as update:
        for _ in range(2):  # the second one finds the optimizer's moments
            COUNTS.peak = COUNTS.live
            update()
    return [{part.name: part.bytes for part in of_updates}, COUNTS.peak - before]


def planned(case: Case, folder: Path) -> Any:
    model = model_folder(case, folder)
    prompts, group = case.rows
    work = Workload(prompts=prompts, prompt_tokens=case.prompt, completion_tokens=case.completion)
    data = write_prompts(folder / f"{case.prompt}.jsonl", work, 2)
    answered = [json.loads(line) | {"completion": "a" * case.completion} for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row) + "\n" for row in answered))
    words = f"{TRAIN if case.command == 'train' else ''} {case.words}".replace("MODEL", str(model)).split()
    if case.command == "train":
        words += [f"data.path={data}", f"generation.max_tokens={case.completion}"]
        words += [f"prompts_per_step={prompts}", f"group_size={group}"]
    else:
        words += [f"demonstrations.path={data}", f"max_completion_tokens={case.completion + 8}"]
    words += [f"model.path={model}", f"model.dtype={case.dtype}", "console=null"]
    words.append(f"model.device={KINDS[os.environ.get('RLFT_CARD', 'cuda')].type}")
    if "lora=null" not in case.words:
        words += ["lora.rank=16", *(["lora.dropout=0"] if "dropout" not in case.words else [])]
    if "checkpointing" not in case.words:
        words.append("model.gradient_checkpointing=false")
    if "token_budget" not in case.words:
        words.append("token_budget=4096")
    return resolve(
        compose([f"prompts.max_tokens={case.prompt + 8 * (case.command == 'sft')}", *words], command=case.command)
    ).plan()


WIDE = {"hidden_size": HIDDEN, "intermediate_size": 768}
TOWER = {"hidden_size": 192, "intermediate_size": 512}


def planned_with_images(kind: str, folder: Path, completion: int) -> Any:
    heads = {"num_attention_heads": 16} if kind == "qwen2_5_vl" else {"head_dim": 64}
    vision_folders.folder_of(folder, kind, WIDE | heads, TOWER)
    words = [
        "+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", f"model.path={folder}", "model.dtype=bfloat16",
        "model.device=cuda", "model.gradient_checkpointing=false", "prompts.max_tokens=128", "token_budget=4096",
        f"prompts_per_step={PROMPTS}", f"group_size={GROUP}", "eval.every=0", f"generation.max_tokens={completion}",
        "generation=transformers", "lora.dropout=0", "lora.rank=16", "console=null", "steps=1", "scoring.workers=0",
    ]  # fmt: skip
    return resolve(compose(words)).plan()


def images(kind: str) -> dict[str, Any]:
    """{of an update with an image in each prompt, of reading an image: [planned bytes by part, counted bytes]}"""
    with tempfile.TemporaryDirectory() as name:
        load_backbone.cache_clear()
        case, before = Case(), COUNTS.live
        plan = planned_with_images(kind, Path(name) / "model", case.completion)
        planned = parts_of(plan)
        with updates(plan, case) as update:
            for _ in range(2):
                COUNTS.peak = COUNTS.live
                update()
            of_update = COUNTS.peak - before
            encoder: Any = load_backbone(plan.config.model).images
            encoder._kept.clear()
            encoder._tower = None
            gc.collect()
            others = COUNTS.peak = COUNTS.live
            encoder._encode(plan.train_prompts.longest().images[0])
            of_reading = COUNTS.peak - others
    return {
        "update": [{part.name: part.bytes for part in of_an_update(planned)}, of_update],
        "reading": [
            {part.name: part.bytes for part in planned if part.name == "vision tower" or part.when is When.reading},
            of_reading,
        ],
    }


def parts_of(plan: Any) -> list[MemoryPart]:
    """The parts on the card of a run that samples nothing."""
    model = sizes_of(plan.config.model, plan.config.lora)
    demand = plan.demand(model, plan.config.model.gradient_checkpointing)
    assert demand is not None
    demand = replace(on_a_gpu(demand, plan, 0, absent=False), engine=None)
    return [part for part in parts(model, demand, 0) if part.bytes]


def of_an_update(found: list[MemoryPart]) -> list[MemoryPart]:
    return [part for part in found if part.when in (When.always, When.updating)]


def model_folder(case: Case, folder: Path) -> Path:
    size = case.size
    usual = make_model(folder / f"qwen2-{'-'.join(str(number) for number in astuple(size))}", size, "float32")
    if case.command == "sft":  # what is learned there ends
        AutoTokenizer.from_pretrained(usual, eos_token="<|endoftext|>").save_pretrained(usual)
    if case.kind == "qwen2":
        return usual
    own = folder / case.kind
    config = AutoConfig.for_model(
        case.kind, vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, **case.fields,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(own)
    AutoTokenizer.from_pretrained(usual).save_pretrained(own)
    return own


class Nobody:
    """The exchange with ranks of which nothing but zeros comes."""

    def all_to_all(self, sent: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        return sent.new_zeros(sum(arriving))

    def add_up(self, tensor: Tensor) -> None:
        pass

    def broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.zero_()


@contextmanager
def updates(plan: Any, case: Case) -> Iterator[Any]:
    """What makes an update of the longest rows on the card."""
    with ExitStack() as stack:
        if case.command == "sft":
            task = open_demonstrations(plan, stack.enter_context(Engines()), stack, print)
            optimizer = Optimizer(task.parameters(), plan.config.trainer)

            def update() -> None:
                with hollow():
                    task.backward(0)
                    optimizer.update(1e-5)

            yield update
            return
        config = plan.config
        roles = stack.enter_context(open_roles(config, load_teacher(config.snapshot, config.model)))
        trainer, cluster = open_trainer(plan, roles), config.cluster
        if cluster.sequence_ranks > 1:
            exchange: Any = Nobody()
            trainer.share = LaneShare(ranks=cluster.ranks, sequence=cluster.sequence_ranks, exchange=exchange)
        groups, scores = rollouts(plan, case.completion)
        batch = roles.backbone.collated(groups, scores)
        nobody = plan.algorithm.zero_gradient_rows(batch)

        def step() -> None:
            with hollow():
                trainer.update(plan.algorithm, plan.algorithm.credit(trainer.annotate(batch, nobody)), nobody, 0)

        yield step


@contextmanager
def hollow() -> Iterator[None]:
    COUNTS.hollow = True
    try:
        yield
    finally:
        COUNTS.hollow = False


def launches() -> dict[str, Any]:
    """Launches of a layer in the forward and backward of a micro-batch, and their lines."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (of_layers(number, Path(folder)) for number in (2, 4))
    update = [(many[name] - few[name]) / 2 for name in many]
    lines = {name: (many[name] - few[name]) / 2 for name in many if many[name] > few[name]}
    return {"update": sum(update), "lines": lines}


def of_layers(number: int, folder: Path) -> Counter[str]:
    """Launches of the passes of one more micro-batch."""
    load_backbone.cache_clear()
    case = Case(layers=number, completion=8, prompt=16)
    plan = planned(case, folder)
    with open_roles(plan.config, None) as roles:
        trainer = open_trainer(plan, roles)
        groups, scores = rollouts(plan, case.completion)
        batch = collate(groups, scores, roles.backbone.decode)
        nobody = plan.algorithm.zero_gradient_rows(batch)
        batch = plan.algorithm.credit(trainer.annotate(batch, nobody))
        counted = []
        for micro_batches in (2, 2, 4):  # the first one warms up
            roles.token_budget = roles.forward.network_tokens(batch) // micro_batches
            COUNTS.clear()
            COUNTS.by_line = True
            with hollow():
                trainer.update(plan.algorithm, batch, nobody, 0)
            COUNTS.by_line = False
            counted.append(COUNTS.launches)
    return Counter({name: (counted[2][name] - counted[1][name]) / 2 for name in counted[2]})
