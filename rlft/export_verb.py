"""`rlft export`: a run's newest checkpoint, or one of them, as a folder that transformers, PEFT and vLLM load.

The base is loaded anew and merged in float32, each weight rounded once, so the run and its base stay as they are.
What is written stands beside its place until it is whole: a kill leaves no `out`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft import interrupt, runfolder
from rlft.export import gguf
from rlft.place import Holds, Place, check_base, find_checkpoint, what_it_holds
from rlft.trainer.checkpoint import set_usual_mode
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlft.export.push import Push
    from rlft.model.config import ModelConfig

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
"""Words of the verb, in the order in which `prepare` takes them."""
PUSH_WORDS = ("push", "private")
"""Words of the verb, in the order in which `push.read_target` takes them; the rest are keys of the run's config."""
GGUF = "gguf"
AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16", "float16")
TEXT = "What is 17 + 25? The answer is 42, because 17 + 25 = 42."
"""Adapter and merged model are compared on its tokens; any text would do."""
TOLERANCE = 1e-3
"""nats; both compute in float32, and add up in another order."""


class MergeError(RuntimeError):
    """The merged model does not compute what the adapter on its base does; nothing was written."""


class Kind(StrEnum):
    model = "model"
    adapter = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is asked, found possible as far as files tell. checkpoint: its folder, which is whole. dtype: of DTYPES.

    repo_id: of the hub, where the folder is to be pushed, so that its card names it so.
    """

    place: Place
    checkpoint: Path
    holds: Holds
    kind: Kind
    dtype: str
    out: Path
    repo_id: str | None = None


def prepare(place: Place, out: str | None, kind: str | None, dtype: str | None, say: Callable[[str], None]) -> Export:
    """The export that these words ask for (None: not given), or a refusal; imports no torch and writes nothing."""
    if not out:
        raise UserError("out", "is missing" if out is None else "is empty", remedy="write out=<new folder>")
    if kind == GGUF:
        remedy = f"use as=model, then `{gguf.model_command(str(Path(out).expanduser()))}`"
        raise UserError("as", "is written by llama.cpp's converter, not by rlft", got=kind, remedy=remedy)
    if kind is not None and kind not in set(Kind):
        raise UserError(
            "as", "is not a form that rlft writes", got=kind or "nothing", remedy=f"use {' or '.join(Kind)}"
        )
    if dtype is not None and dtype not in DTYPES:
        raise UserError("dtype", "is not a known dtype", got=dtype or "nothing", remedy=f"use {', '.join(DTYPES)}")
    asked = Kind(kind or Kind.model)
    if asked is Kind.adapter and dtype is not None:
        problem = "is of a model's weights; an adapter keeps its own"
        raise UserError("dtype", problem, got=dtype, remedy="leave it out, or use as=model")
    folder = Path(out).expanduser()
    _check_new(folder, place)
    checkpoint = find_checkpoint(place, say)
    holds = what_it_holds(checkpoint)
    if holds is Holds.weights and asked is Kind.adapter:
        raise UserError("as", "the run trained all weights and has no adapter", got=asked, remedy="use as=model")
    if holds is Holds.reward and asked is Kind.model:
        problem = "a reward model is an adapter with a scalar head, which no causal language model holds"
        raise UserError("as", problem, got=asked, remedy=f"use as=adapter; then reward.learned.path={folder}")
    return Export(place=place, checkpoint=checkpoint, holds=holds, kind=asked, dtype=dtype or AUTO, out=folder)


def _check_new(out: Path, place: Place) -> None:
    if out.exists() or out.is_symlink():
        problem = "there is something in that place already, and nothing is ever overwritten"
        raise UserError("out", problem, got=out, remedy="choose a new folder, or remove that one first")
    if out.resolve().is_relative_to(runfolder.checkpoints(place.run).resolve()):
        problem = "lies among the run's checkpoints, which would no longer be whole"
        raise UserError("out", problem, got=out, remedy="choose another folder")


def export(asked: Export, say: Callable[[str], None]) -> Path:
    """Writes the folder, its README.md included, and returns it."""
    from rlft.model.backbone import load_tokenizer, read_config
    from rlft.model.config import ModelConfig
    from rlft.model_card import model_card
    from rlft.targets import from_mapping

    config = from_mapping(ModelConfig, asked.place.config["model"], "model")
    if asked.holds is Holds.weights:
        config = replace(config, path=str(asked.checkpoint / Holds.weights), revision=None)
    else:
        check_base(asked.checkpoint, config)
    tokenizer = load_tokenizer(config)
    style = (asked.place.config.get("prompts") or {}).get("style")
    with _becoming(asked.out) as folder:
        if asked.kind is Kind.adapter:
            write_adapter(asked.checkpoint / asked.holds, config, folder)
            tokenizer.save_pretrained(folder)
        else:
            write_model(asked, config, tokenizer, folder, say)
        card = model_card(
            asked.place,
            asked.checkpoint,
            asked.holds,
            is_model=asked.kind is Kind.model,
            name=asked.out.name,
            repo_id=asked.repo_id,
            has_template=bool(tokenizer.chat_template) and style != "raw",
            dtype=str(read_config(config).dtype).removeprefix("torch.") if asked.dtype == AUTO else asked.dtype,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return asked.out


def run(asked: Export, pushing: Push | None, say: Callable[[str], None]) -> None:
    """Writes the folder, says what can be done with it, and pushes it where that was asked for.

    Raises:
        PushError: the folder was written and not pushed.
    """
    from rlft.export.push import push

    print(f"exported to {export(asked, say)}", flush=True)
    if asked.holds is not Holds.reward:
        adapter = adapter_config(asked.out) if asked.kind is Kind.adapter else None
        print(gguf.instructions(asked.out, adapter), flush=True)
        if pushing is not None and adapter and Path(adapter["base_model_name_or_path"]).is_dir():
            say(f"its base is {adapter['base_model_name_or_path']} on this machine, which others will not find")
    if pushing is not None:
        print(f"pushed to {push(pushing, asked.out, say)}")


def adapter_config(folder: Path) -> dict[str, Any]:
    from rlft.model.adapter_folder import CONFIG

    return json.loads((folder / CONFIG).read_text())


# -- an adapter --------------------------------------------------------------------------------------------------------
def write_adapter(source: Path, config: ModelConfig, folder: Path) -> None:
    """PEFT's two files, and head and record where there are any; names the base so that it is found from anywhere."""
    from rlft.model.adapter_folder import CONFIG, HEAD, RECORD, WEIGHTS

    for name in (WEIGHTS, HEAD, RECORD):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    fields = json.loads((source / CONFIG).read_text())
    fields |= {"base_model_name_or_path": base_name(config), "revision": config.revision}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def base_name(config: ModelConfig) -> str:
    """The base's hub id, or its folder from the root."""
    from rlft.model.backbone import resolve_path

    path = resolve_path(config.path)
    return str(Path(path).resolve()) if Path(path).is_dir() else path


