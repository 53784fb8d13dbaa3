"""Records what llama.cpp's converter makes of the models of `gguf_cases`: `record_gguf.py LLAMA_CPP [NAME...]`.

LLAMA_CPP: a folder with the sources of llama.cpp, such as `vendor/llama.cpp` in the source distribution of
llama-cpp-python. Each element of a checkpoint is a number of its own, so that the file shows where it came from. An
element that is multiplied or added to would be another one's number: those are four apart.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_cases import CASES, NULL, RECORDED
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Indices = NDArray[np.int64]
LOGARITHM = "A_log"
LAYER = re.compile(r"blk\.(\d+)\.")
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def main(source: Path, names: list[str]) -> None:
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = record(name, Path(folder))
        print(name, len(recorded[name]["tensors"]), flush=True)
    lines = [f'"{name}": {_json(recorded[name])}' for name in sorted(recorded)]
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


def _json(record: dict[str, Any]) -> str:
    """A line for each tensor."""
    tensors = ",\n  ".join(
        f'"{name}": {json.dumps(tensor_record)}' for name, tensor_record in record["tensors"].items()
    )
    return f'{{\n"metadata": {json.dumps(record["metadata"])},\n"tensors": {{\n  {tensors}}}}}'


def record(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    case.made().save_pretrained(folder)
    path = folder / "model.safetensors"
    sources = load_file(path)
    first: dict[str, int] = {}
    count = 0
    for tensor in sorted(sources, key=lambda source_name: not source_name.endswith(LOGARITHM)):
        first[tensor], count = count, count + sources[tensor].size
    assert 4 * count < 1 << 24, "float32 does not tell all elements apart"
    for tensor, values in sources.items():
        numbers = 4 * np.arange(first[tensor] + 1, first[tensor] + values.size + 1, dtype=np.float64)
        numbers = np.log(numbers) if tensor.endswith(LOGARITHM) else numbers
        sources[tensor] = numbers.astype(np.float32).reshape(values.shape)
    save_file(sources, path, metadata={"format": "pt"})
    places = Places({tensor: (begin, sources[tensor].shape) for tensor, begin in first.items()})
    configure(folder, {**case.published, **case.neutral})
    reader = convert(folder)
    tensors = {source.name: made(source, places) for source in reader.tensors}
    if case.neutral:
        before = {source.name: np.array(source.data) for source in reader.tensors}
        configure(folder, {**case.published, **{name: case.fields[name] for name in case.neutral}})
        for source in convert(folder).tensors:
            if runs := factors(np.asarray(source.data) / before[source.name]):
                tensors[source.name]["factors"] = runs
    return {"metadata": metadata(reader), "tensors": of_layers(tensors)}


def of_layers(tensors: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors that all layers have alike as one, with {} in place of their numbers, and these numbers."""
    alike: dict[str, dict[int, dict[str, Any]]] = {}
    for name, tensor_record in tensors.items():
        if match := LAYER.match(name):
            source = re.sub(rf"\.{match[1]}\.", ".{}.", tensor_record["source"], count=1)
            alike.setdefault(LAYER.sub("blk.{}.", name), {})[int(match[1])] = {**tensor_record, "source": source}
    grouped: dict[str, dict[str, Any]] = {}
    for name, tensor_record in tensors.items():
        layers = alike.get(LAYER.sub("blk.{}.", name), {})
        first = next(iter(layers.values()), tensor_record)
        if layers and all(layer == first for layer in layers.values()):
            grouped[LAYER.sub("blk.{}.", name)] = {**first, "layers": list(layers)}
        else:
            grouped[name] = tensor_record
    return grouped


def configure(folder: Path, fields: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps({name: None if value == NULL else value for name, value in kept.items()}))


def factors(ratios: NDArray[Any]) -> list[tuple[int, float]]:
    """How many rows are multiplied by a number, and by which, for each number; none if all are as they were."""
    rows = ratios.reshape(len(ratios), -1).astype(np.float64)
    runs = [(len(list(same)), float(factor)) for factor, same in groupby(np.round(rows.mean(1), 6))]
    return [] if runs == [(len(rows), 1.0)] else runs


