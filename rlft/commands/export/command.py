"""`rlft export`: writes a checkpoint of a run as a folder that transformers, PEFT and vLLM load, and pushes it.

The base is loaded again and merged in float32, each weight rounded once, so the run and its base stay unchanged. The
export is written to a temporary folder next to `out` and renamed when it is complete: a kill leaves no `out`.

Whatever the hub would refuse is found before the base is loaded. If nothing can be pushed, offline or without a
token, the folder is still exported, and the error says what would have been uploaded and which command uploads it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.commands.export import model_card
from rlft.commands.export.model_card import Export, gguf_line, prepare
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
from rlft.system.crash import described
from rlft.system.disk import blame_key, writing
from rlft.system.files import atomic_folder, size_of
from rlft.system.hub import hub_answers
from rlft.system.terminal import command_line, say
from rlft.types import Mistakes, UserError, counted, require

if TYPE_CHECKING:
    from huggingface_hub import HfApi

QUESTION_SECONDS = 15.0  # time limit of each wait before the export; huggingface_hub itself would wait forever
UPLOAD_SECONDS = 300.0  # time limit of each wait during the upload: the hub may check gigabytes before it answers
LOG_IN = "hf auth login"
NO_ACCESS = (401, 403)
WORDS, PUSH_WORDS = OWN_KEYS["export"][2:5], OWN_KEYS["export"][5:]
"""Keys of the command after run and checkpoint, in the order of the parameters of `prepare` and `read_target`."""


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
    pushing = read_target(*(parsed.value(word) for word in PUSH_WORDS))
    request = prepare(replace(source, config=config), out, kind, dtype, say)
    if pushing is not None:
        request, pushing = replace(request, repo_id=pushing.repo_id), prepared(pushing)
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
    from rlft.tokens.text import configured_ids, turn_ends

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


def run(request: Export, pushing: Push | None, say: Callable[[str], None]) -> None:
    """Writes the folder, prints what can be done with it, and pushes it if requested (PushError: it was not pushed)."""
    print(f"exported to {export(request, say)}", flush=True)
    if request.checkpoint_kind is not CheckpointKind.reward:
        from rlft.model.adapter_folder import CONFIG

        adapter = None if request.is_model else json.loads((request.out / CONFIG).read_text())
        print(gguf_line(request.out, adapter), flush=True)
        if pushing is not None and adapter and Path(adapter["base_model_name_or_path"]).is_dir():
            say(f"its base is {adapter['base_model_name_or_path']} on this machine, which others will not find")
    if pushing is not None:
        print(f"pushed to {push(pushing, request.out, say)}")


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


# -- the hub: before the export, then after it -------------------------------------------------------------------------
class PushError(RuntimeError):
    """The folder was exported, but not (completely) pushed; the message says why, and which command pushes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A push to a repository."""

    repo_id: str  # `user/name` or `organisation/name`
    private: bool  # whether the repository is a private one if it is made
    api: HfApi | None = None  # the client of the hub, once prepared; without one nothing can be pushed
    problem: str = ""  # why there is no client
    fix: str = ""  # then the command to run before the one that uploads

    def __str__(self) -> str:
        return f"the {'private' if self.private else 'public'} repository {self.repo_id}"


def read_target(repo_id: str | None, private: str | None) -> Push | None:
    """The push that push= and private= name; None without them."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id is None:
        if private is not None:
            problem = "has no effect without push="
            raise UserError("private", problem, got=private, remedy="add push=<user>/<name>, or leave it out")
        return None
    remedy = "write push=<user>/<name> or push=<organisation>/<name>"
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        problem = "is not a repository id of the Hugging Face hub (letters, digits, '-', '_' and '.', one '/')"
        raise UserError("push", problem, got=repo_id or "nothing", remedy=remedy) from None
    if "/" not in repo_id:
        raise UserError("push", "names no user or organisation", got=repo_id, remedy=remedy)
    if private not in (None, "true", "false"):
        remedy = "write private=false if everybody may see the model, or leave it out"
        raise UserError("private", "must be true or false", got=private or "nothing", remedy=remedy)
    return Push(repo_id=repo_id, private=private != "false")


