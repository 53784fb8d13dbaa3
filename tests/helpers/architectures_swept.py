"""Every causal architecture of transformers in a real engine, compared with transformers: one row per model type.

    python tests/helpers/architectures_swept.py support_matrix/architectures.jsonl [MODEL_TYPE ...]

Each is a process of its own, forked from one that has imported what all of them need, so that a crash is one row. With
model types, only their rows of the record are replaced.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures_tiny import TEXT_ALONE, WITHIN_OTHERS, model_class, model_types, tiny_config, tiny_model
from engine_small import messages
from models_small import expected_logits
from safetensors.torch import save_file
from transformers.utils import logging as hf_logging

import srv.models.transformers.hf_model
import srv.worker.rank  # noqa: F401 - imported before the processes are forked
from srv.errors import ModelError, SrvError
from srv.models.base import CausalLM
from srv.models.read import read_facts
from srv.models.transformers.hf_model import HFModel
from srv.specs import Recurrent
from srv.testing.engine import CheckedEngine
from srv_matrix.architectures import FULL, RECURRENT, ArchitectureRow, ArchitectureTable, read_table, write_table

LENGTHS = (3, 9, 17, 30)  # of prompts, which are computed in chunks of CHUNK tokens
CHUNK, OUTPUT = 11, 8
MIN_GAP = 1e-3  # between the two best logits; after a smaller one, tokens may differ
TIMEOUT_S = 90.0
# Buffers of MiniMax that are computed, not loaded.
DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
Row = Callable[[str, Path], ArchitectureRow]


class BuiltEngine(CheckedEngine):
    """An engine whose model can be asked."""

    @property
    def model(self) -> CausalLM:
        model: CausalLM = self.executor.worker.loaded.model
        return model


def row(model_type: str, folder: Path) -> ArchitectureRow:
    """What becomes of one model type. `folder`: an empty one."""
    cls = model_class(model_type)
    about: dict[str, Any] = {
        "model_type": model_type,
        "architecture": cls.__name__,
        "declares": bool(cls._supports_attention_backend),
    }
    if model_type in WITHIN_OTHERS:
        fields = {"model_type": model_type, "architectures": [cls.__name__]}
        (folder / "config.json").write_text(json.dumps(fields))
        return _launched(about, folder, [])
    try:
        model = tiny_model(model_type)
        expected = [_greedy(model, prompt) for prompt in _prompts()]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's
        return ArchitectureRow(**about, outcome="uncomputed", reason=_text(error, folder))
    about["parameters"] = _counted(model)
    config = tiny_config(model_type) if model_type in TEXT_ALONE else model.config
    config.architectures = [cls.__name__]
    config.save_pretrained(folder)
    with suppress(ModelError):
        about["planned"] = read_facts(folder).parameters
    if model_type in TEXT_ALONE:
        _save_within(model, folder)
    else:
        model.save_pretrained(folder)
    with suppress(ModelError):
        if (facts := read_facts(folder)).text_part_of is not None:
            about["parameters"] = facts.parameters  # stored ones of the language model, which is served alone
    return _launched(about, folder, expected)


def _counted(model: Any) -> int:
    """Its parameters, and the buffers that checkpoints store and that are loaded, as the biases of routers."""
    stored = model.state_dict()
    buffers = (buffer for name, buffer in model.named_buffers() if name in stored and not name.endswith(DECAYS))
    return sum(parameter.numel() for parameter in (*model.parameters(), *buffers))


def _launched(about: Mapping[str, Any], folder: Path, expected: list[tuple[list[int], list[float]]]) -> ArchitectureRow:
    try:
        return ArchitectureRow(**about, **_served(folder, expected))
    except SrvError as error:
        code = error.code if isinstance(error, ModelError) else ""
        return ArchitectureRow(**about, outcome="refused", code=code, reason=_text(error, folder))
    except Exception as error:  # noqa: BLE001
        return ArchitectureRow(**about, outcome="failed", reason=_text(error, folder))


def _save_within(model: Any, folder: Path) -> None:
    """Save the weights of a language model under the names that they have in the folder of a vision model."""
    tensors = {
        name.replace("model.", "model.language_model.", 1): parameter for name, parameter in model.named_parameters()
    }
    save_file(
        {name: tensor.detach() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def _served(folder: Path, expected: list[tuple[list[int], list[float]]]) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--model-path", str(folder), "--dtype", "float32", "--page-size", "4"]
    arguments += ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "512", "--max-running-requests", "8"]
    prompts = _prompts()
    with BuiltEngine.launch(arguments) as engine:
        layers = [layer.traits() for layer in engine.model.attention_layers]
        traits = sorted({trait for layer in layers for trait in layer})
        if any(isinstance(group, Recurrent) for group in engine.context.model.cache_groups):
            traits = [*([FULL] if {} in layers else []), *traits, RECURRENT]
        path = "generic" if isinstance(engine.model, HFModel) else "native"
        outputs = [result.tokens for result in engine.generate(messages(prompts, OUTPUT))]
        engine.flush()
        outputs += [engine.generate(messages([prompt], OUTPUT))[0].tokens for prompt in prompts]
    served = {"path": path, "traits": tuple(traits)}
    wrong = [output for output, wanted in zip(outputs, expected * 2, strict=True) if not _same(output, *wanted)]
    if not wrong:
        return {**served, "outcome": "equal"}
    reason = f"{len(wrong)} of {len(outputs)} greedy outputs differ from those of transformers"
    return {**served, "outcome": "different", "reason": reason}


def _prompts() -> list[list[int]]:
    """Each begins with a different token, so that none hits the prefix of another."""
    generator = torch.Generator().manual_seed(5)
    return [
        [10 + number, *torch.randint(3, 97, (length - 1,), generator=generator).tolist()]
        for number, length in enumerate(LENGTHS)
    ]


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, each from a pass over the whole sequence, and the distance to the second best logit."""
    output: list[int] = []
    gaps: list[float] = []
    for _ in range(OUTPUT):
        best = expected_logits(model, torch.tensor(prompt + output))[-1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
    return output, gaps


def _same(output: list[int], expected: list[int], gaps: list[float]) -> bool:
    """Whether tokens are equal up to the first near tie."""
    first = next((at for at, (ours, wanted) in enumerate(zip(output, expected, strict=True)) if ours != wanted), None)
    return first is None or gaps[first] < MIN_GAP


def _text(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).split()).replace(str(folder), "FOLDER").replace(folder.name, "FOLDER")
    return text if isinstance(error, SrvError) else f"{type(error).__name__}: {text}"


