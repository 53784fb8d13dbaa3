"""Arguments of the engine have an effect: two values of each behave differently with a small model.

Each test starts the same engine as `srv launch` with these flags. Arguments of the HTTP server are tested in the same
way on real servers, in `tests/e2e/test_e2e_arguments.py`.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attention_naive import NaiveAttention
from bitsandbytes_weights import Form as NF4Form
from bitsandbytes_weights import write as write_nf4
from engine_small import OUTPUT, Small, engine, make_small, message, messages
from fp8_weights import FORMS as FP8_FORMS
from fp8_weights import write_fp8
from gguf import GGMLQuantizationType
from models_small import codebook_kinds, small_model, write_gguf
from mxfp4_weights import write_compressed
from packed_weights import FORMS, write_packed
from platform_plugins import write_plugin
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.cli.main import main
from srv.commands import StartProfile, StopProfile
from srv.errors import ModelError, Refusal
from srv.platform.interface import AttentionLayer, BackendContext, SamplingBatch
from srv.quantization.formats.online_storage import quantize_int8
from srv.testing.conformance.small import quantize_weights
from srv.testing.engine import CheckedEngine, GenerationResult
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

PAGE = 4
ATTENTION_SLOTS = ("prefill_attention_backend", "decode_attention_backend")
BACKEND = f"""
from srv.platform.facts import BackendSpec, Requires

SPEC = BackendSpec("{{name}}", 1, lambda context: Requires(), "{__name__}:{{target}}", kv_order="page_token_head")
"""


class ZeroAttention(NaiveAttention):
    """Attention whose result is always zero."""

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: object) -> Tensor:
        return torch.zeros_like(q)


class LeastLikely:
    """A sampling backend that takes the least likely token."""

    def __init__(self, context: BackendContext) -> None: ...

    def sample(self, batch: SamplingBatch) -> Tensor:
        return batch.logits.argmin(-1)


needs_native = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def zero_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention backend "zero" is installed for the CPU platform."""
    source = BACKEND.format(name="zero", target="ZeroAttention")
    write_plugin(tmp_path, "zero", source, group="srv.backends.attention", entry="cpu.zero", attribute="SPEC")
    monkeypatch.syspath_prepend(tmp_path)


def tokens(small: Small, **flags: object) -> list[list[int]]:
    """The output of an engine with these arguments for the prompts."""
    with engine(small, **flags) as served:
        return [result.tokens for result in served.generate(messages(small.prompts))]


def refusal(small: Small, **flags: object) -> str:
    """The code of the first refusal of an engine with these arguments."""
    with pytest.raises((Refusal, ModelError)) as refused, engine(small, **flags):
        pass
    error = refused.value
    return error.rejections[0].code if isinstance(error, Refusal) else error.code


# ---- model

GGUF_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # multiples of a block of 32


@covers("model_path", platform="cpu")
def test_model_path(small: Small, other: Small) -> None:
    assert tokens(small) == small.tokens
    assert tokens(small, model_path=other.folder) != small.tokens
    assert tokens(other) == other.tokens


@covers("revision", platform="cpu", note="a made-up hub")
def test_revision(small: Small, other: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each revision of a hub's model has its own folder; a local model has no revisions."""
    import huggingface_hub

    folders = {"v1": str(small.folder), "v2": str(other.folder)}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision, **more: folders[revision])
    assert tokens(small, model_path="org/name", revision="v1") == small.tokens
    assert tokens(small, model_path="org/name", revision="v2") != small.tokens
    assert refusal(small, revision="v1") == "revision_without_hub"


def test_tokenizer_of_a_hub_model_is_in_its_snapshot_folder(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **more: str(small.folder))
    with engine(small, model_path="org/name") as served:
        assert served.context.resolved.config.model.tokenizer_path == str(small.folder)


@covers("context_length=50", platform="cpu")
def test_context_length(small: Small) -> None:
    def answer(**flags: object) -> GenerationResult:
        with engine(small, **flags) as served:
            return served.generate([message("a", small.prompts[-1], 60)])[0]

    shortened = answer(context_length=50)
    assert len(answer().tokens) == 60
    assert len(shortened.tokens) == 50 - len(small.prompts[-1])
    assert refusal(small, context_length=257) == "context_over_model"


