"""A driver that joins a Ray cluster, starts an actor which is busy, says the id of its process, and sleeps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from cluster_workers import SPEC

from rlft.system.process.ray_actors import RayActors


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    launcher = RayActors(folder, address)
    worker = launcher.start(replace(SPEC, arguments={"start": 1}))
    pid = worker.call("facts").result(60)["pid"]
    worker.call("sleep", 600)
    print(json.dumps({"actor": pid}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