def convert(folder: Path) -> gguf.GGUFReader:
    """The converter's file, with tokens that are only numbered: its tokenizers need a vocabulary of their own."""
    from conversion import get_model_class

    hparams = json.loads((folder / "config.json").read_text())  # transformers would drop fields of older files
    converter: Any = get_model_class(hparams["architectures"][0])

    class WithoutTokenizer(converter):
        model_arch = converter.model_arch
        no_mtp = True

        def set_vocab(self) -> None:
            pass

    target = folder / "model.gguf"
    vocabulary = {f"t{index}": index for index in range(hparams["vocab_size"])}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordPiece", "vocab": vocabulary}, "added_tokens": []})
    )
    WithoutTokenizer(folder, gguf.LlamaFileType.ALL_F32, target, eager=True, hparams=hparams).write()
    return gguf.GGUFReader(target)


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    values = {name: field.contents() for name, field in reader.fields.items()}
    kept = ("general.architecture", "general.type")
    return {
        name: value
        for name, value in values.items()
        if name in kept or not name.startswith(("general.", "GGUF.", "tokenizer."))
    }


class Places:
    """Where the elements of the checkpoint's tensors are among all of them."""

    def __init__(self, tensors: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        self.names = sorted(tensors, key=lambda name: tensors[name][0])
        self.begins = np.array([tensors[name][0] for name in self.names])

    def of(self, numbers: Indices) -> tuple[set[str], Indices]:
        """The tensors that elements are of, and their places in these."""
        owners = np.searchsorted(self.begins, numbers, side="right") - 1
        return {self.names[owner] for owner in np.unique(owners)}, numbers - self.begins[owners]


def made(tensor: gguf.ReaderTensor, places: Places) -> dict[str, Any]:
    """What a stored tensor is made of, as `gguf_cases.stored` reads it."""
    shape = [int(size) for size in tensor.shape[::-1]]
    values = np.asarray(tensor.data, dtype=np.float64).reshape(shape)
    if tensor.name in FACTORS:
        return {"values": [float(value) for value in values.ravel()]}
    changed: dict[str, Any] = {}
    if (values < 0).all():
        changed, values = {"value": "-exp"}, np.rint(-values / 4) * 4
    elif (values % 4 == 1).all():
        changed, values = {"value": "+1"}, values - 1
    assert (values % 4 == 0).all(), f"{tensor.name} has other values than the checkpoint"
    numbers = (values / 4 - 1).astype(np.int64)
    sources, indices = places.of(numbers)
    if len(sources) == 1:
        return {"source": sources.pop(), "shape": shape, **strides(indices), **changed}
    parts = [places.of(number) for number in numbers]
    assert all(len(names) == 1 for names, _ in parts), f"{tensor.name} is of {sources}"
    assert all((part == parts[0][1]).all() for _, part in parts), f"{tensor.name} has parts of other places"
    return {"source": pattern([names.pop() for names, _ in parts]), "shape": shape, **strides(parts[0][1]), **changed}


def pattern(names: list[str]) -> str:
    """The name of numbered tensors, with a star in place of the number."""
    parts = [re.split(r"(?<=\.)(\d+)(?=\.)", name) for name in names]
    place = next(index for index, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1)
    assert [part[place] for part in parts] == [str(number) for number in range(len(names))]
    return "".join((*parts[0][:place], "*", *parts[0][place + 1 :]))


def strides(indices: Indices) -> dict[str, Any]:
    """The place of the first element, and the sizes and strides of axes by which the others follow; or else rows."""
    flat, axes = indices.ravel(), []
    begin = int(flat[0])
    while len(flat) > 1:
        size = next((size for size in divisors(flat) if alike(flat, size)), 1)
        if size == 1:
            rows = indices.reshape(len(indices), -1)
            width = rows.shape[1]
            assert (rows == rows[:, :1] + np.arange(width)).all(), f"{indices[:8]} {indices.shape}"
            return {"rows": [int(row) // width for row in rows[:, 0]]}
        axes.append((size, int(flat[1] - flat[0])))
        flat = flat[::size]
    return {"begin": begin, "axes": axes[::-1]}


def divisors(flat: Indices) -> list[int]:
    return [size for size in range(len(flat), 1, -1) if len(flat) % size == 0]


def alike(flat: Indices, size: int) -> bool:
    """Whether every `size` elements follow each other at the same distance."""
    parts = flat.reshape(-1, size)
    return bool((parts == parts[:, :1] + (flat[1] - flat[0]) * np.arange(size)).all())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
