"""`rlft export`: writes a checkpoint of a run as a folder that transformers, PEFT and vLLM load.

The base is loaded again and merged in float32, each weight rounded once, so the run and its base stay unchanged. The
export is written to a temporary folder next to `out` and renamed when it is complete: a kill leaves no `out`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlft.commands.export import gguf, model_card, push
from rlft.commands.export.request import Export, prepare
from rlft.commands.launch import import_libraries
from rlft.commands.policy import base_of, check_base, of_a_run
from rlft.config import compose as configs
from rlft.config.resolved import AUTO
from rlft.config.suggest import OWN_KEYS
from rlft.runs.chain import CHAIN, lines_until
from rlft.runs.checkpoint import saved_step, set_usual_mode
from rlft.runs.find import CheckpointKind
from rlft.runs.lines import encode
from rlft.system import interrupt, locks
from rlft.system.disk import blame_key, writing
from rlft.system.files import atomic_folder, size_of
from rlft.system.terminal import say
from rlft.types import Mistakes, UserError

WORDS, PUSH_WORDS = OWN_KEYS["export"][2:5], OWN_KEYS["export"][5:]
"""Keys of the command after run and checkpoint, in the order of the parameters of `prepare` and `push.read_target`."""


def command(arguments: list[str]) -> None:
    """Exports a run's newest checkpoint, or a named one, and pushes it if push= is given."""
    if len(arguments) > 1 and "=" not in arguments[1] and not arguments[1].startswith(("-", "+", "~")):
        problem = "takes one run, and the folder to write is given as out=<folder>"
        raise UserError("export", problem, got=arguments[1], remedy=f"write out={arguments[1]}")
    parsed, source = of_a_run(arguments, OWN_KEYS["export"], mistakes := Mistakes())
    with mistakes.joined():
        if source is None:
            raise UserError("run", "is missing: there is nothing to export", remedy="write run=runs/<name>/<time>")
        config = configs.changed(source.config, parsed.overrides, parsed.config_dir, source.config["command"])
    for key in (o.partition("=")[0] for o in parsed.overrides if not o.startswith("model.")):
        with mistakes:
            raise UserError(key, "changes nothing of what was trained", remedy="leave it out")
    mistakes.refuse()
    out, kind, dtype = (parsed.value(word) for word in WORDS)
    pushing = push.read_target(*(parsed.value(word) for word in PUSH_WORDS))
    request = prepare(replace(source, config=config), out, kind, dtype, say)
    if pushing is not None:
        request, pushing = replace(request, repo_id=pushing.repo_id), push.prepared(pushing)
    doing = f"rlft export: {request.checkpoint} to {request.out}"
    import_libraries(doing, base_of(config, source), needs_weights=request.is_model)
    run(request, pushing, say)


def export(request: Export, say: Callable[[str], None]) -> Path:
    """Writes the folder with its README.md, and returns its path."""
    from rlft.commands.export import weights
    from rlft.config.instantiate import from_mapping
    from rlft.config.model import ModelConfig
    from rlft.model.backbone import configured_ends, load_tokenizer, read_config, source
    from rlft.model.network_files import file_of
    from rlft.tokens.ends import configured_ids, turn_ends

    config = from_mapping(ModelConfig, request.source.config["model"], "model")
    contains = weights.containing_class(config)
    if request.checkpoint_kind is CheckpointKind.weights:
        config = replace(config, path=str(request.checkpoint / CheckpointKind.weights), revision=None)
    else:
        check_base(request.checkpoint, config)
    tokenizer = load_tokenizer(config)
    style = (request.source.config.get("prompts") or {}).get("style", "chat")
    configured = configured_ends(config)
    ends = turn_ends(tokenizer, style, configured)
    base_file = file_of(source(config), weights.GENERATION_CONFIG)
    names_ends = set(ends.ids) <= set(configured_ids(configured))
    with _becoming(request.out) as folder:
        if not request.is_model:
            with writing(request.out, size_of(request.checkpoint / request.checkpoint_kind)):
                weights.write_adapter(request.checkpoint / request.checkpoint_kind, config, folder)
                tokenizer.save_pretrained(folder)
        else:
            weights.write_model(request, config, tokenizer, folder, say)
        if not names_ends and request.checkpoint_kind is not CheckpointKind.reward:
            weights.write_ends(folder, base_file, ends.ids)
        chain = lines_until(request.source.run, saved_step(request.checkpoint))
        if chain:
            (folder / CHAIN).write_bytes(b"".join(map(encode, chain)))
        card = model_card.Card(
            request=request,
            has_template=bool(tokenizer.chat_template) and style != "raw",
            loader="AutoModelForCausalLM" if contains is None else contains.__name__,
            dtype=str(read_config(config).dtype).removeprefix("torch.") if request.dtype == AUTO else request.dtype,
            ends=ends,
            eos=tokenizer.eos_token_id,
            names_ends=names_ends or request.is_model,
            chain=chain[-1]["digest"] if chain else None,
            defaults={} if base_file is None else json.loads(base_file.read_text(encoding="utf-8")),
        )
        text = card.text()
        with writing(request.out, len(text)):
            (folder / "README.md").write_text(text, encoding="utf-8")
    return request.out


def run(request: Export, pushing: push.Push | None, say: Callable[[str], None]) -> None:
    """Writes the folder, prints what can be done with it, and pushes it if requested (PushError: it was not pushed)."""
    print(f"exported to {export(request, say)}", flush=True)
    if request.checkpoint_kind is not CheckpointKind.reward:
        from rlft.model.adapter_folder import CONFIG

        adapter = None if request.is_model else json.loads((request.out / CONFIG).read_text())
        print(gguf.instructions(request.out, adapter), flush=True)
        if pushing is not None and adapter and Path(adapter["base_model_name_or_path"]).is_dir():
            say(f"its base is {adapter['base_model_name_or_path']} on this machine, which others will not find")
    if pushing is not None:
        print(f"pushed to {push.push(pushing, request.out, say)}")


@contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """Yields an empty folder, which is flushed to disk and renamed to `out` at the end, or removed after a failure."""
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