def sweep(kinds: Iterable[str], processes: int = 2, row: Row = row) -> Iterator[ArchitectureRow]:
    """The rows of these model types, in the order in which they end."""
    context = multiprocessing.get_context("fork")
    waiting = list(kinds)[::-1]
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            kind = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(row, kind, theirs))
            process.start()
            theirs.close()
            running[ours] = kind, process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for pipe, (kind, process, start) in list(running.items()):
            if pipe in ready:
                answer = _answer(kind, pipe, process)
            elif time.monotonic() - start > TIMEOUT_S:
                process.kill()
                answer = _ended(kind, f"it did not end within {TIMEOUT_S:.0f} s")
            else:
                continue
            process.join()
            del running[pipe]
            yield answer


def _answer(kind: str, pipe: Connection, process: Any) -> ArchitectureRow:
    try:
        swept: ArchitectureRow = pipe.recv()
    except EOFError:
        process.join()
        return _ended(kind, f"its process ended with status {process.exitcode}")
    return swept


def _ended(kind: str, reason: str) -> ArchitectureRow:
    cls = model_class(kind)
    declares = bool(cls._supports_attention_backend)
    return ArchitectureRow(
        model_type=kind, architecture=cls.__name__, declares=declares, outcome="failed", reason=reason
    )


def _child(row: Row, kind: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(row(kind, Path(folder)))


def main(record: Path, kinds: list[str]) -> None:
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    old = read_table(record) if kinds else None
    rows = {} if old is None else {old_row.model_type: old_row for old_row in old.rows}
    for swept in sweep(kinds or model_types()):
        print(swept.model_type, swept.path, swept.outcome, swept.reason, flush=True)
        rows[swept.model_type] = swept
        write_table(record, ArchitectureTable(transformers.__version__, tuple(rows.values())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
