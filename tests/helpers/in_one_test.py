"""Many small cases as one test: a suite of thousands of items spends minutes on the items themselves."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

NAME_LENGTH = 200


def each(names: str | Sequence[str], cases: Iterable[Any], ids: Any = None) -> Callable[[Callable[..., None]], Any]:
    """As `pytest.mark.parametrize`, but one test tries all cases; its failure holds that of each case, with its name.

    For tests whose fixtures keep nothing from one case to the next: what is patched is patched for all cases, and a
    temporary folder is the same one.
    """
    if several := not isinstance(names, str) or "," in names:
        names = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    all_names = list(names) if several else [names]
    tried = [(tuple(case) if several else (case,)) for case in cases]
    assert tried, "a test without cases cannot fail"

    def named(index: int) -> str:
        if ids is not None and not callable(ids):
            return ids[index]
        shown = ", ".join(repr(value) if ids is None else str(ids(value)) for value in tried[index])
        return shown[:NAME_LENGTH]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def try_all(**fixtures: Any) -> None:
            failures = []
            for index, values in enumerate(tried):
                try:
                    test(**fixtures, **dict(zip(all_names, values, strict=True)))
                except Exception as error:
                    error.add_note(f"in the case {named(index)}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(tried)} cases fail", failures)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in all_names]
        try_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return try_all

    return decorate
