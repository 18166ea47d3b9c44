"""A Ray cluster of two "machines": nodes on this machine, with folders for temporary files of their own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlft.system.process import ray_actors

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789" * 4}


@contextmanager
def two_machines(other: Path) -> Iterator[Any]:
    """The first is the driver's and has no cores to give out; `other` is the folder of the second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        # Ray reads them once in a process, when it is imported: they stay.
        for name, value in {**ray_actors.QUIET, **TOKEN}.items():
            os.environ.setdefault(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        cluster.add_node(num_cpus=8, num_gpus=2, env_vars={"TMPDIR": str(other)}, wait=False)
        yield cluster
        cluster.shutdown()
