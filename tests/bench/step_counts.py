"""Count what a step of the CPU engine reads, allocates and calls; the counts do not depend on the machine's speed.

    python tests/bench/step_counts.py        prints the current table for test_step_counts.py

Owns the counting and the shapes that are counted; the test has the expected numbers. See `Counts` for the meaning of
each count, and `stepping` for the definition of a step.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from kernel_calls import KernelCall, KernelCalls
from models_small import small_model, write_gguf
from stepping import Stepping

from srv.models.locate import demo_model
from srv.sched.plan import Result
from srv.testing.engine import LocalEngine
from srv_kernels.cpu.library import BLOCK_TOKENS, load

DECODES = (1, 4, 16)
PROMPT = 100
CHUNK = 512
PREFILL = f"prefill of {CHUNK}"
PREFIX = 320
SHARED = f"decode of {max(DECODES)} rows over a prefix of {PREFIX}"
DRAWN = f"decode of {max(DECODES)} rows, drawn from a nucleus"
FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "native", "--page-size", "16"),
    *("--max-running-requests", "16", "--max-total-tokens", "8192", "--chunked-prefill-size", str(CHUNK)),
    *("--graph-batch-sizes", *map(str, DECODES)),
)
PACKAGES = ("srv", "srv_cpu", "srv_kernels")
# Since Python 3.12, most comprehensions are not function calls.
UNCOUNTED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# The arguments of each kernel that are weights, which it reads completely. The embedding and the cosine table are not
# counted, because only one row per token is read.
WEIGHTS: Mapping[str, tuple[int | str, ...]] = {
    "srv_rms_norm": (3,),
    "srv_add_rms_norm": (5,),
    "srv_silu_and_mul": (),
    "srv_rotary": (),
    "srv_attention": (),
    "srv_linear": (3, 4),
    "srv_int8_weight_linear": (3, 4, 5),
    "srv_w8a8_linear": ("weight", "scales", "compensation", "bias"),
    "srv_gguf_linear": ("weight", "bias"),
    "srv_fp8_linear": (3, 4, 5),
    "srv_gguf_rows": (),
    "srv_route": ("bias",),
    "srv_experts": (),  # it reads the chosen experts only
    "srv_most_likely": (),
    "srv_draw": (),
}


@dataclass(frozen=True)
class Counts:
    """The counts of one step.

    weight_bytes: of the weights that are passed to kernels, for each call. kv_bytes: of the keys and values that
    attention reads, for each read. allocations: tensors with newly allocated memory. native_calls: calls of the
    library's kernels, including those of replayed graphs. torch_calls: operators that PyTorch dispatches.
    python_calls: calls of functions of this project's packages, without comprehensions.
    """

    weight_bytes: int
    kv_bytes: int
    allocations: int
    native_calls: int
    torch_calls: int
    python_calls: int


class _Operators(TorchDispatchMode):
    """Counts operators on this thread, and results that do not share the memory of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.fresh = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _storages((args, kwargs))
        self.calls += 1
        self.fresh += len(_storages(result) - inputs)
        return result


def _storages(tree: Any) -> set[int]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}


