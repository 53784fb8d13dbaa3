"""Long garbage collections are logged if that is asked for, and only those."""

from __future__ import annotations

import subprocess
import sys

from srv_matrix.pytest_plugin import covers

SOURCE = """
import gc, logging, time
from srv.io.gc_watch import watch_collections
logging.basicConfig(level="INFO", format="%(message)s")
gc.disable()
watch_collections({threshold})
before = len(gc.callbacks)
held = [[number] for number in range(2_000_000)]
gc.collect()
time.sleep(0.5)
print(before)
"""


def run(threshold: float) -> tuple[int, str]:
    """The number of callbacks of the collector, and the log, of a process with one long collection."""
    command = [sys.executable, "-c", SOURCE.format(threshold=threshold)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout), done.stderr


@covers("gc_warning_threshold_secs=0.01", platform="cpu")
def test_a_long_collection_is_logged() -> None:
    callbacks, log = run(0.01)
    assert "a garbage collection of generation 2 took" in log
    assert callbacks == 1
    assert run(1000)[1] == ""
    assert run(0.0) == (0, "")