@covers("dtype=float32", "dtype=bfloat16", "dtype=float16", "dtype=auto", platform="cpu")
def test_dtype(small: Small, tmp_path: Path) -> None:
    """In 16 bits the same prompt has slightly different logprobs. auto is the dtype of the checkpoint."""
    exact, coarse, halves = (_logprobs(small, dtype=dtype) for dtype in ("float32", "bfloat16", "float16"))
    assert exact == pytest.approx(_expected(small), abs=1e-3)
    for rounded, far in ((coarse, 1.2), (halves, 0.2)):
        assert rounded == pytest.approx(exact, abs=far)
        assert rounded != pytest.approx(exact, abs=1e-4)
    assert halves != pytest.approx(coarse, abs=1e-3)
    assert _logprobs(small, dtype="auto") == exact
    copy.deepcopy(small.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert _logprobs(small, dtype="auto", model_path=tmp_path) == coarse


@covers("kv_cache_dtype=auto", "kv_cache_dtype=bfloat16", "kv_cache_dtype=float32", platform="cpu")
def test_kv_cache_dtype(small: Small) -> None:
    """With keys and values in bfloat16, prompts are read from the KV pool with less precision."""
    exact, coarse = _logprobs(small), _logprobs(small, kv_cache_dtype="bfloat16")
    assert coarse == pytest.approx(exact, abs=0.3)
    assert coarse != pytest.approx(exact, abs=1e-3)
    kept, rounded = (_logprobs(small, dtype="float16", kv_cache_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert rounded == pytest.approx(kept, abs=0.3)
    assert rounded != pytest.approx(kept, abs=1e-3)


@needs_native
@covers("kv_cache_dtype=float16", "kv_cache_dtype=int8", platform="cpu")
def test_kv_cache_dtype_of_native_attention(tmp_path: Path) -> None:
    """float16 has a precision of eleven bits, int8 of eight with a scale: both are less exact than float32."""
    small = make_small("llama", tmp_path, head_dim=16)
    exact = _logprobs(small, page=16)
    halves, bytes_ = (_logprobs(small, page=16, kv_cache_dtype=dtype) for dtype in ("float16", "int8"))
    assert halves == pytest.approx(exact, abs=0.1)
    assert halves != pytest.approx(exact, abs=1e-4)
    assert bytes_ == pytest.approx(exact, abs=0.5)
    assert bytes_ != pytest.approx(halves, abs=1e-3)


@needs_native
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_graphs_and_shared_prefixes_with_a_pool_of_another_dtype(tmp_path: Path, dtype: str) -> None:
    """The output is the same whether steps are replayed or not, and whether the prompt is cached or not."""
    small = make_small("llama", tmp_path, head_dim=16)
    outputs = []
    for flags in ({"graph_batch_sizes": "1,2,4"}, {"disable_graphs": True}):
        with engine(small, page=16, kv_cache_dtype=dtype, **flags) as served:
            cold = served.generate(messages(small.prompts, logprobs=1))
            warm = served.generate(messages(small.prompts, logprobs=1))
        assert [result.tokens for result in warm] == [result.tokens for result in cold]
        outputs.append([result.tokens for result in cold])
    assert outputs[0] == outputs[1]


def _logprobs(small: Small, **flags: object) -> list[float]:
    """The logprobs of the last prompt's tokens (without the first), computed in chunks."""
    with engine(small, chunk=5, **flags) as served:
        (result,) = served.generate([message("a", small.prompts[-1], 1, prompt_logprobs=1)])
    return [entry.logprob for entry in result.prompt_logprobs]


def _expected(small: Small) -> list[float]:
    prompt = small.prompts[-1]
    return small.logprobs(prompt)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()


@covers(*(f"load_format={name}" for name in ("safetensors", "dummy", "gguf", "auto")), platform="cpu")
def test_load_format(small: Small, tmp_path: Path) -> None:
    """auto reads the format that is there, and each other one refuses the other."""
    file = tmp_path / "model.gguf"
    write_gguf(file, small.model, "llama")
    for format, path, missing in (("safetensors", small.folder, "gguf"), ("gguf", file, "safetensors")):
        for name in (format, "auto"):
            assert tokens(small, model_path=path, load_format=name) == small.tokens
        assert refusal(small, model_path=path, load_format=missing) == "format_not_there"
    assert tokens(small, load_format="dummy") != small.tokens


@covers("quantization=modelslim", "quantization=gguf", "quantization=w8a8_int8", platform="cpu")
def test_quantization(small: Small, tmp_path: Path) -> None:
    """The method of the checkpoint is accepted, others are refused. Outputs of int8 weights are nearly the same."""
    eight = tmp_path / "eight"
    shutil.copytree(small.folder, eight)
    weights, kinds = quantize_weights(load_file(small.folder / "model.safetensors"))
    save_file(weights, eight / "model.safetensors")
    (eight / "quant_model_description.json").write_text(json.dumps(kinds))
    logprobs = _logprobs(small, model_path=eight, quantization="modelslim")
    assert logprobs == _logprobs(small, model_path=eight)
    distances = [abs(one - two) for one, two in zip(logprobs, _expected(small), strict=True)]
    assert 0.001 < max(distances) < 1.0
    assert refusal(small, model_path=eight, quantization="gguf") == "other_method"
    assert refusal(small, quantization="modelslim") == "other_method"

    file = tmp_path / "model.gguf"
    write_gguf(file, small_model("llama", **GGUF_SIZES), "llama", GGMLQuantizationType.Q8_0)
    plain = tokens(small, model_path=file)
    assert tokens(small, model_path=file, quantization="gguf") == plain
    assert refusal(small, model_path=file, quantization="modelslim") == "other_method"

    rows = tmp_path / "rows"
    shutil.copytree(small.folder, rows)
    _quantize_rows(rows)
    logprobs = _logprobs(small, model_path=rows, quantization="w8a8_int8")
    assert logprobs == _logprobs(small, torchao_config="int8dq")
    distances = [abs(one - two) for one, two in zip(logprobs, _expected(small), strict=True)]
    assert 0.001 < max(distances) < 1.0
    assert logprobs == _logprobs(small, quantization="w8a8_int8"), "an unquantized checkpoint is quantized at load"
    assert refusal(small, model_path=file, quantization="w8a8_int8") == "other_method"


@covers("quantization=awq", "quantization=gptq", "quantization=compressed-tensors", platform="cpu")
def test_quantization_of_packed_integers(small: Small, tmp_path: Path) -> None:
    """Outputs are nearly those of the same weights in floats; activations are rounded to 8 bits."""
    for method in ("awq", "gptq", "compressed-tensors"):
        packed, plain = tmp_path / method, tmp_path / f"plain {method}"
        write_packed(packed, FORMS[method]).save_pretrained(plain)
        logprobs = _logprobs(small, model_path=packed, quantization=method)
        assert logprobs == _logprobs(small, model_path=packed)
        distances = [abs(one - two) for one, two in zip(logprobs, _logprobs(small, model_path=plain), strict=True)]
        assert 0 < max(distances) < 1.0
        assert refusal(small, model_path=packed, quantization="w8a8_int8") == "other_method"
        assert refusal(small, quantization=method) == "other_method"


@covers("quantization=fp8", "quantization=fbgemm_fp8", "quantization=modelopt", "quantization=torchao", platform="cpu")
@covers("torchao_config=fp8wo", platform="cpu")
def test_quantization_to_fp8(small: Small, tmp_path: Path) -> None:
    """Outputs are those of the same weights in floats. An unquantized checkpoint is quantized at load."""
    forms = {"fp8": "fp8, blocks", "fbgemm_fp8": "fbgemm_fp8", "modelopt": "modelopt", "torchao": "torchao"}
    for method, form in forms.items():
        stored, plain = tmp_path / method, tmp_path / f"plain {method}"
        write_fp8(stored, FP8_FORMS[form]).save_pretrained(plain)
        logprobs = _logprobs(small, model_path=stored, quantization=method, dtype="float32")
        assert logprobs == _logprobs(small, model_path=stored, dtype="float32")
        same = _logprobs(small, model_path=plain, dtype="float32")
        assert max(abs(one - two) for one, two in zip(logprobs, same, strict=True)) < 1e-3
        assert refusal(small, model_path=stored, quantization="w8a8_int8") == "other_method"
    assert refusal(small, quantization="modelopt") == "other_method"
    logprobs = _logprobs(small, quantization="fp8")
    assert logprobs == _logprobs(small, torchao_config="fp8wo")
    distances = [abs(one - two) for one, two in zip(logprobs, _expected(small), strict=True)]
    assert 0.001 < max(distances) < 1.0
    assert refusal(small, model_path=tmp_path / "fp8", torchao_config="fp8wo") == "quantized_already"
    assert refusal(small, quantization="fp8", torchao_config="int8wo") == "excluded"
    for method in ("fp8", "w8a8_int8"):
        assert refusal(small, quantization=method, model_impl="transformers") == "native_layers_only"


@covers("quantization=mxfp4", "quantization=bitsandbytes", platform="cpu")
def test_quantization_of_blocks_with_tables(small: Small, tmp_path: Path) -> None:
    """Outputs are nearly those of the same weights in floats; activations may be rounded to 8 bits."""
    for method in ("mxfp4", "bitsandbytes"):
        stored, plain = tmp_path / method, tmp_path / f"plain {method}"
        stored.mkdir()
        model = write_compressed(stored) if method == "mxfp4" else write_nf4(stored, NF4Form())
        model.save_pretrained(plain)
        logprobs = _logprobs(small, model_path=stored, quantization=method)
        assert logprobs == _logprobs(small, model_path=stored)
        distances = [abs(one - two) for one, two in zip(logprobs, _logprobs(small, model_path=plain), strict=True)]
        assert max(distances) < 1.0
        assert refusal(small, model_path=stored, quantization="awq") == "other_method"
        assert refusal(small, quantization=method) == "other_method"


def _quantize_rows(folder: Path) -> None:
    """Quantize projections in the layout of w8a8_int8 without changing the configuration."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale"] = quantize_int8(tensor)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")


@covers("torchao_config=int8dq", "torchao_config=int8wo", platform="cpu")
def test_torchao_config(small: Small, tmp_path: Path) -> None:
    """Outputs of int8 weights are nearly the same; quantizing activations too makes a difference."""
    far = {}
    for method in ("int8dq", "int8wo"):
        pairs = zip(_logprobs(small, torchao_config=method), _expected(small), strict=True)
        far[method] = max(abs(one - two) for one, two in pairs)
    assert all(0.001 < distance < 1.0 for distance in far.values())
    assert far["int8wo"] != far["int8dq"]
    file, eight = tmp_path / "model.gguf", tmp_path / "eight"
    write_gguf(file, small_model("llama", **GGUF_SIZES), "llama", GGMLQuantizationType.Q8_0)
    assert refusal(small, model_path=file, torchao_config="int8wo") == "quantized_already"
    shutil.copytree(small.folder, eight)
    _quantize_rows(eight)
    assert refusal(small, model_path=eight, torchao_config="int8dq") == "quantized_already"
    assert refusal(small, model_path=eight, quantization="w8a8_int8", torchao_config="int8dq") == "quantized_already"
    assert refusal(small, torchao_config="int8dq", model_impl="transformers") == "native_layers_only"
    assert refusal(small, torchao_config="int4wo-32") == "planned"


@needs_native
@covers("dequantize_weights=true", "dequantize_weights=false", platform="cpu")
def test_dequantize_weights(small: Small, tmp_path: Path) -> None:
    """Computing with quantize_weights blocks rounds the inputs, so the results differ slightly."""
    file = tmp_path / "model.gguf"
    write_gguf(file, small_model("llama", **GGUF_SIZES), "llama", GGMLQuantizationType.Q8_0)
    plain = _logprobs(small, model_path=file, dequantize_weights=True)
    blocks = _logprobs(small, model_path=file)
    distances = [abs(one - two) for one, two in zip(plain, blocks, strict=True)]
    assert 0 < max(distances) < 0.5


@needs_native
def test_weights_of_codebooks_are_multiplied_in_their_blocks(small: Small, tmp_path: Path) -> None:
    """A file of all types of 1 to 3 bits, the embedding's included, compared with its dequantized weights."""
    file = tmp_path / "model.gguf"
    sizes = {**GGUF_SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    write_gguf(file, small_model("llama", **sizes), "llama", kinds=codebook_kinds())
    plain = _logprobs(small, model_path=file, dequantize_weights=True)
    blocks = _logprobs(small, model_path=file)
    distances = [abs(one - two) for one, two in zip(plain, blocks, strict=True)]
    assert 0 < max(distances) < 0.5


@covers("random_seed=0", f"random_seed={2**63 - 1}", platform="cpu")
def test_random_seed_decides_dummy_weights(other: Small) -> None:
    first = tokens(other, load_format="dummy", random_seed=0)
    assert tokens(other, load_format="dummy", random_seed=0) == first
    assert tokens(other, load_format="dummy", random_seed=2**63 - 1) != first


@covers("model_impl=transformers", "model_impl=srv", "model_impl=auto", platform="cpu")
def test_model_impl(small: Small, tmp_path: Path) -> None:
    """A model without a native implementation in srv needs that of transformers, which auto chooses."""
    gemma = make_small("vaultgemma", tmp_path)
    assert tokens(gemma, model_impl="transformers") == tokens(gemma, model_impl="auto") == gemma.tokens
    assert refusal(gemma, model_impl="srv") == "unsupported_config"
    assert tokens(small, model_impl="srv") == small.tokens


# ---- platform and backends


@covers("device", platform="cpu")
def test_device(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    """The requested platform is used by engines and plans; an unknown one is refused."""
    with engine(small, device="cpu") as served:
        assert served.ready.device == "cpu"
    assert refusal(small, device="abacus") == "unknown_platform"
    words = ["plan", "--json", "--model-path", str(small.folder), "--max-running-requests", "4", "--device"]
    planned = []
    for device in ("cpu:avx2,memory=4GiB", "cpu:neon,memory=8GiB"):
        assert main([*words, device]) == 0
        facts = json.loads(capsys.readouterr().out)["device"]
        planned.append((facts["variant"], facts["memory_bytes"] >> 30))
    assert planned == [("avx2", 4), ("neon", 8)]


@covers("attention_backend=torch_native", platform="cpu")
@pytest.mark.usefixtures("zero_attention")
def test_attention_backend(small: Small) -> None:
    assert tokens(small, attention_backend="torch_native") == small.tokens
    firsts = [one[0] for one in tokens(small, attention_backend="zero")]
    assert firsts != [one[0] for one in small.tokens]
    assert refusal(small, attention_backend="lidless") == "unknown_backend"


@needs_native
@covers(*(f"{slot}=native" for slot in ("attention_backend", *ATTENTION_SLOTS)), platform="cpu")
def test_native_attention(captured: Small) -> None:
    """Its steps are captured, those of torch_native are not. Both read another pool, so that they cannot be mixed."""
    for flags in ({"attention_backend": "native"}, dict.fromkeys(ATTENTION_SLOTS, "native")):
        with engine(captured, 16, graph_batch_sizes="1", **flags) as served:
            (result,) = served.generate([message("a", captured.prompts[-1])])
            assert result.tokens == captured.tokens[-1]
            assert served.stats().replayed_steps > 0
    assert refusal(captured, graph_batch_sizes="1", **dict.fromkeys(ATTENTION_SLOTS, "torch_native"))
    for native, other in (ATTENTION_SLOTS, ATTENTION_SLOTS[::-1]):
        assert refusal(captured, **{native: "native", other: "torch_native"})


@covers("prefill_attention_backend=torch_native", platform="cpu")
@pytest.mark.usefixtures("zero_attention")
def test_prefill_attention_backend(small: Small) -> None:
    """If the zero backend is used only for prefill, the first output tokens differ."""
    correct = tokens(small, prefill_attention_backend="torch_native", decode_attention_backend="torch_native")
    wrong = tokens(small, prefill_attention_backend="zero", decode_attention_backend="torch_native")
    assert correct == small.tokens
    assert [one[0] for one in wrong[1:]] != [one[0] for one in small.tokens[1:]]


@covers("decode_attention_backend=torch_native", platform="cpu")
@pytest.mark.usefixtures("zero_attention")
def test_decode_attention_backend(small: Small) -> None:
    """If the zero backend is used only for decode, the first token of longer prompts is still correct."""
    wrong = tokens(small, decode_attention_backend="zero", prefill_attention_backend="torch_native")
    assert [one[0] for one in wrong[1:]] == [one[0] for one in small.tokens[1:]]
    assert [one[1:] for one in wrong[1:]] != [one[1:] for one in small.tokens[1:]]
    assert tokens(small, decode_attention_backend="torch_native") == small.tokens


@covers("sampling_backend=pytorch", platform="cpu")
def test_sampling_backend(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = BACKEND.format(name="least_likely", target="LeastLikely")
    entry = {"group": "srv.backends.sampling", "entry": "cpu.least_likely", "attribute": "SPEC"}
    write_plugin(tmp_path, "least_likely", source, **entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert tokens(small, sampling_backend="pytorch") == small.tokens
    firsts = [one[0] for one in tokens(small, sampling_backend="least_likely")]
    assert firsts == [int(small.logprobs(prompt)[-1].argmin()) for prompt in small.prompts]
    assert refusal(small, sampling_backend="dice") == "unknown_backend"


# ---- memory


@covers(*(f"mem_fraction_static={fraction}" for fraction in (0.4, 0.88, 0.99)), platform="cpu")
def test_mem_fraction_static_decides(small: Small) -> None:
    """Without a tighter limit of tokens, the pool takes the fraction of the memory that is there when weights are read.

    Up to what is reserved, which can be more than a hundredth. What the pool does not use is never written.
    """
    flags = {"max_total_tokens": 10**10, "page_size": 4096, "max_running_requests": 1, "chunked_prefill_size": 16}
    pages = []
    for fraction in (0.4, 0.88, 0.99):
        with engine(small, kind=_Unchecked, **flags, mem_fraction_static=fraction) as served:
            lines = dict(served.ready.budget)
            (available,) = re.findall(r"of the ([\d.]+ \w+) that are free", lines["static"])
            (reserved,) = re.findall(r"^[\d.]+ \w+", lines["reserved"])
            (page,) = re.findall(r"^[\d.]+ \w+", lines["page"])
            expected = min(fraction * _amount(available), _amount(available) - _amount(reserved))
            assert served.ready.pages[0] * _amount(page) == pytest.approx(expected, rel=0.01)
            pages += served.ready.pages
    assert pages == sorted(set(pages))


class _Unchecked(CheckedEngine):
    """For a pool so large that checking each of its pages would take long."""

    def check_idle(self) -> None:
        self.check_integrity()


def _amount(text: str) -> float:
    """Bytes of a text such as 1.5 GiB."""
    number, unit = text.split()
    return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]


def test_mem_fraction_static(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--json", "--device", "cpu:avx2,memory=8GiB", "--model-path", str(small.folder)]
    pages = []
    for fraction in ("0.2", "0.4"):
        assert main([*words, "--max-total-tokens", "1000000000", "--mem-fraction-static", fraction]) == 0
        pages += json.loads(capsys.readouterr().out)["budget"]["pages"]
    assert pages[1] == pytest.approx(2 * pages[0], rel=0.01)
    assert refusal(small, mem_fraction_static=1e-9) == "pool_too_small"


@covers("max_total_tokens=40", "max_total_tokens=80", platform="cpu")
def test_max_total_tokens(small: Small) -> None:
    def answer(pool: int) -> tuple[int, GenerationResult]:
        with engine(small, PAGE, pool=pool) as served:
            return served.stats().pages_total, served.generate([message("a", small.prompts[-1], 20)])[0]

    (few, cut), (many, whole) = answer(40), answer(80)
    assert (few, many) == (10, 20)
    assert (len(cut.tokens), len(whole.tokens)) == (40 - 33, 20)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=covers(f"page_size={page}", platform="cpu")) for page in (1, 16)]
)
def test_page_size(small: Small, page: int) -> None:
    """Whole pages of a repeated prompt are found in the cache, up to its second to last token."""
    prompt = small.prompts[-2]
    with engine(small, page) as served:
        served.generate([message("first", prompt)])
        (again,) = served.generate([message("again", prompt)])
    assert again.cached_tokens == {1: len(prompt) - 1, 16: 16}[page]


@covers("disable_radix_cache=false", "disable_radix_cache=true", platform="cpu")
def test_disable_radix_cache(small: Small) -> None:
    def cached(**flags: object) -> int:
        with engine(small, PAGE, **flags) as served:
            served.generate([message("first", small.prompts[-1])])
            return served.generate([message("again", small.prompts[-1])])[0].cached_tokens

    assert (cached(), cached(disable_radix_cache=True)) == (32, 0)


# ---- steps


def _send(served: CheckedEngine, prompts: Sequence[list[int]], count: int = OUTPUT) -> list[str]:
    """Send these requests without running a step."""
    sent = messages(prompts, count)
    for one in sent:
        served.send(one)
    return [one.id for one in sent]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Layer 0 has full attention; the others have a window of 9 tokens."""
    return make_small("qwen2", tmp_path_factory.mktemp("qwen2"))


@covers("disable_hybrid_swa_memory=false", "disable_hybrid_swa_memory=true", platform="cpu")
def test_disable_hybrid_swa_memory(windowed: Small) -> None:
    flags = {"page": PAGE, "chunk": PAGE, "max_running_requests": 1}
    with engine(windowed, **flags) as apart, engine(windowed, disable_hybrid_swa_memory=True, **flags) as together:
        assert len(apart.ready.pages) == 2
        assert apart.ready.pages[1] < apart.ready.pages[0]
        assert together.ready.pages == apart.ready.pages[:1]


@covers("swa_full_tokens_ratio=0.0", "swa_full_tokens_ratio=1.0", platform="cpu")
def test_swa_full_tokens_ratio(windowed: Small) -> None:
    pages = {}
    for ratio in (0, 0.5, 1):
        with engine(windowed, page=PAGE, chunk=PAGE, swa_full_tokens_ratio=ratio) as served:
            pages[ratio] = served.ready.pages
    assert pages == {0: [256, 6], 0.5: [256, 128], 1: [256, 256]}


@covers("max_running_requests=1", "max_running_requests=3", platform="cpu")
def test_max_running_requests(small: Small) -> None:
    def running_and_waiting(limit: int) -> tuple[int, int]:
        with engine(small, max_running_requests=limit) as served:
            requests = _send(served, small.prompts[:3])
            served.step()
            stats = served.stats()
            served.run(requests)
            return stats.running, stats.waiting

    assert running_and_waiting(1) == (1, 2)
    assert running_and_waiting(3) == (3, 0)


@covers("max_queued_requests=1", "max_queued_requests=4", platform="cpu")
def test_max_queued_requests(small: Small) -> None:
    def refused(limit: int) -> list[str]:
        with engine(small, max_running_requests=1, max_queued_requests=limit) as served:
            results = served.generate(messages(small.prompts[:4]))
            return [result.error[0] if result.error else "" for result in results]

    assert refused(1) == ["", "queue_full", "queue_full", "queue_full"]
    assert refused(4) == ["", "", "", ""]


def _steps(small: Small, prompts: Sequence[list[int]], **flags: object) -> int:
    """Number of steps until each of these requests has one token."""
    with engine(small, overlap=False, **flags) as served:
        served.run(_send(served, prompts, 1))
        return served.stats().steps


@covers(
    "chunked_prefill_size=8",
    "chunked_prefill_size=11",
    "chunked_prefill_size=33",
    "chunked_prefill_size=-1",
    platform="cpu",
)
def test_chunked_prefill_size(small: Small) -> None:
    prompt = small.prompts[-1]
    assert len(prompt) == 33
    assert [_steps(small, [prompt], chunk=chunk) for chunk in (8, 11, 33, -1)] == [5, 3, 1, 1]


def _drafted_steps(small: Small, prompt: list[int], **flags: object) -> int:
    """Number of steps until a request has 24 tokens that are all 5, with n-gram drafts unless `flags` say otherwise."""
    request = message("five", prompt, 24, logit_bias=((5, 100.0),))
    with engine(small, overlap=False, **{"speculative_algorithm": "NGRAM", **flags}) as served:
        assert served.generate([request])[0].tokens == [5] * 24
        return served.stats().steps


@covers("speculative_algorithm=NGRAM", platform="cpu")
def test_speculative_algorithm(small: Small) -> None:
    """Drafts that are accepted save steps."""
    with engine(small, overlap=False) as served:
        served.generate([message("five", [7, 8], 24, logit_bias=((5, 100.0),))])
        assert served.stats().steps == 24
    assert _drafted_steps(small, [7, 8]) < 16


@covers(*(f"speculative_num_draft_tokens={number}" for number in (2, 8, 32)), platform="cpu")
def test_speculative_num_draft_tokens(small: Small) -> None:
    two, eight, most = (_drafted_steps(small, [7, 8], speculative_num_draft_tokens=number) for number in (2, 8, 32))
    assert most < eight < two < 24


@covers(*(f"speculative_ngram_branch_length={length}" for length in (1, 18, 36)), platform="cpu")
def test_speculative_ngram_branch_length(small: Small) -> None:
    one, many, most = (_drafted_steps(small, [7, 8], speculative_ngram_branch_length=length) for length in (1, 18, 36))
    assert most <= many < one < 24


@covers(*(f"speculative_ngram_min_match_window_size={size}" for size in (1, 2, 6)), platform="cpu")
def test_speculative_ngram_min_match_window_size(small: Small) -> None:
    """What follows a match of four tokens is right; without a match, the last token is proposed again."""

    def drafts_for(minimum: int) -> list[int]:
        flags = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 2}
        with engine(small, overlap=False, speculative_ngram_min_match_window_size=minimum, **flags) as served:
            drafting = served.executor.worker.runner._drafting
            text, length = torch.tensor([[5, 9, 3, 5, 9]]), torch.tensor([5])
            return drafting._drafter.propose(text, length, 2).tolist()[0]

    assert drafts_for(1) == drafts_for(2) == [3, 5]
    assert drafts_for(6) == [9, 9]


@covers(*(f"speculative_ngram_max_match_window_size={size}" for size in (1, 12, 24)), platform="cpu")
def test_speculative_ngram_max_match_window_size(small: Small) -> None:
    """The longest match is followed by 5; the latest match of one token is not."""
    prompt = [1, 2, 3, *[5] * 8, 9, 5, 7, 7, 7, 1, 2, 3]
    one, longer, longest = (
        _drafted_steps(small, prompt, speculative_ngram_max_match_window_size=size) for size in (1, 12, 24)
    )
    assert longest == longer < one


@covers("max_prefill_tokens=16", "max_prefill_tokens=40", "max_prefill_tokens=70", platform="cpu")
def test_max_prefill_tokens(small: Small) -> None:
    """Prompts of 17, 20 and 33 tokens that are not split."""
    prompts = small.prompts[-3:]
    assert [_steps(small, prompts, chunk=-1, max_prefill_tokens=limit) for limit in (16, 40, 70)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        pytest.param("fcfs", ["cold", "warm"], marks=covers("schedule_policy=fcfs", platform="cpu")),
        pytest.param("lpm", ["warm", "cold"], marks=covers("schedule_policy=lpm", platform="cpu")),
    ],
)
def test_schedule_policy(small: Small, policy: str, order: list[str]) -> None:
    """With one slot, lpm runs the request with a cached prompt before the one that arrived first."""
    ended: list[str] = []
    with engine(small, PAGE, schedule_policy=policy, max_running_requests=1) as served:
        served.generate([message("before", small.prompts[-1])])
        for request, prompt in (("cold", small.prompts[-2]), ("warm", small.prompts[-1])):
            served.send(message(request, prompt))
        while len(ended) < 2:
            served.step()
            ended += [name for name in order if served.results[name].finish and name not in ended]
    assert ended == order


@covers(*(f"schedule_conservativeness={factor}" for factor in (0.01, 1.0, 2.0)), platform="cpu")
def test_schedule_conservativeness_admits_fewer(small: Small) -> None:
    """Of 16 requests, those run whose expected output fits in a pool of 256 tokens beside all others."""

    def running(factor: float) -> int:
        with engine(small, PAGE, pool=256, schedule_conservativeness=factor) as served:
            requests = [message(str(number), [5 + number, 6, 7, 8], 28) for number in range(16)]
            for request in requests:
                served.send(request)
            served.step()
            count = served.stats().running
            served.run([request.id for request in requests])
            return count

    assert running(0.01) == 16
    assert 16 > running(1.0) > running(2.0)


@covers("schedule_conservativeness=100.0", platform="cpu")
def test_schedule_conservativeness(small: Small) -> None:
    """A pool that is large enough for each request, but not for the final lengths of all of them."""

    def retractions(factor: float) -> int:
        with engine(small, PAGE, pool=112, schedule_conservativeness=factor) as served:
            assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
            return served.stats().retractions

    assert retractions(0.01) > 0
    assert retractions(100.0) == 0


@covers("disable_overlap_schedule=false", "disable_overlap_schedule=true", platform="cpu")
def test_disable_overlap_schedule(small: Small) -> None:
    """With overlap, one additional step is computed before the stop token is processed."""
    stop = small.tokens[-1][3]
    assert small.tokens[-1].index(stop) == 3

    def steps(overlap: bool) -> int:
        with engine(small, overlap=overlap) as served:
            (result,) = served.generate([message("a", small.prompts[-1], stop_token_ids=(stop,))])
            assert result.tokens == small.tokens[-1][:4]
            served.flush()
            return served.stats().steps

    assert (steps(True), steps(False)) == (5, 4)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model with a head size that native attention supports."""
    return make_small("llama", tmp_path_factory.mktemp("captured"), head_dim=16)


def counts(small: Small, **flags: object) -> tuple[list[int], int]:
    """Captured row counts, and the number of replayed steps for three requests that always run together."""
    with engine(small, page_size=16, max_running_requests=6, **flags) as served:
        three = [message(str(number), [9 + number, 5, 6], 9, ignore_eos=True) for number in range(3)]
        served.generate(three)
        return served.ready.graph_rows, served.stats().replayed_steps


@needs_native
@covers("disable_graphs=false", "disable_graphs=true", platform="cpu")
def test_disable_graphs(captured: Small) -> None:
    for flag, off in (("no_disable_graphs", False), ("disable_graphs", True)):
        with engine(captured, page_size=16, **{flag: True}) as served:
            assert [result.tokens for result in served.generate(messages(captured.prompts))] == captured.tokens
            assert (served.stats().replayed_steps == 0) is off
            assert (served.ready.graph_rows == []) is off
    assert counts(captured) == ([1, 2, 3, 4, 5, 6], 8)


@needs_native
def test_model_of_transformers_that_cannot_be_captured_is_called(
    captured: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamic rotary embeddings branch on a tensor."""
    shutil.copytree(captured.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO", "srv_cpu.graphs"):
        for path, reason in ((captured.folder, "operators are torch's"), (tmp_path, "reads a value of a tensor")):
            with engine(captured, page_size=16, model_path=path, model_impl="transformers") as served:
                results = served.generate(messages(captured.prompts))
                assert [result.tokens for result in results] == captured.tokens
                assert served.stats().replayed_steps > 0
            assert reason in caplog.text


@needs_native
def test_attention_without_graph_support_runs_eagerly(captured: Small) -> None:
    assert counts(captured, attention_backend="torch_native") == ([], 0)
    with pytest.raises(Refusal, match="because attention backend torch_native requires disable_graphs true"):
        counts(captured, attention_backend="torch_native", graph_max_batch_size=4)
    assert refusal(captured, attention_backend="torch_native", no_disable_graphs=True) == "backend_unfit"


@needs_native
@covers("graph_max_batch_size=1", "graph_max_batch_size=4", "graph_max_batch_size=16", platform="cpu")
def test_graph_max_batch_size(captured: Small) -> None:
    assert counts(captured, graph_max_batch_size=1) == ([1], 0)
    assert counts(captured, graph_max_batch_size=4) == ([1, 2, 3, 4], 8)
    assert counts(captured, graph_max_batch_size=16) == ([1, 2, 3, 4, 5, 6], 8)


@needs_native
@covers("graph_batch_sizes=1", "graph_batch_sizes=1,2", "graph_batch_sizes=3", platform="cpu")
def test_graph_batch_sizes(captured: Small) -> None:
    assert counts(captured, graph_batch_sizes="1") == ([1], 0)
    assert counts(captured, graph_batch_sizes="1,2") == ([1, 2], 0)
    assert counts(captured, graph_batch_sizes="3") == ([3], 8)


@needs_native
def test_arguments_of_graphs_are_refused_without_graphs(captured: Small) -> None:
    for flags in ({"graph_batch_sizes": 4}, {"graph_max_batch_size": 4}, {"disable_graph_padding": True}):
        assert refusal(captured, page_size=16, disable_graphs=True, **flags) == "excluded"
        assert refusal(captured, attention_backend="torch_native", **flags) == "excluded"


@needs_native
@covers("disable_graph_padding=false", "disable_graph_padding=true", platform="cpu")
def test_disable_graph_padding(captured: Small) -> None:
    """Without padding, three rows cannot use a graph of four, so every row count is captured."""
    assert counts(captured, graph_batch_sizes="2,4") == ([2, 4], 8)
    assert counts(captured, graph_batch_sizes="2,4", disable_graph_padding=True) == ([2, 4], 0)
    assert counts(captured, no_disable_graph_padding=True) == ([1, 2, 4, 6], 8)


# ---- configuration file


def test_config(small: Small, tmp_path: Path) -> None:
    """Two files have different effects, and the command line overrides both."""

    def longest(context: int, **flags: object) -> int:
        path = tmp_path / f"{context}.yaml"
        path.write_text(f"context_length: {context}\n")
        with engine(small, config=path, **flags) as served:
            return served.ready.max_request_tokens

    assert (longest(60), longest(80), longest(80, context_length=70)) == (60, 80, 70)


# ---- observe


@covers("enable_layer_markers=true", "enable_layer_markers=false", platform="cpu")
def test_enable_layer_markers(small: Small, tmp_path: Path) -> None:
    """Traces have a range for each layer's attention and MLP, or none. The ranges are those of eager steps."""
    layers = {f"model.layers.{index}.{part}" for index in range(3) for part in ("self_attn", "mlp")}
    steps = {"eager": {"disable_graphs": True}, "transformers": {"model_impl": "transformers"}}
    for name, flags in steps.items():
        marked = _ranges(small, tmp_path / name, enable_layer_markers=True, **flags)
        assert layers <= marked.keys()
        assert len({marked[layer] for layer in layers}) == 1, "each layer runs once in every step"
    assert _ranges(small, tmp_path / "unmarked", disable_graphs=True) == {}


@needs_native
def test_captured_steps_have_no_marks(tmp_path: Path) -> None:
    """The only eager step is that of the prompt; the output is the same."""
    small = make_small("llama", tmp_path, head_dim=16)
    marked = _ranges(small, tmp_path / "trace", page=16, graph_batch_sizes="1", enable_layer_markers=True)
    assert marked["model.layers.0.self_attn"] == 1


def _ranges(small: Small, folder: Path, **flags: object) -> dict[str, int]:
    """How often ranges of the model's modules are in a trace of a few steps."""
    folder.mkdir()
    with engine(small, **flags) as served:
        served.executor.control(StartProfile(str(folder)))
        (result,) = served.generate([message("a", small.prompts[-1], 3)])
        assert result.tokens == small.tokens[-1][:3]
        (stopped,) = served.executor.control(StopProfile())
    (file,) = stopped.files
    with gzip.open(file, "rt") as trace:
        names = [event.get("name", "") for event in json.load(trace)["traceEvents"]]
    return dict(Counter(name for name in names if name.startswith(("model.", "lm_head"))))