class _Functions:
    """Counts calls of this project's Python functions on this thread."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> _Functions:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name not in UNCOUNTED:
            self.calls += str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES


class _Kernels:
    """Counts kernels, and records the addresses of weights and the number of pages that are read from each pool."""

    def __init__(self) -> None:
        self.count = 0
        self.weights: list[int] = []
        self.pages: list[tuple[int, Fraction]] = []

    def record(self, call: KernelCall) -> None:
        if call.name not in WEIGHTS:
            raise AssertionError(f"{call.name} is new: list its weight arguments in step_counts.WEIGHTS")
        self.count += 1
        places = [call.argument(which) for which in WEIGHTS[call.name]]
        self.weights += [place for place in places if place is not None]
        if call.name == "srv_attention":
            self.pages += [(call.argument(pool), _pages(call)) for pool in ("keys", "values")]


def _pages(call: KernelCall) -> Fraction:
    """The pages of a pool that one layer's attention reads. Call it at the time of the call."""
    library = load().library
    assert library is not None, "there are no native kernels"
    blocks = library.srv_attention_blocks(ctypes.byref(call.arguments[1]))
    return Fraction(blocks, call.argument("kv_heads") * call.argument("page_size") // BLOCK_TOKENS)


class CountedEngine:
    """Counts the steps of an engine."""

    def __init__(self, engine: LocalEngine, calls: KernelCalls) -> None:
        self._steps = Stepping(engine)
        self._calls = calls

    def counts(self, shape: str) -> Counts:
        """The counts of one of `shapes()`."""
        if shape == PREFILL:
            return self._prefill()
        if shape == SHARED:
            return self._shared()
        prompts = [_prompt(number, PROMPT) for number in range(int(shape.split()[2]))]
        return self._decode(prompts, temperature=1.0, top_p=0.9) if shape == DRAWN else self._decode(prompts)

    def _shared(self) -> Counts:
        """Decode rows whose prompts share a cached prefix."""
        prefix = _prompt(0, PREFIX)
        self._steps.add([prefix], 1)
        self._steps.step()
        self._steps.end(flush=False)
        return self._decode([prefix + _prompt(number, PROMPT) for number in range(1, max(DECODES) + 1)])

    def _decode(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0, top_p: float = 1.0) -> Counts:
        """The third step in which all rows decode, which is replayed."""
        rows = len(prompts)
        self._steps.add(prompts, 64, temperature, top_p)
        self._steps.until_all_decode(rows)
        self._steps.step()
        counts, result = self._counted()
        assert result.way == "graph", f"a step of {rows} rows ran eager"
        self._steps.end()
        return counts

    def _prefill(self) -> Counts:
        """The second prefill of one chunk that completes its prompt."""
        for number in range(2):
            self._steps.add([_prompt(number, CHUNK)], 1)
            counts, result = self._counted()
            assert result.way == "eager"
            self._steps.end()
        return counts

    def _counted(self) -> tuple[Counts, Result]:
        kernels = _Kernels()
        self._calls.on_call = kernels.record
        with _Operators() as operators, _Functions() as functions:
            result = self._steps.step()
        self._calls.on_call, sizes = None, _sizes()
        return Counts(
            weight_bytes=sum(sizes[address][0] for address in kernels.weights),
            kv_bytes=int(sum(pages * sizes[address][1] for address, pages in kernels.pages)),
            allocations=operators.fresh,
            native_calls=kernels.count,
            torch_calls=operators.calls,
            python_calls=functions.calls,
        ), result


def _prompt(number: int, length: int) -> list[int]:
    return [3 + (number * 31 + place * place) % 90 for place in range(length)]


def _sizes() -> dict[int, tuple[int, int]]:
    """The bytes of every CPU tensor, and the bytes per index of its first axis, by address.

    If several tensors start at the same address, the smallest counts (a weight may be the first in a larger buffer),
    with the shape whose first axis is the shortest.
    """
    sizes: dict[int, tuple[int, int]] = {}
    for tensor in gc.get_objects():
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.numel():
            one = (tensor.nbytes, tensor.nbytes // (tensor.shape[0] if tensor.dim() else 1))
            sizes[tensor.data_ptr()] = min(one, sizes.get(tensor.data_ptr(), one), key=lambda size: (size[0], -size[1]))
    return sizes


def shapes() -> list[str]:
    """The steps that are counted."""
    return [*(f"decode of {rows} {'row' if rows == 1 else 'rows'}" for rows in DECODES), SHARED, DRAWN, PREFILL]


def small_gguf(folder: Path) -> Path:
    """A random model of three layers, quantized like the demo model: Q4_1, and Q8_0 in the output layer."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 320}
    model = small_model("llama", **sizes, max_position_embeddings=1024, tie_word_embeddings=True)
    path = folder / "small.gguf"
    write_gguf(path, model, "llama", kinds=lambda name: Kind.Q8_0 if "embed" in name else Kind.Q4_1)
    return path


MODELS: Mapping[str, Callable[[Path], Path]] = {"small": small_gguf, "demo": lambda folder: demo_model()}


@contextmanager
def counted_engine(model: str) -> Iterator[CountedEngine]:
    """A counted engine for a model of `MODELS`."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        path = MODELS[model](Path(stack.enter_context(TemporaryDirectory())))
        calls = stack.enter_context(KernelCalls())
        engine = stack.enter_context(LocalEngine.launch([*FLAGS, "--model-path", str(path)]))
        yield CountedEngine(engine, calls)


def explain_change(model: str, shape: str, was: Counts, now: Counts) -> str:
    """Say which counts differ, and what to do about it."""
    old, new = asdict(was), asdict(now)
    changes = [f"{name} from {old[name]:,} to {new[name]:,}" for name in old if old[name] != new[name]]
    changed = ", ".join(changes).replace(" from", " went from", 1)
    return (
        f"{shape}, {model} model: {changed}. If this is intended, put the output of "
        "`python tests/bench/step_counts.py` into tests/bench/test_step_counts.py, and say why in the commit message; "
        "otherwise find the code that reads, allocates or calls more or less than before."
    )


def main(models: Sequence[str]) -> None:
    lines = []
    for model in models:
        with counted_engine(model) as engine:
            for shape in shapes():
                values = ", ".join(f"{value:_}" for value in asdict(engine.counts(shape)).values())
                lines.append(f'    ("{model}", "{shape}"): Counts({values}),')
    sys.stdout.write("\n".join(["EXPECTED = {", *lines, "}", ""]))


if __name__ == "__main__":
    main(list(MODELS))
