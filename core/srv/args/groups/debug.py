"""Arguments for debugging a model or the engine."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import json_list
from srv.args.spec import Arg


class DebugArgs(NamedTuple):
    """What is dumped, checked or hooked."""

    debug_tensor_dump_output_folder: Annotated[
        Path | None,
        Arg(
            "Folder to which the outputs of the model's modules are dumped, one file per step. Needs --disable-graphs."
        ),
    ] = None
    debug_tensor_dump_input_file: Annotated[
        Path | None,
        Arg("File with the token ids of a prompt, as a JSON list; only steps with such a request are dumped."),
    ] = None
    debug_tensor_dump_inject: Annotated[
        bool,
        Arg(
            "Feed each layer the input that another implementation dumped.",
            planned="srv cannot read the dumps of other implementations, whose formats are not documented",
        ),
    ] = False
    debug_tensor_dump_prefill_only: Annotated[bool, Arg("Dump only steps that compute positions of a prompt.")] = False
    enable_nan_detection: Annotated[
        bool,
        Arg(
            "Log the first module of a step whose output has a NaN. Costs one read of the device per step; captured "
            "steps are not searched, so use it with --disable-graphs. Requests whose logits are not finite end with an "
            "error anyway."
        ),
    ] = False
    crash_on_nan: Annotated[
        bool, Arg("Stop the server if logits are NaN or infinite; without it, only the request ends.")
    ] = False
    forward_hooks: Annotated[
        str | None,
        Arg(
            "JSON list of forward hooks, functions of installed packages that are called with the output of selected "
            "modules (docs/hooks.md). Needs --disable-graphs.",
            json_list(),
            metavar="JSON",
        ),
    ] = None
