"""A driver that starts Ray and an actor which is busy, says the ids of its processes, and sleeps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from cluster_members import SPEC

from rlft.system.process.ray_actors import RayActors
from rlft.system.process.ray_session import RaySession


def main() -> None:
    folder = Path(sys.argv[1])
    launcher = RayActors(folder, RaySession(None, log=folder / "ray.log"))
    member = launcher.start(replace(SPEC, arguments={"start": 1}))
    pid = member.call("facts").result(60)["pid"]
    member.call("sleep", 600)
    print(json.dumps({"actor": pid}), flush=True)
    if sys.argv[2:] == ["close"]:
        launcher.close()
        return
    time.sleep(600)


if __name__ == "__main__":
    main()
