"""torchvision beside a torch that is built without CUDA, into which its compiled operators do not load.

vLLM reads images with its Python part, which needs none of them but wants two to be declared. It is installed in a
folder of its own (scripts/install.py), so that transformers does not come upon it elsewhere.
"""

import shutil
from pathlib import Path

from install import ASIDE

PACKAGE = """
from pathlib import Path

import torch

own = Path({own!r})
try:
    torch.ops.load_library(own / "_C.so")
except OSError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{{name}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__path__ = [str(own)]
exec(compile((own / "__init__.py").read_text(), own / "__init__.py", "exec"))
"""


def torchvision_in(folder: Path) -> str:
    """Makes a folder whose path in PYTHONPATH gives a process torchvision."""
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision" / "__init__.py").write_text(PACKAGE.format(own=str(ASIDE / "torchvision")))
    for metadata in ASIDE.glob("torchvision-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)
    return str(folder)
