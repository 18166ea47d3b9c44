"""`rlft export`: writes a checkpoint of a run as a folder that transformers, PEFT and vLLM load.

The base is loaded again and merged in float32, each weight rounded once, so the run and its base stay unchanged. The
export is written to a temporary folder beside `out` and renamed when it is complete: a kill leaves no `out`.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.commands.arguments import of_a_run
from rlft.commands.export import gguf, push
from rlft.commands.launch import import_libraries
from rlft.config import compose as configs
from rlft.config.model import DTYPES
from rlft.config.resolved import AUTO
from rlft.runs import run_folder
from rlft.runs.checkpoint import set_usual_mode
from rlft.runs.find import CheckpointKind, NamedRun, check_base, find_checkpoint, kind_of_checkpoint
from rlft.system import interrupt, locks
from rlft.system.disk import blame_key, writing
from rlft.system.files import atomic_folder, size_of
from rlft.system.terminal import say
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlft.commands.export.push import Push
    from rlft.config.model import ModelConfig

USAGE = """\
usage: rlft export run=<run or checkpoint folder> out=<new folder> [as=model|adapter] [dtype=<dtype>]
                   [push=<user>/<name>] [private=true|false]

as=model     the adapter merged into a copy of its base, for transformers and vLLM (default)
as=adapter   the adapter and the tokenizer, for PEFT and vLLM's LoRA; a reward model's adapter with its head, for
             reward.learned.path
dtype=auto   of the model's weights: auto (the base's own), float32, bfloat16 or float16
push=<id>    uploads the folder as a model repository of the Hugging Face hub, with the token of `hf auth login`
private=true who may see a new repository: you and your organisation (true) or everybody (false)

