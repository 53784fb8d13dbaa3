"""The memory ledger: what each part of a rank's memory was predicted to take, and what it takes.

    predict(...) ──► lines of `srv plan` and of a launch ──► Ledger.measure(...) as the rank starts ──► /get_server_info

A line is measured only where a figure exists that means the same: the bytes of tensors, or what the platform says that
this process has allocated (`Platform.memory_use`). Otherwise its note says why there is none. When memory runs out,
`Ledger.exhausted` names the line that was wrong and the arguments that help. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.errors import OutOfMemory, is_out_of_host_memory
from srv.io.memory_lines import ACTIVATIONS, MemoryLine
from srv.planning.budget import Budget, loaded_bytes, weight_bytes
from srv.planning.pools import bytes_per_page
from srv.planning.states import bytes_per_slot
from srv.planning.steps import rows_to_capture
from srv.specs import ModelFacts

WEIGHTS, PREPARED, POOL, STATES = "weights", "prepared weights", "KV pool", "recurrent states"
BUFFERS, GRAPHS = "backend buffers", "graphs"
CAPTURED_LOGITS, CAPTURED_INPUTS = "captured logits", "captured inputs"
RUNTIME = "runtime"
STEP_PARTS = ("activations", "sampling", "steps")
"""Parts of `reserved_memory` that a step needs while it runs, and that one peak measures."""
EXACT = (WEIGHTS, POOL, STATES, CAPTURED_LOGITS, CAPTURED_INPUTS)
"""Lines that are predicted from the sizes of tensors, so that a difference is a mistake. The others are estimates."""

_SMALLER_GRAPHS = "Lower --graph-max-batch-size, or set --disable-graphs."
_FEWER_WEIGHTS = "Use more devices with --tp-size, a quantized checkpoint, or a device with more memory."
_REMEDIES = {
    WEIGHTS: _FEWER_WEIGHTS,
    PREPARED: _FEWER_WEIGHTS,
    POOL: "Lower --max-total-tokens or --mem-fraction-static.",
    STATES: "Lower --max-running-requests or --max-mamba-cache-size.",
    BUFFERS: "Lower --max-running-requests or --mem-fraction-static.",
    GRAPHS: _SMALLER_GRAPHS,
    CAPTURED_LOGITS: _SMALLER_GRAPHS,
    CAPTURED_INPUTS: _SMALLER_GRAPHS,
    ACTIVATIONS: "Lower --chunked-prefill-size, --max-running-requests or --mem-fraction-static.",
    RUNTIME: "Lower --mem-fraction-static.",
}
_OF_HOST = "Or free memory, or raise the limit of the process (ulimit -v shows it; or that of its container)."


def predicted_text(line: MemoryLine) -> str:
    """The prediction of a line, after its name."""
    amount = "no claim is made" if line.predicted is None else _bytes(line.predicted)
    return f"{amount}, {line.note}" if line.note else amount


def line_text(line: MemoryLine) -> str:
    """Both figures of a line and their difference, after its name."""
    predicted = "no prediction" if line.predicted is None else f"{_bytes(line.predicted)} predicted"
    measured = "not measured" if line.measured is None else f"{_bytes(line.measured)} measured"
    share = "" if line.excess is None else f" ({line.excess:+.1%})"
    return f"{predicted}, {measured}{share}{f'; {line.note}' if line.note else ''}"


def predict(
    config: Config, model: ModelFacts, reserved: Mapping[str, float], budget: Budget | None = None
) -> tuple[MemoryLine, ...]:
    """The lines of one rank, in the order in which it allocates. `reserved`: the parts of `reserved_memory`, in bytes.

    The pool and the inputs of captured steps are predicted only with a budget.
    """
    logits, inputs = captured_bytes(config, model, budget)
    pool = None if budget is None else pool_bytes(config, model, budget)
    graphs = None if GRAPHS not in reserved else max(int(reserved[GRAPHS]) - logits - (inputs or 0), 0)
    names = {RUNTIME, GRAPHS, *STEP_PARTS}
    step = [name for name in STEP_PARTS if reserved.get(name)]
    lines = [
        MemoryLine(RUNTIME, int(reserved[RUNTIME]) if RUNTIME in reserved else None),
        MemoryLine(WEIGHTS, loaded_bytes(config, model)),
        MemoryLine(PREPARED, weight_bytes(config, model), note="at most, as the platform repacks them"),
        MemoryLine(POOL, pool),
        *_states(config, model, budget),
        MemoryLine(BUFFERS, None),
    ]
    if logits:
        lines += [MemoryLine(CAPTURED_LOGITS, logits), MemoryLine(CAPTURED_INPUTS, inputs), MemoryLine(GRAPHS, graphs)]
    lines += [MemoryLine(name, int(amount)) for name, amount in reserved.items() if name not in names and amount]
    of = f"of the largest step ({' and '.join(step)} of reserved_memory)" if step else ""
    lines.append(MemoryLine(ACTIVATIONS, int(sum(reserved[name] for name in step)) if step else None, note=of))
    return tuple(lines)


def _states(config: Config, model: ModelFacts, budget: Budget | None) -> tuple[MemoryLine, ...]:
    """The line of recurrent states, with slot 0; () for a model without any."""
    size = bytes_per_slot(config, model)
    if not size:
        return ()
    return (MemoryLine(STATES, None if budget is None else (budget.state_slots + 1) * size),)


def pool_bytes(config: Config, model: ModelFacts, budget: Budget) -> int:
    """The bytes of one rank's KV pool, with page 0 of each group."""
    sizes = bytes_per_page(config, model)
    return sum((group.pages + 1) * size for group, size in zip(budget.groups, sizes, strict=True))


