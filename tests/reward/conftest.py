import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlft.types import Group

# naughty.py is a module of somebody else's, found on the path as theirs would be; workers get the path of their parent.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def group() -> Callable[..., Group]:
    """Makes a group: `group(texts, answer="18", id="p0")`."""
    from reward_groups import make_group

    return make_group