def prepared(target: Push) -> Push:
    """Asks the hub about the push before anything is computed; refuses the token, or the repository's visibility."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return replace(target, problem="HF_HUB_OFFLINE is set")
    if get_token() is None:
        return replace(target, problem="there is no token for the Hugging Face hub", fix=LOG_IN)
    if not hub_answers():
        return replace(target, problem=f"{constants.ENDPOINT} cannot be reached")
    api = HfApi()
    try:
        with limited_waits(QUESTION_SECONDS):
            token = api.whoami().get("auth", {}).get("accessToken", {})
            remedy = f"create one that may write, then `{LOG_IN}` (or set HF_TOKEN)"
            may_write = token.get("role") != "read"
            require(may_write, "push", "the token may only read", got=target.repo_id, remedy=remedy)
            check_visibility(api, target)
    except UserError:
        raise
    except HfHubHTTPError as error:
        if error.response.status_code not in NO_ACCESS:
            return replace(target, problem=described(error))
        problem = f"the hub refuses the token ({error.response.status_code})"
        remedy = f"create one that may write at {constants.ENDPOINT}/settings/tokens, then `{LOG_IN}` (or set HF_TOKEN)"
        raise UserError("push", problem, got=target.repo_id, remedy=remedy) from None
    except Exception as error:  # errors of the HTTP library differ between versions of huggingface_hub
        return replace(target, problem=described(error))
    return replace(target, api=api)


def check_visibility(api: HfApi, target: Push) -> None:
    """Refuses an existing repository with another visibility, because the hub would silently keep it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        is_private = bool(api.model_info(target.repo_id).private)
    except RepositoryNotFoundError:
        return
    if is_private != target.private:
        visibility, matching_value = ("private", "true") if is_private else ("public", "false")
        problem = f"{target.repo_id} exists on the hub and is {visibility}; a push does not change that"
        remedy = f"write private={matching_value}, or push to another repository"
        raise UserError("private", problem, got=str(target.private).lower(), remedy=remedy)


@contextmanager
def limited_waits(seconds: float) -> Iterator[None]:
    """Limits the time that a request of huggingface_hub waits for the network."""
    from huggingface_hub import get_session

    client = get_session()
    original_timeout, client.timeout = client.timeout, seconds
    try:
        yield
    finally:
        client.timeout = original_timeout


def push(target: Push, folder: Path, say: Callable[[str], None]) -> str:
    """Uploads the files of the folder, and returns the repository's address; PushError: some or all were not uploaded.

    In an existing repository, files with the same names are replaced and others stay; its history keeps all versions.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = f"{counted(len(files), 'file')} ({sum(file.stat().st_size for file in files):,} bytes)"
    command = upload_command(target, folder)
    if target.api is None:
        commands = " and then ".join(f"`{each}`" for each in (target.fix, command) if each)
        not_pushed = f"what would go to {target}: {size}, by {commands}"
        raise PushError(f"not pushed: {target.problem}; {folder} is kept; {not_pushed}")
    say(f"pushing {size} to {target}")
    interrupt.set_interrupt_message(
        f"{folder} is exported, and perhaps not all of it is on the hub; `{command}` uploads the rest"
    )
    try:
        with limited_waits(UPLOAD_SECONDS):
            address = target.api.create_repo(target.repo_id, private=target.private, exist_ok=True)
            target.api.upload_folder(repo_id=target.repo_id, folder_path=folder, commit_message="Exported by rlft")
    except Exception as error:  # whatever went wrong, the folder is complete and the command is known
        raise PushError(f"not pushed to {target}: {described(error)}; {folder} is kept; try `{command}`") from error
    interrupt.set_interrupt_message(f"{folder} is exported and pushed to {target.repo_id}")
    return str(address)


def upload_command(target: Push, folder: Path) -> str:
    """The command that uploads the folder by hand.

    >>> upload_command(Push(repo_id="me/mine", private=True), Path("exports/mine"))
    'hf upload me/mine exports/mine --private'
    """
    return command_line("hf", "upload", target.repo_id, folder, *(["--private"] if target.private else []))