def captured_bytes(config: Config, model: ModelFacts, budget: Budget | None) -> tuple[int, int | None]:
    """The float32 logits of captured steps, and their inputs: tokens, positions, page tables and slots of states."""
    rows = max(rows_to_capture(config), default=0)
    logits = rows * model.vocab_size * 4
    if budget is None:
        return logits, None
    columns = sum(group.pages_for(budget.max_request_tokens) for group in budget.groups)
    slots = 8 if budget.state_slots else 0
    return logits, rows * (8 + 8 + slots + 4 * columns)


class Ledger:
    """The lines of one rank while it starts and runs. `lines` keeps their order."""

    def __init__(self, lines: Sequence[MemoryLine]) -> None:
        self._lines = {line.name: line for line in lines}

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        return tuple(self._lines.values())

    def expect(self, lines: Sequence[MemoryLine]) -> None:
        """Take better predictions; what is measured already stays."""
        measured = self._lines
        self._lines = {
            line.name: msgspec.structs.replace(line, measured=old.measured, note=old.note or line.note)
            if (old := measured.get(line.name)) is not None
            else line
            for line in lines
        }

    def measure(self, name: str, measured: int | None, note: str = "") -> None:
        """Set the figure of a line, or (None) the reason why it has none. A line that is new has no prediction."""
        old = self._lines.get(name, MemoryLine(name, None))
        joined = "; ".join(filter(None, (old.note, note)))
        self._lines[name] = msgspec.structs.replace(old, measured=measured, note=joined)

    def exhausted(self, name: str, error: BaseException, free: int | None) -> OutOfMemory:
        """The error when memory runs out while the line `name` is allocated; `free`: bytes, if known.

        The line that was wrong is the first one whose excess over its prediction is at least half of the largest one,
        and of what is lacking. Without any, it is `name` itself: its own prediction is too small, or does not fit.
        """
        ledger_line = self._lines.get(name, MemoryLine(name, None))
        lacking = 0 if ledger_line.predicted is None or free is None else ledger_line.predicted - free
        over = {line: (line.measured or 0) - (line.predicted or 0) for line in self._lines.values() if line.off}
        enough = max(max(over.values(), default=0) / 2, lacking / 2, 1)
        wrong = next((line for line, excess in over.items() if excess >= enough), None)  # its followers contain it
        detail = str(error).partition("\n")[0] or type(error).__name__
        host = is_out_of_host_memory(error)
        whose = "this process can have no more host memory" if host else "the device has no more memory"
        if wrong is None:
            predicted = "no prediction"
            if ledger_line.predicted is not None:
                predicted = f"{_bytes(ledger_line.predicted)} predicted"
            free_clause = "" if free is None else f", and {_bytes(free)} are free"
            reason = f"{predicted}{free_clause}; no measured line explains what is lacking"
        else:
            reason = line_text(wrong)
        line = (wrong or ledger_line).name
        remedies = [_REMEDIES.get(part, "Lower --mem-fraction-static.") for part in dict.fromkeys((line, name))]
        if host:
            remedies.append(_OF_HOST)
        remedy = " ".join([*remedies, "[out_of_memory]"])
        return OutOfMemory(f"memory ran out for {name}: {whose} ({detail})", line, reason, remedy)


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")
