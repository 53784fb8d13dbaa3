"""Arguments of the engine have an effect: two values of each behave differently with a small model.

Each test starts the same engine as `srv launch` with these flags. Arguments of the HTTP server are tested in the same
way on real servers, in `tests/e2e/test_e2e_arguments.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attention_naive import NaiveAttention
from engine_small import OUTPUT, Small, engine, make_small, message, messages
from gguf import GGMLQuantizationType
from models_small import small_model, write_gguf
from platform_plugins import write_plugin
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.cli.main import main
from srv.errors import ModelError, Refusal
from srv.platform.interface import AttentionLayer, BackendContext, SamplingBatch
from srv.quantization.int8_online_layers import quantize_int8
from srv.testing.conformance.small import quantize_weights
from srv.testing.engine import CheckedEngine, GenerationResult
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

PAGE = 4
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


@covers("dtype=float32", "dtype=bfloat16", platform="cpu")
def test_dtype(small: Small) -> None:
    """In bfloat16 the same prompt has slightly different logprobs."""
    exact, coarse = _logprobs(small), _logprobs(small, dtype="bfloat16")
    assert exact == pytest.approx(_expected(small), abs=1e-3)
    assert coarse == pytest.approx(exact, abs=1.2)
    assert coarse != pytest.approx(exact, abs=1e-3)


@covers("kv_cache_dtype=auto", "kv_cache_dtype=bfloat16", platform="cpu")
def test_kv_cache_dtype(small: Small) -> None:
    """With keys and values in bfloat16, prompts are read from the KV pool with less precision."""
    exact, coarse = _logprobs(small), _logprobs(small, kv_cache_dtype="bfloat16")
    assert coarse == pytest.approx(exact, abs=0.3)
    assert coarse != pytest.approx(exact, abs=1e-3)


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
        assert [each.tokens for each in warm] == [each.tokens for each in cold]
        outputs.append([each.tokens for each in cold])
    assert outputs[0] == outputs[1]


def _logprobs(small: Small, **flags: object) -> list[float]:
    """The logprobs of the last prompt's tokens (without the first), computed in chunks."""
    with engine(small, chunk=5, **flags) as served:
        (result,) = served.generate([message("a", small.prompts[-1], 1, prompt_logprobs=1)])
    return [entry.logprob for entry in result.prompt_logprobs]


def _expected(small: Small) -> list[float]:
    prompt = small.prompts[-1]
    return small.logprobs(prompt)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()


@covers("load_format=safetensors", "load_format=dummy", platform="cpu")
def test_load_format(small: Small) -> None:
    assert tokens(small, load_format="safetensors") == small.tokens
    assert tokens(small, load_format="dummy") != small.tokens
    assert refusal(small, load_format="gguf") == "format_not_there"


@covers("quantization=modelslim", "quantization=gguf", "quantization=w8a8_int8", platform="cpu")
def test_quantization(small: Small, tmp_path: Path) -> None:
    """The method of the checkpoint is accepted, others are refused. Outputs of int8 weights are nearly the same."""
    eight = tmp_path / "eight"
    shutil.copytree(small.folder, eight)
    weights, kinds = quantize_weights(load_file(small.folder / "model.safetensors"))
    save_file(weights, eight / "model.safetensors")
    (eight / "quant_model_description.json").write_text(json.dumps(kinds))
    given = _logprobs(small, model_path=eight, quantization="modelslim")
    assert given == _logprobs(small, model_path=eight)
    distances = [abs(one - two) for one, two in zip(given, _expected(small), strict=True)]
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
    given = _logprobs(small, model_path=rows, quantization="w8a8_int8")
    assert given == _logprobs(small, torchao_config="int8dq")
    distances = [abs(one - two) for one, two in zip(given, _expected(small), strict=True)]
    assert 0.001 < max(distances) < 1.0
    assert refusal(small, quantization="w8a8_int8") == "no_integers"
    assert refusal(small, model_path=file, quantization="w8a8_int8") == "other_method"


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
    assert all(0.001 < each < 1.0 for each in far.values())
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


@covers("random_seed=7", "random_seed=8", platform="cpu")
def test_random_seed_decides_dummy_weights(other: Small) -> None:
    first = tokens(other, load_format="dummy", random_seed=7)
    assert tokens(other, load_format="dummy", random_seed=7) == first
    assert tokens(other, load_format="dummy", random_seed=8) != first


@covers("model_impl=transformers", platform="cpu")
def test_model_impl(tmp_path: Path) -> None:
    """A model without a native implementation in srv needs that of transformers."""
    gemma = make_small("gemma2", tmp_path)
    assert tokens(gemma, model_impl="transformers") == gemma.tokens
    assert refusal(gemma, model_impl="srv") == "unsupported_config"


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
        with engine(windowed, page=PAGE, chunk=PAGE, swa_full_tokens_ratio=ratio) as made:
            pages[ratio] = made.ready.pages
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


@covers("schedule_conservativeness=0.01", "schedule_conservativeness=100.0", platform="cpu")
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
