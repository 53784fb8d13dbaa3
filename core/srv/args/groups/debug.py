"""Arguments for debugging a model or the engine."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import json_list
from srv.args.spec import Arg

_DUMPS = "dumping tensors is not implemented yet"
_NAN = "NaN detection is not implemented yet"


class DebugArgs(NamedTuple):
    """What is dumped, checked or hooked."""

    debug_tensor_dump_output_folder: Annotated[
        Path | None, Arg("Folder to which the tensors of every layer are dumped.", planned=_DUMPS)
    ] = None
    debug_tensor_dump_input_file: Annotated[
        Path | None, Arg("File with the input for which tensors are dumped.", planned=_DUMPS)
    ] = None
    debug_tensor_dump_inject: Annotated[
        bool, Arg("Feed each layer the input that another implementation dumped.", planned=_DUMPS)
    ] = False
    debug_tensor_dump_prefill_only: Annotated[bool, Arg("Dump tensors of prefill only.", planned=_DUMPS)] = False
    enable_nan_detection: Annotated[bool, Arg("Detect and report NaN logits.", planned=_NAN)] = False
    crash_on_nan: Annotated[bool, Arg("Stop the server if logits are NaN.", planned=_NAN)] = False
    forward_hooks: Annotated[
        str | None,
        Arg(
            "JSON list of forward hooks, functions that are called with the tensors of selected layers.",
            json_list(),
            planned="forward hooks are not implemented yet",
            metavar="JSON",
        ),
    ] = None
