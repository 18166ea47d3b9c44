"""Weights & Biases: the same numbers on a web page, online or offline."""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlft.fields import PositiveFloat
from rlft.types import Evaluation, RunInfo, StepRecord, UserError

RUN_ID = "wandb_id.txt"


class WandbMode(StrEnum):
    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass(kw_only=True)
class Wandb:
    """Sends metrics to Weights & Biases; a resumed run continues the run id kept in its folder.

    Steps repeated after a resume are sent again and ignored by the server, which takes each step once; they hold the
    same numbers. Trouble with the service is told once and never stops training.

    mode: `auto` is online where an account is set up, else offline. init_seconds, finish_seconds: longest waits.
    Errors: UserError when the package is not installed, at construction.
    """

    mode: WandbMode
    project: str
    entity: str | None
    init_seconds: PositiveFloat
    finish_seconds: PositiveFloat

    def __post_init__(self) -> None:
        self.run: Any = None
        spec = importlib.util.find_spec("wandb")
        # Offline runs leave a folder `wandb`, which Python takes for a package (without an origin) when it is near.
        if spec is None or spec.origin is None:
            remedy = "pip install 'rlft[wandb]', or leave wandb out of logger=[...]"
            raise UserError("logger.wandb", "the package wandb is not installed", remedy=remedy)

    def start(self, run: RunInfo) -> None:
        import wandb

        mode, why = choose_mode(self.mode, os.environ)
        attempts = [(mode, why), (WandbMode.offline, "online did not work")] if mode == "online" else [(mode, why)]
        for mode, why in attempts:
            try:
                self.run = self._open(run, mode)
            except (wandb.Error, OSError) as error:
                tell(f"could not start {mode} ({error})")
                continue
            folder = Path(self.run.dir).parent
            where = f"upload with `wandb sync {folder}`" if mode == "offline" else str(self.run.url)
            tell(f"{mode}, {why}; {where}")
            return
        tell("going on without it")

    def stage(self, name: str) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        self._send(record.metrics, record.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        headline = {"eval/accuracy": evaluation.accuracy, "eval/accuracy_se": evaluation.accuracy_se}
        there = {name: value for name, value in headline.items() if value is not None}
        self._send({**evaluation.metrics, **there}, evaluation.step)

    def note(self, text: str) -> None:
        pass

    def finish(self, status: str) -> None:
        if self.run is None:
            return
        import wandb

        run, self.run = self.run, None
        try:
            run.finish(exit_code=0 if status == "finished" else 1)
        except (wandb.Error, OSError) as error:
            tell(f"could not close the run ({error}); the run's own files are complete")

    def _open(self, run: RunInfo, mode: Any) -> Any:
        import wandb

        # vLLM imports openai, which wandb would answer with an advertisement of another product.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        settings = wandb.Settings(
            console="off",  # it would wrap stdout, which the live view draws on
            silent=True,
            init_timeout=self.init_seconds,
            finish_timeout=self.finish_seconds,
        )
        return wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.name,
            id=run_id(run.folder),
            resume="allow" if mode == "online" else None,  # offline, the same id is what joins the parts
            mode=mode,
            dir=str(run.folder),
            config=json.loads(json.dumps(dict(run.config), default=str)),
            settings=settings,
        )

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        if self.run is None:
            return
        import wandb

        try:
            self.run.log(dict(metrics), step=step)
        except (wandb.Error, OSError) as error:
            self.run = None  # once is enough: the service doesn't come back within a run
            tell(f"stopped logging at step {step} ({error}); training goes on")


def tell(text: str) -> None:
    """Says it on stderr, where the live view lets lines through."""
    print(f"wandb: {text}", file=sys.stderr, flush=True)


def run_id(folder: Path) -> str:
    """The id kept in the run folder; made up and written down the first time."""
    path = folder / RUN_ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def choose_mode(mode: WandbMode, environ: Mapping[str, str]) -> tuple[str, str]:
    """(wandb's own word for the mode, why)."""
    if mode != WandbMode.auto:
        return str(mode), f"logger.wandb.mode={mode}"
    if asked := environ.get("WANDB_MODE"):
        return asked, f"WANDB_MODE={asked}"
    return ("online", "an account is set up") if has_account(environ) else ("offline", "no account is set up")


def has_account(environ: Mapping[str, str]) -> bool:
    """Whether a key is in the environment or where `wandb login` puts it; nothing is sent and the key is not kept."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    default = next((path for name in (".netrc", "_netrc") if (path := Path.home() / name).exists()), None)
    path = Path(environ["NETRC"]) if "NETRC" in environ else default
    if path is None or not path.exists():
        return False
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False
