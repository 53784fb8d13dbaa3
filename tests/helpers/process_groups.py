"""Which tests share a process with `--dist loadgroup`: those of a file with an `xdist_group`; others run one by one.

xdist's own scheduler looks for groups in the ids of tests, where pytest 9.1 and later do not show them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling


def scheduling(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """What xdist asks for the units that it distributes."""

    @cache
    def has_group(file: str) -> bool:
        return "xdist_group" in Path(config.rootpath, file).read_text(encoding="utf-8")

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if has_group(file) else nodeid

    return Scheduling(config, log)
