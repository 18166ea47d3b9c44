"""Logs to Weights & Biases, online or offline."""

from __future__ import annotations

import json
import netrc
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from rlft.config.bounds import PositiveFloat
from rlft.logger.interface import RunInfo
from rlft.logger.scalars import ScalarLogger, kept

RUN_ID = "wandb_id.txt"
PROJECT = "rlft"
LONGEST_NAME = 128  # the most characters that the server takes as a run's name
MARGIN_S = 10.0  # seconds beyond wandb's own limits after which a call is given up


@dataclass(kw_only=True)
class Wandb(ScalarLogger):
    """Sends metrics to Weights & Biases; a resumed run continues the run id kept in its folder.

    Steps repeated after a resume are sent again and ignored by the server, which accepts each step once; they have the
    same numbers.
    """

    package = "wandb"
    remedy = (
        "check logger.wandb.project and entity, WANDB_BASE_URL (with https://) and the key (`wandb login`), or leave"
        " wandb out of logger"
    )
    environment: ClassVar = {"WANDB_DISABLE_WEAVE": "true"}
    """vLLM imports openai, upon which wandb would print an advertisement for another product."""

    mode: Literal["auto", "online", "offline"]
    project: str | None
    entity: str | None
    init_seconds: PositiveFloat
    finish_seconds: PositiveFloat

    @property
    def seconds(self) -> float:
        """Longer than wandb itself waits: for the server, then offline, or for uploads."""
        return 2 * self.init_seconds + self.finish_seconds + MARGIN_S

    def open(self, run: RunInfo) -> tuple[Any, str]:
        mode, why = choose_mode(self.mode, os.environ)
        wandb_run = None
        if mode == "online":
            wandb_run = self._attempt("could not start online", "trying offline", self._open, run, mode)
            if wandb_run is None:
                mode, why = "offline", "online did not work"
                self.library.teardown()  # its service still holds the id of the run that it could not start
        wandb_run = wandb_run or self._open(run, mode)
        folder = Path(wandb_run.dir).parent
        location = f"upload with `wandb sync {folder}`" if mode == "offline" else str(wandb_run.url)
        return wandb_run, f"{mode}, {why}; {location}"

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)

    def _open(self, run: RunInfo, mode: Any) -> Any:
        settings = self.library.Settings(
            console="off",  # else it would wrap stdout, on which the live view draws
            silent=True,
            init_timeout=self.init_seconds,
            finish_timeout=self.finish_seconds,
        )
        return self.library.init(
            project=self.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=self.entity,  # None: wandb reads WANDB_ENTITY
            name=(os.environ.get("WANDB_NAME") or run.name)[:LONGEST_NAME],
            id=run_id(run.folder),
            resume="allow" if mode == "online" else None,  # offline, the same id joins the parts of a run
            mode=mode,
            dir=str(run.folder),
            config=json.loads(json.dumps(dict(run.config), default=str)),
            settings=settings,
        )


def run_id(folder: Path) -> str:
    """The id kept in the run's folder, which is written the first time: that of `wandb agent`, else a new one.

    An agent's run always has the agent's id, so that a resume finds the run by this id.
    """
    agents_id = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return kept(folder, RUN_ID, lambda: agents_id or secrets.token_hex(4))


def choose_mode(mode: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """(wandb's name of the mode, the reason for it)."""
    if mode != "auto":
        return mode, f"logger.wandb.mode={mode}"
    if requested := environ.get("WANDB_MODE"):
        return requested, f"WANDB_MODE={requested}"
    return ("online", "an account is set up") if has_account(environ) else ("offline", "no account is set up")


def has_account(environ: Mapping[str, str]) -> bool:
    """Whether a key is in the environment or where `wandb login` puts it; nothing is sent, and the key is not kept."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        places = [environ["NETRC"]] if "NETRC" in environ else [Path.home() / name for name in (".netrc", "_netrc")]
        path = next(filter(os.path.exists, places), None)
        return path is not None and netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError, ValueError, RuntimeError):  # not a URL, not text, no home: as good as none
        return False
