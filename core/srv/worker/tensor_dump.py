"""Dumps the outputs of a model's modules, one file per step (`--debug-tensor-dump-output-folder`).

    FOLDER/rank-0/step-000012.safetensors      model.layers.3.mlp, model.layers.3.self_attn.0, ...

A module with several outputs has one tensor for each, numbered. The metadata of a file say which rows the step had:
request, first position, number of positions. Must not know what the tensors mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from srv.args.groups.debug import DebugArgs
from srv.errors import Refusal, Rejection
from srv.sched.plan import Plan, Start


class TensorDump:
    """The dumps of one rank. prefill_only: of steps that compute a position of a prompt. prompt: of steps with a
    request that has these tokens as its prompt; None: of all steps."""

    def __init__(self, debug: DebugArgs, rank: int) -> None:
        assert debug.debug_tensor_dump_output_folder is not None
        self._folder = debug.debug_tensor_dump_output_folder.expanduser() / f"rank-{rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prefill_only = debug.debug_tensor_dump_prefill_only
        self._prompt = _read_prompt(debug.debug_tensor_dump_input_file)
        self._requests: dict[int, Start] = {}  # by slot
        self._step: int | None = None  # the step that is being dumped
        self._metadata: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self, plan: Plan) -> None:
        for slot in plan.ends:
            self._requests.pop(slot, None)
        for start in plan.starts:
            self._requests[start.slot] = start
        rows = [(self._requests[row.slot], row) for row in plan.rows]
        if self._prompt is not None:
            rows = [(start, row) for start, row in rows if start.request.tokens == self._prompt]
        if self._prefill_only:
            rows = [(start, row) for start, row in rows if row.computed < len(start.request.tokens)]
        if rows:
            self._step = plan.step
            shown = [
                {"request": self._requests[row.slot].request.id, "position": row.computed, "positions": row.scheduled}
                for row in plan.rows
            ]
            self._metadata = {"rows": json.dumps(shown)}

    def after(self, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        if self._step is None:
            return
        if isinstance(output, torch.Tensor):
            self._tensors[name] = _copied(output)
        elif isinstance(output, tuple | list):
            for number, each in enumerate(output):
                self.after(f"{name}.{number}", inputs, each)

    def end(self) -> None:
        if self._step is not None and self._tensors:
            save_file(self._tensors, self._folder / f"step-{self._step:06}.safetensors", self._metadata)
        self._step, self._tensors = None, {}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _read_prompt(file: Path | None) -> tuple[int, ...] | None:
    """The token ids in a file. Raises Refusal."""
    if file is None:
        return None
    try:
        tokens: object = json.loads(file.expanduser().read_text())
    except (OSError, ValueError) as error:
        raise _refused(file, f"it cannot be read: {error}") from error
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise _refused(file, "it is no JSON list of token ids")
    return tuple(tokens)


def _refused(file: Path, reason: str) -> Refusal:
    remedy = "Pass a file with the token ids of a prompt, such as [1, 2, 3]."
    return Refusal([Rejection("invalid_file", "debug_tensor_dump_input_file", str(file), "the launch", reason, remedy)])
