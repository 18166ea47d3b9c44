"""What is built is whole: the wheel, in a clean environment outside the repository, trains the embedded model."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlft.config import catalog

REPOSITORY = Path(__file__).parents[1]
MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Run = Callable[..., subprocess.CompletedProcess[str]]
PAGE = ("report.html", "report.css", "report.js", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist and the wheel that is built from that sdist, not from the checkout."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a program of a clean environment that holds the wheel, in an empty folder of its own.

    The environment borrows the libraries of this one, so that a test doesn't download a gigabyte: a .pth file puts
    their folder on the path. The .pth files in that folder are not read there, so the checkout, which they name, stays
    out of reach.
    """
    folder = tmp_path_factory.mktemp("environment")
    environment, workplace = folder / "venv", folder / "empty"
    workplace.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, capture_output=True, timeout=120, check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = [str(environment / "bin" / program), *arguments]
        return subprocess.run(words, cwd=workplace, env=variables, capture_output=True, text=True, timeout=300)

    return run


def test_the_wheel_holds_configs_recipes_and_model_once_each(wheel):
    names = Counter(zipfile.ZipFile(wheel).namelist())
    assert max(names.values()) == 1
    configs = catalog.config_folder()
    yaml = [file.relative_to(configs) for file in [*configs.glob("*.yaml"), *configs.glob("*/**/*.yaml")]]
    expected = {f"rlft/configs/{file}" for file in yaml}
    expected |= {f"rlft/configs/recipe/{file.name}" for file in (REPOSITORY / "recipes").glob("*.yaml")}
    tables = ("advice", "alarms", "attacks", "cards", "endpoint_fields", "init/run", "peer_names", "refused", "units")
    expected |= {f"rlft/assets/{name}.yaml" for name in tables}
    assert {name for name in names if name.endswith(".yaml")} == expected
    assets = {"arithmetic-text.jsonl", *(f"tiny-arithmetic/{name}" for name in MODEL), *(f"report/{n}" for n in PAGE)}
    assets |= {f"{model}/{name}" for model in ("tiny-caller", "tiny-chains", "tiny-student") for name in MODEL}
    assets |= {f"tiny-shapes/{name}" for name in (*MODEL, "preprocessor_config.json")}
    assets |= {"usage/plan.txt", "seccomp/x86_64.bpf", "seccomp/aarch64.bpf", "model_card.md.jinja"}
    assert {f"rlft/assets/{name}" for name in assets} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"rlft"}  # and rlft-<version>.dist-info
    assert wheel.stat().st_size < 10 * 10**6


def test_the_sdist_holds_what_a_build_and_the_tests_need(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {
        "pyproject.toml", "LICENSE", "README.md", "configs/train.yaml", "rlft/cli.py", "tests/test_wheel.py",
    } <= names  # fmt: skip
    assert {f"configs/recipe/{recipe}.yaml" for recipe in catalog.choices("recipe")} <= names


def test_what_is_installed_is_the_wheel_and_not_the_checkout(installed):
    done = installed("python", "-c", "import rlft; print(rlft.__file__)")
    assert done.returncode == 0, done.stderr
    assert "/venv/lib/" in done.stdout
    assert str(REPOSITORY) not in done.stdout


@pytest.mark.slow
def test_the_installed_wheel_shows_help_and_recipes_and_trains_the_embedded_model(installed):
    listed = installed("rlft", "recipes")
    assert listed.returncode == 0, listed.stderr
    assert [name for name in catalog.choices("recipe") if name not in re.findall(r"\w+", listed.stdout)] == []
    shown = installed("rlft", "train", "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"algorithm: {', '.join(catalog.choices('algorithm'))}" in shown.stdout
    # A remedy quotes the comment beside the default: that is read from the wheel's own YAML.
    refused = installed("rlft", "train", "steps=0")
    assert refused.returncode == 2
    assert "for instance 100 (training steps" in refused.stderr
    done = installed("rlft", "train", "+recipe=grpo_arithmetic", "steps=1", "eval.num_prompts=4")
    assert done.returncode == 0, done.stderr
    code = "import pathlib; f, = pathlib.Path('runs/grpo_arithmetic').iterdir(); print(*(p.name for p in f.iterdir()))"
    left = installed("python", "-c", code).stdout.split()
    assert {"checkpoints", "config.yaml", "eval.jsonl", "metrics.jsonl", "rollouts"} <= set(left)
