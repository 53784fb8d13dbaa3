"""Long garbage collections are logged if that is asked for, and only those."""

from __future__ import annotations

import subprocess
import sys

from srv_matrix.pytest_plugin import covers

SOURCE = """
import gc, logging, threading
from srv.io.gc_watch import watch_collections
logging.basicConfig(level="INFO", format="%(message)s")
class Heard(logging.Handler):  # comes after the one that writes
    event = threading.Event()
    def emit(self, record):
        self.event.set()
logging.getLogger().addHandler(Heard())
gc.disable()
watch_collections({threshold})
before = len(gc.callbacks)
held = [[number] for number in range(2_000_000)]
gc.collect()
Heard.event.wait({seconds})
print(before)
"""


def run(threshold: float, seconds: float = 0.0) -> tuple[int, str]:
    """The number of callbacks of the collector, and the log, of a process with one long collection.

    It waits for a line of the log, as a thread writes it, but no longer than `seconds`.
    """
    command = [sys.executable, "-c", SOURCE.format(threshold=threshold, seconds=seconds)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(process.stdout), process.stderr


@covers("gc_warning_threshold_secs=0.01", platform="cpu")
def test_a_long_collection_is_logged() -> None:
    callbacks, log = run(0.01, seconds=50.0)
    assert "a garbage collection of generation 2 took" in log
    assert callbacks == 1
    assert run(1000, seconds=0.5)[1] == ""
    assert run(0.0) == (0, "")
