"""Checks as `rlft doctor` has them, that need no model: `doctor_checks:opened` opens their subject."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

from rlft.commands.doctor.command import NotReadyError
from rlft.system.terminal import CheckRow, Status
from rlft.types import UserError


def opened(settings: object, folder: Path, failed: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(settings=settings, folder=folder, failed=failed, process=os.getpid())


def ready(subject: SimpleNamespace) -> list[CheckRow]:
    told = f"process {subject.process} after {','.join(subject.failed)}"
    return [CheckRow(name="ready", status=Status.ok, value=told, numbers={"answer": 42.0})]


def poor(subject: SimpleNamespace) -> list[CheckRow]:
    return [CheckRow(name="poor", status=Status.slow, value="crawls", remedy="push it")]


def raises(subject: SimpleNamespace) -> list[CheckRow]:
    raise ZeroDivisionError("by zero\nand more")


def refuses(subject: SimpleNamespace) -> list[CheckRow]:
    raise UserError("model.path", "is no model", got="moodel", remedy="name another one")


def waits_for_another(subject: SimpleNamespace) -> list[CheckRow]:
    raise NotReadyError("the engine has not started")


def hangs(subject: SimpleNamespace) -> list[CheckRow]:
    print("waiting for the device", flush=True)
    time.sleep(600)
    return []


def dies(subject: SimpleNamespace) -> list[CheckRow]:
    os.abort()
