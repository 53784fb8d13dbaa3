"""What a step of the CPU engine costs, in counts that no machine's speed changes.

    python tests/bench/step_counts.py        prints the table of test_step_counts.py as it should now be

Owns the counting and the shapes that are counted; the numbers that are right are the test's. See `Counts` for what each
one is, and `stepping` for what a step is.
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
# Python 3.12 calls comprehensions no longer.
UNCOUNTED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# Which arguments of a kernel are weights that it reads from the first byte to the last. Rows of the embedding and of
# the table of cosines, one for each token, are left out.
WEIGHTS: Mapping[str, tuple[int | str, ...]] = {
    "srv_norm": (3,),
    "srv_add_norm": (5,),
    "srv_gate": (),
    "srv_rotary": (),
    "srv_attention": (),
    "srv_linear": (3, 4),
    "srv_scaled_linear": (3, 4, 5),
    "srv_byte_linear": ("weight", "scales", "correction", "bias"),
    "srv_block_linear": ("weight", "bias"),
    "srv_block_rows": (),
    "srv_most_likely": (),
    "srv_draw": (),
}


@dataclass(frozen=True)
class Counts:
    """One step's costs.

    weight_bytes: of the tensors that kernels are given as weights, as often as they are given. kv_bytes: of the keys
    and values that the step's attention reads, as often as it reads them. allocations: tensors whose memory is new.
    native_calls: of the library's kernels, on a tape or not. torch_calls: operators that PyTorch dispatches.
    python_calls: functions of this project's packages, without comprehensions.
    """

    weight_bytes: int
    kv_bytes: int
    allocations: int
    native_calls: int
    torch_calls: int
    python_calls: int


class _Operators(TorchDispatchMode):
    """Counts operators on this thread, and results that lie in no argument's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.fresh = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = _storages((args, kwargs))
        self.calls += 1
        self.fresh += len(_storages(result) - known)
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
    """Counts kernels, and notes at which addresses they read weights, and how much of which pool's pages."""

    def __init__(self) -> None:
        self.count = 0
        self.weights: list[int] = []
        self.pages: list[tuple[int, Fraction]] = []

    def see(self, call: KernelCall) -> None:
        if call.name not in WEIGHTS:
            raise AssertionError(f"{call.name} is new: say in step_counts.WEIGHTS which of its arguments are weights")
        self.count += 1
        places = [call.argument(which) for which in WEIGHTS[call.name]]
        self.weights += [place for place in places if place is not None]
        if call.name == "srv_attention":
            self.pages += [(call.argument(pool), _pages(call)) for pool in ("keys", "values")]


def _pages(call: KernelCall) -> Fraction:
    """What one layer's attention reads of a pool, in pages. To be asked when the call is made."""
    library = load().library
    assert library is not None, "there are no native kernels"
    blocks = library.srv_attention_blocks(ctypes.byref(call.given[1]))
    return Fraction(blocks, call.argument("kv_heads") * call.argument("page_size") // BLOCK_TOKENS)


class CountedEngine:
    """An engine whose steps are counted."""

    def __init__(self, engine: LocalEngine, calls: KernelCalls) -> None:
        self._steps = Stepping(engine)
        self._calls = calls

    def counts(self, shape: str) -> Counts:
        """Those of one of `shapes()`."""
        if shape == PREFILL:
            return self._prefill()
        if shape == SHARED:
            return self._shared()
        prompts = [_prompt(number, PROMPT) for number in range(int(shape.split()[2]))]
        return self._decode(prompts, temperature=1.0, top_p=0.9) if shape == DRAWN else self._decode(prompts)

    def _shared(self) -> Counts:
        """Rows whose prompts begin alike, as the prefix cache knows already."""
        prefix = _prompt(0, PREFIX)
        self._steps.add([prefix], 1)
        self._steps.step()
        self._steps.end(flush=False)
        return self._decode([prefix + _prompt(number, PROMPT) for number in range(1, max(DECODES) + 1)])

    def _decode(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0, top_p: float = 1.0) -> Counts:
        """The third step that all of them decode in, which is captured."""
        rows = len(prompts)
        self._steps.add(prompts, 64, temperature, top_p)
        self._steps.until_all_decode(rows)
        self._steps.step()
        counts, result = self._counted()
        assert result.replayed, f"a step of {rows} rows ran eager"
        self._steps.end()
        return counts

    def _prefill(self) -> Counts:
        """One chunk that ends its prompt, the second of its kind."""
        for number in range(2):
            self._steps.add([_prompt(number, CHUNK)], 1)
            counts, result = self._counted()
            assert not result.replayed
            self._steps.end()
        return counts

    def _counted(self) -> tuple[Counts, Result]:
        kernels = _Kernels()
        self._calls.see = kernels.see
        with _Operators() as operators, _Functions() as functions:
            result = self._steps.step()
        self._calls.see, sizes = None, _sizes()
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
    """Of all tensors in host memory, by address: their bytes, and those of one along the first axis.

    Of several that begin at one address the smallest counts (a weight may be the first in a chunk of memory), in the
    shape whose first axis is the shortest.
    """
    found: dict[int, tuple[int, int]] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu" and each.numel():
            one = (each.nbytes, each.nbytes // (each.shape[0] if each.dim() else 1))
            found[each.data_ptr()] = min(one, found.get(each.data_ptr(), one), key=lambda size: (size[0], -size[1]))
    return found


def shapes() -> list[str]:
    """The steps that are counted."""
    return [*(f"decode of {rows} {'row' if rows == 1 else 'rows'}" for rows in DECODES), SHARED, DRAWN, PREFILL]


def small_gguf(folder: Path) -> Path:
    """A random model of three layers, stored as the demo model is: blocks of 4 bits, and of 8 in the output layer."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 320}
    model = small_model("llama", **sizes, max_position_embeddings=1024, tie_word_embeddings=True)
    path = folder / "small.gguf"
    write_gguf(path, model, "llama", kinds=lambda name: Kind.Q8_0 if "embed" in name else Kind.Q4_1)
    return path


MODELS: Mapping[str, Callable[[Path], Path]] = {"small": small_gguf, "demo": lambda folder: demo_model()}


@contextmanager
def counted_engine(model: str) -> Iterator[CountedEngine]:
    """One for a model of `MODELS`."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        path = MODELS[model](Path(stack.enter_context(TemporaryDirectory())))
        calls = stack.enter_context(KernelCalls())
        engine = stack.enter_context(LocalEngine.launch([*FLAGS, "--model-path", str(path)]))
        yield CountedEngine(engine, calls)


def moved(model: str, shape: str, was: Counts, now: Counts) -> str:
    """Which counts differ, and what to do about it."""
    old, new = asdict(was), asdict(now)
    changes = [f"{name} from {old[name]:,} to {new[name]:,}" for name in old if old[name] != new[name]]
    told = ", ".join(changes).replace(" from", " went from", 1)
    return (
        f"{shape}, {model} model: {told}. If a step is meant to cost that, put what "
        "`python tests/bench/step_counts.py` prints into tests/bench/test_step_counts.py, and say in the commit why; "
        "if not, find what reads, allocates or calls anew."
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
