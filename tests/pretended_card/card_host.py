"""`rlft` in a process with the pretended card: `card_host.py <library> <a file> <launcher.py's arguments>`.

Its kind is the variable RLFT_CARD of a run, cuda by default; with RLFT_COUNTED times are counts of calls. The file gets
a line of JSON from each run at its end: what it did on the card. Besides the commands of rlft there is one more,
`found <module:function> <a file> ..`, which writes what a function (of card_checks.py, card_updates.py, ..) returns.
"""

import ctypes
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_OF_THE_CARD = ("versions", "hub", "sandbox")
HERE = Path(__file__).resolve().parent
HELPERS = HERE.parent / "helpers"


def main() -> None:
    library, report, *arguments = sys.argv[1:]
    loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    sys.path[:0] = [str(HERE), str(HELPERS)]
    import torch

    torch.set_num_threads(1)
    import card_checks
    import card_graphs
    import card_shared
    import card_updates
    import composed_once
    import counted_clock
    import pretended_card

    from rlft import cli
    from rlft.commands.doctor import command as doctor, trial
    from rlft.system.process.child import function_of

    _ = card_checks, card_graphs, card_shared, card_updates  # imported once, not by each process
    composed_once.install()
    of_rlft = cli.main

    def reported() -> None:
        torch.set_num_threads(1)  # a fork's first threads would make its pool at the same time
        kind = os.environ.get("RLFT_CARD", "cuda")
        pretended_card.install(loaded, kind)
        pretended_card.install_in_workers(library, report, kind)
        if "RLFT_COUNTED" in os.environ:
            counted_clock.install()
        try:
            if sys.argv[1] == "found":
                _, _, function, file, *names = sys.argv
                Path(file).write_text(json.dumps(function_of(function)(*names)))
            else:
                of_rlft()
        finally:
            counts = pretended_card.COUNTS
            with Path(report).open("a") as stream:
                stream.write(json.dumps({"launches": counts.launches, "tensors": counts.tensors}) + "\n")

    doctor.run_checks = checked_here
    trial.SCALES = dict.fromkeys(("cuda", "cpu"), trial.SCALES["cpu"])
    cli.main = reported
    sys.argv = [str(HELPERS / "launcher.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def checked_here(checks: Any, opens: str, settings: Any, folder: Path, tell: Any) -> Iterator[Any]:
    """The doctor's rows from this process, for those that it asks elsewhere know of no card."""
    from rlft.commands.doctor.command import row_of
    from rlft.system.process.child import function_of

    opened = function_of(opens)(settings, folder, ())
    for check in (check for check in checks if check.name not in NOT_OF_THE_CARD):
        try:
            yield from function_of(check.function)(opened)
        except Exception as error:
            yield row_of(check, error)


if __name__ == "__main__":
    main()
