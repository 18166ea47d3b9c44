"""Writes pins/: for each kind of machine one version of every package, for Python 3.12 on Linux (x86-64).

    .venv/bin/python scripts/write_pins.py          # all of them, from the package index
    .venv/bin/python scripts/write_pins.py cuda     # one of them

uv resolves what pyproject.toml asks for, with the versions below; nothing is installed. The extra `dev` has uv.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "pins"
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_28"


@dataclass(frozen=True)
class Pins:
    """A file of pins/.

    Attributes:
        title: what it is for, its first line.
        extras: those of pyproject.toml that it has, beside the core.
        chosen: requirements beside those of pyproject.toml; of everything else the newest release is taken.
        without: packages that are left out of what others ask for.
    """

    title: str
    extras: tuple[str, ...]
    chosen: tuple[str, ...]
    without: tuple[str, ...] = ()


ALL = {
    "cpu": Pins(
        title="rlft on a CPU, with the torch and transformers of `make test`. What torch asks for to use a GPU is not "
        "among them:\n# its build for CPUs, which pip takes where it is offered, does not ask for it.",
        extras=("vision",),
        chosen=("torch==2.13.0", "transformers==5.19.0"),
        without=("cuda-bindings", "cuda-toolkit", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13",
                 "nvidia-nvshmem-cu13", "triton"),
    ),
    "cuda": Pins(
        title="rlft with the newest vLLM that it takes, on an NVIDIA GPU.",
        extras=("vllm", "vision"),
        chosen=("vllm==0.33.0",),
    ),
    "qlora": Pins(
        title="rlft with a vLLM that can hold bitsandbytes' 4-bit weights (model.quantization=4bit), as none can from "
        "0.30 on.",
        extras=("vllm", "quantization", "vision"),
        chosen=("vllm==0.27.1", "transformers==5.17.0"),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the files of pins/.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(ALL)}; all by default")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ALL]:
        parser.error(f"there is no {unknown[0]}; use {', '.join(ALL)}")
    FOLDER.mkdir(exist_ok=True)
    for name in options.names or ALL:
        pins = resolve(name, "\n".join(ALL[name].chosen))
        head = (
            f"# {ALL[name].title}\n# Python {PYTHON}, Linux, x86-64. Made by `python scripts/write_pins.py {name}`.\n"
        )
        (FOLDER / f"{name}.txt").write_text(head + pins, encoding="utf-8")
        print(f"wrote {len(pins.splitlines())} versions to {FOLDER / name}.txt")


def resolve(name: str, requirements: str) -> str:
    """The lines `package==version` with which pip fulfils these, and pyproject.toml with the extras of this file.

    Ends the program where nothing does.
    """
    extras = [word for extra in ALL[name].extras for word in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-python-downloads", "--system-certs"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as left_out:
        left_out.write("\n".join(ALL[name].without))
        left_out.flush()
        command += ["--excludes", left_out.name, *extras, str(ROOT / "pyproject.toml"), "-"]
        result = subprocess.run(command, input=requirements, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"write_pins.py: {name}: {result.stderr.strip()}")
    return result.stdout


if __name__ == "__main__":
    main()