A token that the hub refuses is a mistake (exit code 2), found before anything is computed. Offline, or without a
token, the folder is exported and not pushed: one line says what would be uploaded and by which command, and the exit
code is 1.
If the base has moved since, model.path=<folder> says where it is.
For llama.cpp, the command that converts the folder into a GGUF file is printed at the end.
  rlft export run=runs/grpo_arithmetic/<time> out=exports/mine
  rlft export run=runs/grpo_arithmetic/<time>/checkpoints/step_000020 out=exports/mine_adapter as=adapter
  rlft export run=runs/grpo_arithmetic/<time> out=exports/mine push=me/mine"""

WORDS = ("out", "as", "dtype")
"""Keys of the verb, in the order of the parameters of `prepare`."""
PUSH_WORDS = ("push", "private")
"""Keys of the verb, in the order of the parameters of `push.read_target`; all others are keys of the run's config."""
GGUF = "gguf"
GENERATION_CONFIG = "generation_config.json"
PROCESSORS = (
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Files of a model that also reads images, video or sound; vLLM does not load it without them."""
TEXT = "What is 17 + 25? The answer is 42, because 17 + 25 = 42."
"""The adapter and the merged model are compared on these tokens; any text would do."""
TOLERANCE = 1e-3
"""The largest allowed difference of log-probs, in nats: both models compute in float32 but add in different orders."""


def command(arguments: list[str]) -> None:
    """Exports a run's newest checkpoint, or a named one, and pushes it if push= is given."""
    words = [*WORDS, *PUSH_WORDS]
    if len(arguments) > 1 and "=" not in arguments[1] and not arguments[1].startswith(("-", "+", "~")):
        problem = "takes one run, and the folder to write is given as out=<folder>"
        raise UserError("export", problem, got=arguments[1], remedy=f"write out={arguments[1]}")
    parsed, source, changes = of_a_run(arguments, words)
    if source is None:
        problem = "is missing: there is nothing to export"
        raise UserError("run", problem, remedy="write run=runs/<name>/<time>")
    for key in (o.partition("=")[0] for o in changes if not o.startswith("model.")):
        close = difflib.get_close_matches(key, words, n=1)
        remedy = f"did you mean {close[0]}={parsed.value(key)}?" if close else "leave it out"
        raise UserError(key, "changes nothing of what was trained", remedy=remedy)
    config = configs.changed(source.config, changes, parsed.config_dir, source.config["verb"])
    out, kind, dtype = (parsed.value(word) for word in WORDS)
    target = push.read_target(*(parsed.value(word) for word in PUSH_WORDS))
    request = prepare(replace(source, config=config), out, kind, dtype, say)
    pushing = None
    if target is not None:
        request, pushing = replace(request, repo_id=target.repo_id), push.prepare_push(target)
    import_libraries()
    run(request, pushing, say)


class MergeError(RuntimeError):
    """The merged model does not compute what the adapter on its base does; nothing was written."""


class ExportKind(StrEnum):
    model = "model"
    adapter = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A validated export request.

    Attributes:
        source: the run.
        checkpoint: the folder of the checkpoint, which is undamaged.
        checkpoint_kind: what the checkpoint holds.
        kind: what is written.
        dtype: `auto`, or one of DTYPES.
        out: the folder to write.
        repo_id: the repository that the folder is pushed to, for the model card; None if it is not pushed.
    """

    source: NamedRun
    checkpoint: Path
    checkpoint_kind: CheckpointKind
    kind: ExportKind
    dtype: str
    out: Path
    repo_id: str | None = None


def prepare(
    source: NamedRun, out: str | None, kind: str | None, dtype: str | None, say: Callable[[str], None]
) -> Export:
    """Validates a request, in which None stands for a key that was not typed; imports no torch and writes nothing.

    Raises:
        UserError: the export is impossible.
    """
    if not out:
        raise UserError("out", "is missing" if out is None else "is empty", remedy="write out=<new folder>")
    if kind == GGUF:
        remedy = f"use as=model, then `{gguf.model_command(str(Path(out).expanduser()))}`"
        raise UserError("as", "is written by llama.cpp's converter, not by rlft", got=kind, remedy=remedy)
    if kind is not None and kind not in set(ExportKind):
        raise UserError(
            "as", "is not a form that rlft writes", got=kind or "nothing", remedy=f"use {' or '.join(ExportKind)}"
        )
    if dtype is not None and dtype not in (AUTO, *DTYPES):
        remedy = f"use {', '.join([AUTO, *DTYPES])}"
        raise UserError("dtype", "is not a known dtype", got=dtype or "nothing", remedy=remedy)
    export_kind = ExportKind(kind or ExportKind.model)
    if export_kind is ExportKind.adapter and dtype is not None:
        problem = "applies to a model's weights only: an adapter keeps its own dtype"
        raise UserError("dtype", problem, got=dtype, remedy="leave it out, or use as=model")
    folder = Path(out).expanduser()
    _check_new(folder, source)
    checkpoint = find_checkpoint(source, say)
    saved_kind = kind_of_checkpoint(checkpoint)
    if saved_kind is CheckpointKind.weights and export_kind is ExportKind.adapter:
        raise UserError("as", "the run trained all weights and has no adapter", got=export_kind, remedy="use as=model")
    if saved_kind is CheckpointKind.reward and export_kind is ExportKind.model:
        problem = "a reward model is an adapter with a scalar head, which no causal language model holds"
        raise UserError("as", problem, got=export_kind, remedy=f"use as=adapter; then reward.learned.path={folder}")
    return Export(
        source=source,
        checkpoint=checkpoint,
        checkpoint_kind=saved_kind,
        kind=export_kind,
        dtype=dtype or AUTO,
        out=folder,
    )


def _check_new(out: Path, source: NamedRun) -> None:
    if out.exists() or out.is_symlink():
        problem = "exists already, and nothing is ever overwritten"
        raise UserError("out", problem, got=out, remedy="choose a new folder, or remove that one first")
    if out.resolve().is_relative_to(run_folder.checkpoints(source.run).resolve()):
        problem = "lies among the run's checkpoints, which would no longer be whole"
        raise UserError("out", problem, got=out, remedy="choose another folder")


def export(request: Export, say: Callable[[str], None]) -> Path:
    """Writes the folder with its README.md, and returns its path."""
    from rlft.commands.export.model_card import model_card
    from rlft.commands.export.unused_weights import file_of_base
    from rlft.config.instantiate import from_mapping
    from rlft.config.model import ModelConfig
    from rlft.model.backbone import configured_ends, load_tokenizer, read_config
    from rlft.tokens.ends import configured_ids, turn_ends

    config = from_mapping(ModelConfig, request.source.config["model"], "model")
    contains = containing_class(config)
    if request.checkpoint_kind is CheckpointKind.weights:
        config = replace(config, path=str(request.checkpoint / CheckpointKind.weights), revision=None)
    else:
        check_base(request.checkpoint, config)
    tokenizer = load_tokenizer(config)
    style = (request.source.config.get("prompts") or {}).get("style", "chat")
    configured = configured_ends(config)
    ends = turn_ends(tokenizer, style, configured)
    names_ends = set(ends.ids) <= set(configured_ids(configured))
    with _becoming(request.out) as folder:
        if request.kind is ExportKind.adapter:
            with writing(request.out, size_of(request.checkpoint / request.checkpoint_kind)):
                write_adapter(request.checkpoint / request.checkpoint_kind, config, folder)
                tokenizer.save_pretrained(folder)
        else:
            write_model(request, config, tokenizer, folder, say)
        if not names_ends and request.checkpoint_kind is not CheckpointKind.reward:
            write_ends(folder, file_of_base(config, GENERATION_CONFIG), ends.ids)
        card = model_card(
            request.source,
            request.checkpoint,
            request.checkpoint_kind,
            is_model=request.kind is ExportKind.model,
            name=request.out.name,
            repo_id=request.repo_id,
            has_template=bool(tokenizer.chat_template) and style != "raw",
            loader="AutoModelForCausalLM" if contains is None else contains.__name__,
            dtype=str(read_config(config).dtype).removeprefix("torch.") if request.dtype == AUTO else request.dtype,
            ends=ends,
            eos=tokenizer.eos_token_id,
            names_ends=names_ends or request.kind is ExportKind.model,
        )
        with writing(request.out, len(card)):
            (folder / "README.md").write_text(card, encoding="utf-8")
    return request.out


def run(request: Export, pushing: Push | None, say: Callable[[str], None]) -> None:
    """Writes the folder, prints what can be done with it, and pushes it if requested.

    Raises:
        PushError: the folder was written but not pushed.
    """
    from rlft.commands.export.push import push

    print(f"exported to {export(request, say)}", flush=True)
    if request.checkpoint_kind is not CheckpointKind.reward:
        adapter = adapter_config(request.out) if request.kind is ExportKind.adapter else None
        print(gguf.instructions(request.out, adapter), flush=True)
        if pushing is not None and adapter and Path(adapter["base_model_name_or_path"]).is_dir():
            say(f"its base is {adapter['base_model_name_or_path']} on this machine, which others will not find")
    if pushing is not None:
        print(f"pushed to {push(pushing, request.out, say)}")


def adapter_config(folder: Path) -> dict[str, Any]:
    from rlft.model.adapter_folder import CONFIG

    return json.loads((folder / CONFIG).read_text())


# -- an adapter --------------------------------------------------------------------------------------------------------
def write_adapter(source: Path, config: ModelConfig, folder: Path) -> None:
    """Writes PEFT's two files, and the head and the record if there are any.

    The base's path is written so that it can be loaded from any working directory.
    """
    from safetensors.torch import load_file, save_file

    from rlft.model.adapter_folder import CONFIG, HEAD, RECORD, WEIGHTS, adapted_modules
    from rlft.model.backbone import read_config
    from rlft.model.text_model import empty_model, names_of

    for name in (WEIGHTS, HEAD, RECORD):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    fields = json.loads((source / CONFIG).read_text())
    names = names_of(empty_model(read_config(config), trust_remote_code=config.trust_remote_code))
    if names.prefixes:  # rlft has not always written the names of the folder's own class
        tensors = names.all_outside(load_file(source / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        fields["target_modules"] = sorted(adapted_modules(tensors))
    fields |= {"base_model_name_or_path": base_name(config), "revision": config.revision}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def base_name(config: ModelConfig) -> str:
    """The base's hub id, or the absolute path of its folder."""
    from rlft.model.backbone import resolve_path

    path = resolve_path(config.path)
    return str(Path(path).resolve()) if Path(path).is_dir() else path


# -- a model -----------------------------------------------------------------------------------------------------------
def write_model(
    request: Export,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Writes weights, config, tokenizer and the base's own generation config.

    Args:
        request: what is exported.
        config: the model settings of the base, or of the checkpoint's own weights. Such weights are copied as they
            are, unless dtype changes them.
        tokenizer: the base's tokenizer.
        folder: the folder for the files.
        say: prints a line.
    """
    from rlft.commands.export.unused_weights import add_unused
    from rlft.config.instantiate import from_mapping
    from rlft.config.model import ModelConfig
    from rlft.system.memory import Doing, explained

    base = from_mapping(ModelConfig, request.source.config["model"], "model")
    trained_alone = request.checkpoint_kind is CheckpointKind.weights and containing_class(base) is not None
    if request.checkpoint_kind is CheckpointKind.weights and request.dtype == AUTO and not trained_alone:
        with writing(request.out, size_of(Path(config.path))):
            shutil.copytree(config.path, folder, dirs_exist_ok=True)
        return
    if config.quantization is not None:
        say(f"the adapter was trained on the base in {config.quantization}, and is merged into its full weights")
    with explained(
        Doing(current="merge" if request.checkpoint_kind is CheckpointKind.policy else "change dtype"), config
    ):
        model, dtypes = load_float32(base if trained_alone else config)
        if request.checkpoint_kind is CheckpointKind.policy:
            with tempfile.TemporaryDirectory() as adapter:
                write_adapter(request.checkpoint / CheckpointKind.policy, config, Path(adapter))
                model = merge(model, tokenizer, Path(adapter))
        elif trained_alone:
            put_inside(model, load_float32(config)[0])
        round_weights(model, dtypes, request.dtype)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        with writing(request.out, needed):
            save(model, tokenizer, base if trained_alone else config, folder)
            add_unused(model, base if trained_alone else config, folder, say)


def containing_class(base: ModelConfig) -> type[PreTrainedModel] | None:
    """The class of this base if what is trained is a part of it; None, too, if the base is no longer there."""
    from rlft.model.backbone import read_config
    from rlft.model.text_model import own_class

    try:
        return own_class(read_config(base))
    except UserError:
        return None


def load_float32(config: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of the folder's own class in float32 on the CPU, and the dtype that each of its tensors has on disk."""
    from transformers import AutoModelForCausalLM

    from rlft.model.backbone import read_config, source
    from rlft.model.text_model import own_class

    if getattr(read_config(config), "quantization_config", None) is not None:
        problem = "the base's own weights are quantised, and merged ones would be rounded to its grid"
        raise UserError("as", problem, got=ExportKind.model, remedy="use as=adapter")
    loader: Any = own_class(read_config(config)) or AutoModelForCausalLM
    model = loader.from_pretrained(**source(config), dtype="auto")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    return model.float().eval(), dtypes


def put_inside(own: PreTrainedModel, trained: PreTrainedModel) -> None:
    """Copies the weights of a text model to the model that contains it."""
    from rlft.model.text_model import names_of, text_model_of

    names, theirs = names_of(text_model_of(own)), own.state_dict()
    for name, tensor in trained.state_dict().items():
        theirs[names.outside(name)].copy_(tensor)


def merge(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: Path) -> PreTrainedModel:
    """Adds the adapter's products to the model's weights, in place: W + scale x B A.

    Raises:
        MergeError: the merged model's log-probs differ from the adapter's, for instance because an adapted weight is
            tied to another one.
    """
    import torch
    from peft import PeftModel

    from rlft.model.activations import peft_reads_the_old_name
    from rlft.model.roles import score_sequence

    device = torch.device("cpu")
    ids: Any = tokenizer(TEXT)["input_ids"]
    with peft_reads_the_old_name():
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        expected = score_sequence(adapted, ids, device)
        merged: Any = adapted.merge_and_unload()
        actual = score_sequence(merged, ids, device)
    gap = max(abs(a - b) for a, b in zip(expected, actual, strict=True))
    if not gap <= TOLERANCE:
        problem = f"its log-probs differ from the adapter's by {gap:.2e} nats (at most {TOLERANCE:.0e} is rounding)"
        raise MergeError(f"the merged model is not the policy: {problem}; nothing was written, use as=adapter")
    return merged


def round_weights(model: PreTrainedModel, dtypes: dict[str, Any], dtype: str) -> None:
    """Casts each tensor to the dtype that it had on disk (`auto`), or to the given one.

    Raises:
        UserError: a number is too large for the dtype.
    """
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in ((name, tensor) for name, tensor in tensors if name in dtypes and tensor.is_floating_point()):
        tensor.data = tensor.data.to(dtypes[name] if dtype == AUTO else getattr(torch, dtype))
        if not torch.isfinite(tensor.data).all():
            problem = f"cannot hold the numbers of {name}"
            raise UserError("dtype", problem, got=tensor.dtype, remedy="use dtype=bfloat16 or dtype=float32")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, folder: Path) -> None:
    """Writes a Hugging Face folder. Generation config and processors are copies of the base's files, if it has them."""
    from transformers import GenerationConfig

    from rlft.commands.export.unused_weights import file_of_base

    model.generation_config = GenerationConfig()  # a base's own may be one that transformers reads but refuses to write
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    for name in (GENERATION_CONFIG, *PROCESSORS):
        if (base_file := file_of_base(config, name)) is not None:
            shutil.copyfile(base_file, folder / name)


def write_ends(folder: Path, base_file: Path | None, ends: Sequence[int]) -> None:
    """Writes the base's generation config with these end tokens: what loads the folder stops where the run did."""
    fields = {} if base_file is None else json.loads(base_file.read_text())
    text = json.dumps({**fields, "eos_token_id": list(ends)}, indent=2, sort_keys=True) + "\n"
    (folder / GENERATION_CONFIG).write_text(text)


# -- the folder that is written ----------------------------------------------------------------------------------------
@contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside `out`; at the end it is flushed to disk and renamed to `out`.

    A failure inside the block removes it.
    """
    temporary = out.with_name(f".{out.name}.writing")
    with blame_key("out"), writing(out):
        temporary.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_RDONLY)
    try:
        if locks.take(handle) is locks.Taken.no:
            raise UserError("out", "another export is being written there", got=out, remedy="wait for that one")
        for leftover in temporary.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        with blame_key("out"), atomic_folder(out, temporary):
            yield temporary
            for path in temporary.rglob("*"):
                set_usual_mode(path, temporary)
        interrupt.set_interrupt_message(f"exported to {out}")
    finally:
        os.close(handle)
