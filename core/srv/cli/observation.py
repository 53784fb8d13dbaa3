"""What `srv launch` sets up to be observed by: traces, crash dumps, the HTTP log, the watch over garbage collection.

Everything that can be refused is refused before weights are read. Must not know how any of it works.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection
from srv.io.gc_watch import watch_collections

if TYPE_CHECKING:
    from srv.args.statement import Resolved
    from srv.server.observe.crash_dump import CrashRecorder
    from srv.server.observe.tracing import Tracer


class Observation:
    """What the arguments ask for. `recorder`, `tracer`: None if they do not ask for crash dumps, or for traces.

    Raises Refusal if something cannot be set up.
    """

    def __init__(self, resolved: Resolved, model: str) -> None:
        observe = resolved.config.observe
        self.recorder = _recorder(resolved, model) if observe.crash_dump_folder is not None else None
        self.tracer = _tracer(resolved, model) if observe.enable_trace else None
        watch_collections(observe.gc_warning_threshold_secs)
        if observe.log_level_http is not None:
            for name in ("uvicorn", "srv.server.http"):
                logging.getLogger(name).setLevel(observe.log_level_http.upper())

    def close(self, lost: bool) -> None:
        """The server has ended; lost: because its engine did."""
        if lost and self.recorder is not None:
            self.recorder.dump("the engine process has ended")
        if self.tracer is not None:
            self.tracer.close()


def _recorder(resolved: Resolved, model: str) -> CrashRecorder:
    from srv.server.observe.crash_dump import CrashRecorder

    folder = resolved.config.observe.crash_dump_folder
    assert folder is not None
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "srv may not write there"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        who = resolved.provenance["crash_dump_folder"].owner
        remedy = "Choose a folder that this user may write to, or leave it out."
        raise Refusal([Rejection("folder_unusable", "crash_dump_folder", str(folder), who, reason, remedy)])
    return CrashRecorder(folder, {"model": model, "arguments": resolved.describe()})


def _tracer(resolved: Resolved, model: str) -> Tracer:
    from srv.server.observe.tracing import make_tracer

    endpoint = resolved.config.observe.oltp_traces_endpoint
    return make_tracer(model, endpoint, resolved.provenance["enable_trace"].owner)
