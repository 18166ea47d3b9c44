"""Checks as `rlft doctor` has them, that need no model: `doctor_checks:opened` opens their subject."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

from rlft.commands.doctor.row import NotReadyError, Row, Status
from rlft.types import UserError


def opened(settings: object, folder: Path, failed: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(settings=settings, folder=folder, failed=failed, process=os.getpid())


def ready(subject: SimpleNamespace) -> list[Row]:
    told = f"process {subject.process} after {','.join(subject.failed)}"
    return [Row(name="ready", status=Status.ok, value=told, numbers={"answer": 42.0})]


def poor(subject: SimpleNamespace) -> list[Row]:
    return [Row(name="poor", status=Status.slow, value="crawls", remedy="push it")]


def raises(subject: SimpleNamespace) -> list[Row]:
    raise ZeroDivisionError("by zero\nand more")


def refuses(subject: SimpleNamespace) -> list[Row]:
    raise UserError("model.path", "is no model", got="moodel", remedy="name another one")


def waits_for_another(subject: SimpleNamespace) -> list[Row]:
    raise NotReadyError("the engine has not started")


def hangs(subject: SimpleNamespace) -> list[Row]:
    print("waiting for the device", flush=True)
    time.sleep(600)
    return []


def dies(subject: SimpleNamespace) -> list[Row]:
    os.abort()
