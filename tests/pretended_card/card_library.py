"""Compiles card.cpp once for each torch and each version of it, into the folder build, which git ignores."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("card.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "pretended_card"


def obstacle() -> str | None:
    """Why there can be no pretended card here; None if there can be one."""
    if compiler() is None:
        return "there is no C++ compiler here (CXX, c++, g++ or clang++)"
    if any((_torch() / "lib").glob("*torch_cuda*")):
        return "this torch is built for CUDA, and a second card beside a real one cannot be pretended"
    return None


def compiler() -> str | None:
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def library() -> Path:
    """The compiled library, which a process loads before it imports torch."""
    torch, source = _torch(), SOURCE.read_bytes()
    path = FOLDER / f"{hashlib.sha256((torch / 'version.py').read_bytes() + source).hexdigest()[:16]}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")  # the workers of a suite may all compile it
        include, lib = torch / "include", torch / "lib"
        options = ("-std=c++20", "-O0", "-fPIC", "-shared", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}")
        libraries = (f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10")
        subprocess.run([str(compiler()), *options, str(SOURCE), "-o", str(unfinished), *libraries], check=True)
        unfinished.replace(path)
    return path


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
