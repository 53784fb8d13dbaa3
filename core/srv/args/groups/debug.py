"""Arguments for those who look for faults in a model or an engine."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import json_list
from srv.args.spec import Arg

_DUMPS = "writing out tensors is not implemented yet"
_NAN = "looking for values that are not numbers is not implemented yet"


class DebugArgs(NamedTuple):
    """What is written out, checked or hooked."""

    debug_tensor_dump_output_folder: Annotated[
        Path | None, Arg("Folder for the tensors of every layer.", planned=_DUMPS)
    ] = None
    debug_tensor_dump_input_file: Annotated[
        Path | None, Arg("File with the input for which tensors are written.", planned=_DUMPS)
    ] = None
    debug_tensor_dump_inject: Annotated[
        bool, Arg("Give each layer the input that another implementation wrote out.", planned=_DUMPS)
    ] = False
    debug_tensor_dump_prefill_only: Annotated[bool, Arg("Write tensors of prompts only.", planned=_DUMPS)] = False
    enable_nan_detection: Annotated[bool, Arg("Report logits that are not numbers.", planned=_NAN)] = False
    crash_on_nan: Annotated[bool, Arg("End the server when logits are not numbers.", planned=_NAN)] = False
    forward_hooks: Annotated[
        str | None,
        Arg(
            "JSON list of functions that are called with the tensors of chosen layers.",
            json_list(),
            planned="hooks into the model are not implemented yet",
            metavar="JSON",
        ),
    ] = None
