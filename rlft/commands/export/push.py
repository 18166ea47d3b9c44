"""`rlft export push=<user>/<name>`: pushes the exported folder to a model repository on the Hugging Face hub.

Whatever the hub would refuse is found before the base is loaded. If nothing can be pushed, offline or without a token,
the folder is still exported, and the error says what would have been uploaded and which command uploads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.system import interrupt
from rlft.system.crash import described
from rlft.system.hub import hub_answers
from rlft.system.terminal import command_line
from rlft.types import UserError, counted, require

if TYPE_CHECKING:
    from huggingface_hub import HfApi

QUESTION_SECONDS = 15.0  # time limit of each wait before the export; huggingface_hub itself would wait forever
UPLOAD_SECONDS = 300.0  # time limit of each wait during the upload: the hub may check gigabytes before it answers
LOG_IN = "hf auth login"
NO_ACCESS = (401, 403)


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


# -- before the export -------------------------------------------------------------------------------------------------
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


# -- after the export --------------------------------------------------------------------------------------------------
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
