"""Runs the quick tests with the oldest and with the newest versions that pyproject.toml allows; `make test-all` does.

    .venv/bin/python scripts/test_versions.py              # both
    .venv/bin/python scripts/test_versions.py newest       # one of them
    .venv/bin/python scripts/test_versions.py --refresh    # look for newer releases than those that are installed

Each of the two is a small virtual environment in .venv/versions that sees the packages of .venv and holds only those
whose version differs, so that torch, which is a gigabyte and stays the one of .venv, is installed once. The first time
they are installed in a minute or two; afterwards they are there. Python's standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
ENDS = ("oldest", "newest")
SHARED = ("torch",)
"""Packages that are not installed again; the tests run with the version of .venv."""

QUICK_TESTS = (
    "tests/test_library_versions.py",
    "tests/config/test_compose.py",
    "tests/config/test_instantiate.py",
    "tests/config/test_schema.py",
    "tests/data/test_hub.py",
    # What rlft replaces in transformers' models, with the kernels that it takes for this release:
    "tests/generation/test_transformers.py::test_logprobs_are_those_of_a_plain_forward_at_this_temperature",
    "tests/model/kernels/test_attention.py::test_what_a_packed_row_cannot_do_is_found_before",
    "tests/model/test_roles.py::test_gradient_checkpointing_gives_the_same_gradients_and_leaves_no_hook",
    "tests/trainer/test_sharded_base.py::test_a_divided_base_trains_as_a_whole_one[1-auto-True]",
)
TIMED = (
    "tests/data/test_hub.py::test_without_network_and_files_it_stops_in_time_naming_both_keys",
    "tests/data/test_hub.py::test_a_hub_that_never_answers_costs_the_probe_only",
    "tests/data/test_hub.py::test_a_cached_set_works_offline",
)
"""Tests of seconds, which the main suite has: no version changes them, and a busy machine does."""

PRINTED = ("torch", "transformers", "peft", "datasets", "hydra-core", "omegaconf", "pydantic", "numpy", "safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the quick tests at both ends of the allowed version ranges.")
    parser.add_argument("ends", nargs="*", metavar="end", help=f"{' or '.join(ENDS)}; both by default")
    parser.add_argument("--refresh", action="store_true", help="install anew, with what has been released since")
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix) / "versions", help="of the two environments")
    options = parser.parse_args()
    if unknown := [end for end in options.ends if end not in ENDS]:
        parser.error(f"there is no end {unknown[0]}; use {' or '.join(ENDS)}")
    if sys.prefix == sys.base_prefix:
        stop("run this with the Python of the virtual environment: .venv/bin/python scripts/test_versions.py")
    folders = {end: options.folder.resolve() / end for end in options.ends or ENDS}
    for end, folder in folders.items():
        install(end, folder, refresh=options.refresh)
        print(f"{end} versions: {', '.join(f'{name} {version}' for name, version in versions(folder))}", flush=True)
    start = time.monotonic()
    failed = []
    with ThreadPoolExecutor() as pool:  # each test run is a process of its own
        for end, result in zip(folders, pool.map(run_tests, folders.values()), strict=True):
            print(f"with the {end} versions:\n{result.stdout}", flush=True)
            failed += [end] if result.returncode else []
    if failed:
        stop(f"the quick tests fail with the {' and the '.join(failed)} versions that pyproject.toml allows")
    print(f"{' and '.join(folders)} versions passed in {time.monotonic() - start:.0f} s", flush=True)


def install(end: str, folder: Path, *, refresh: bool) -> None:
    """Makes the environment if it is missing, incomplete, or of other requirements."""
    wanted = requirements(end)
    record, complete = folder / "requirements.json", {"requirements": wanted, "base": base_digest()}
    if not refresh and record.exists() and json.loads(record.read_text()) == complete:
        return
    record.unlink(missing_ok=True)
    print(f"installing the {end} versions into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    # The environment's own packages come first on the path, those of .venv after them.
    (site_packages(folder) / "base.pth").write_text(f"{site_packages(Path(sys.prefix))}\n")
    command = [python(folder), "-m", "pip", "--disable-pip-version-check", "install", "--upgrade", *wanted]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        stop(f"pip could not install the {end} versions\n{(result.stdout + result.stderr)[-3000:].rstrip()}")
    record.write_text(json.dumps(complete))


def requirements(end: str) -> list[str]:
    """The core requirements of pyproject.toml: as they are for the newest, pinned to their lower bounds for the oldest.

    Those of the vLLM engine and of the extras stay as they are in .venv.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [text for text in project["dependencies"] if re.split(r"[^\w-]", text)[0] not in SHARED]
    return found if end == "newest" else [lowest(text) for text in found]


def lowest(requirement: str) -> str:
    """`name>=1.2,<2; marker` as `name==1.2; marker`."""
    specifier, _, marker = requirement.partition(";")
    match = re.fullmatch(r"([\w-]+)>=([\w.]+)(,.*)?", specifier.strip())
    if match is None:
        stop(f"pyproject.toml: {requirement} has no lower bound of the form name>=version")
    return f"{match[1]}=={match[2]}" + (f"; {marker.strip()}" if marker else "")


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    """The quick tests there, with every FutureWarning an error; their output is in `stdout`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-W", "error::FutureWarning"]
    options += [f"--deselect={test}" for test in TIMED]
    command = [python(folder), "-m", "pytest", *options, *QUICK_TESTS]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def versions(folder: Path) -> list[tuple[str, str]]:
    """(package, version) of what the tests run with."""
    code = f"import importlib.metadata as m, json; print(json.dumps([(n, m.version(n)) for n in {PRINTED!r}]))"
    result = subprocess.run([python(folder), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def base_digest() -> str:
    """Of the packages in .venv that the environment builds on."""
    names = sorted(path.name for path in site_packages(Path(sys.prefix)).glob("*.dist-info"))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def stop(message: str) -> NoReturn:
    print(f"test_versions.py: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