# -- a model -----------------------------------------------------------------------------------------------------------
def write_model(
    asked: Export,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Weights, config, tokenizer and the base's own generation config.

    config: of the base, or of the checkpoint's own weights, which are copied as they are unless dtype changes them.
    """
    from rlft.out_of_memory import Doing, explained

    if asked.holds is Holds.weights and asked.dtype == AUTO:
        shutil.copytree(config.path, folder, dirs_exist_ok=True)
        return
    if config.quantization is not None:
        say(f"the adapter was trained on the base in {config.quantization}, and is merged into its full weights")
    with explained(Doing(current="merge" if asked.holds is Holds.policy else "change dtype"), config):
        model, dtypes = load_float32(config)
        if asked.holds is Holds.policy:
            model = merge(model, tokenizer, asked.checkpoint / Holds.policy)
        round_weights(model, dtypes, asked.dtype)
        save(model, tokenizer, config, folder)


def load_float32(config: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in float32 on the CPU, and the dtype each of its tensors has by itself."""
    from transformers import AutoModelForCausalLM

    from rlft.model.backbone import read_config, source

    if getattr(read_config(config), "quantization_config", None) is not None:
        problem = "the base's own weights are quantised, and merged ones would be rounded to its grid"
        raise UserError("as", problem, got=Kind.model, remedy="use as=adapter")
    model = AutoModelForCausalLM.from_pretrained(**source(config), dtype="auto")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    return model.float().eval(), dtypes


def merge(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: Path) -> PreTrainedModel:
    """The model, which it changes, with the adapter's products added to its weights: W + scale x B A.

    Raises:
        MergeError: it says something else than the adapter did, as where a weight that is tied to another was adapted.
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
        found = score_sequence(merged, ids, device)
    gap = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not gap <= TOLERANCE:
        problem = f"its log-probs differ from the adapter's by {gap:.2e} nats (at most {TOLERANCE:.0e} is rounding)"
        raise MergeError(f"the merged model is not the policy: {problem}; nothing was written, use as=adapter")
    return merged


def round_weights(model: PreTrainedModel, dtypes: dict[str, Any], dtype: str) -> None:
    """Gives each tensor the dtype it had (`auto`), or all numbers this one.

    Raises:
        UserError: a number is too large for it.
    """
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in ((name, tensor) for name, tensor in tensors if name in dtypes and tensor.is_floating_point()):
        tensor.data = tensor.data.to(dtypes[name] if dtype == AUTO else getattr(torch, dtype))
        if not torch.isfinite(tensor.data).all():
            problem = f"cannot hold the numbers of {name}"
            raise UserError("dtype", problem, got=tensor.dtype, remedy="use dtype=bfloat16 or dtype=float32")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, folder: Path) -> None:
    """Writes a Hugging Face folder. The generation config is the base's file as it is, or none where it has none."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME
    from transformers.utils.hub import cached_file

    from rlft.model.backbone import source

    model.generation_config = GenerationConfig()  # a base's own may be one that transformers reads but refuses to write
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
    where = source(config)
    own = cached_file(
        where["pretrained_model_name_or_path"],
        GENERATION_CONFIG_NAME,
        revision=where["revision"],
        local_files_only=where["local_files_only"],
        _raise_exceptions_for_missing_entries=False,
    )
    if own is not None:
        shutil.copyfile(own, folder / GENERATION_CONFIG_NAME)


# -- whole or not there ------------------------------------------------------------------------------------------------
@contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` that is flushed to disk and becomes it at the end; a failure inside removes it."""
    temporary = out.with_name(f".{out.name}.writing")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it with the process
    except BlockingIOError:
        os.close(handle)
        raise UserError("out", "another export is being written there", got=out, remedy="wait for that one") from None
    try:
        for left_by_a_kill in temporary.iterdir():
            shutil.rmtree(left_by_a_kill) if left_by_a_kill.is_dir() else left_by_a_kill.unlink()
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            set_usual_mode(path, temporary)
            _flush(path)
        try:
            temporary.rename(out)
            interrupt.keeps(f"exported to {out}")
        except OSError as error:
            raise _unwritable(out, error) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError("out", f"cannot be written ({error.strerror})", got=out, remedy="choose another folder")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
