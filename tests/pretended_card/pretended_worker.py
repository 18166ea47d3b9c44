"""The pretended card in a process that rlft starts, such as a rank or an engine: it begins before torch is imported."""

import ctypes
import sys


def begin(library: str, report: str, kind: str) -> None:
    loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import pretended_card

    pretended_card.COUNTS.tensors = pretended_card.Noted(report, process=sys.argv[2])
    pretended_card.install(loaded, kind)
