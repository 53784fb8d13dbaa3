"""The memory budget: pages from bytes, its limits, its breakdown, and the refusal if nothing fits."""

from __future__ import annotations

import dataclasses

import pytest
from args_world import CONFIG, GIB, device, model
from every import every

from srv.args.config import make_config
from srv.errors import Refusal
from srv.models import derive
from srv.models.families.trees import native_tree
from srv.planning.budget import compute, estimate, weight_bytes
from srv.planning.pools import bytes_per_page
from srv.planning.states import bytes_per_slot, missing_native_layers
from srv.specs import FullAttention, KVLayout, Latent, Recurrent, SlidingWindow, StateTensor

TOKEN = 10 * 4 * 128 * 2  # bytes of one token: 10 layers, 4 heads, 64 + 64, bfloat16


def config(**values: object):  # type: ignore[no-untyped-def]
    return make_config({"dtype": "bfloat16", "context_length": 1000, "mem_fraction_static": 0.5, **values})


def test_weights_and_pool_stay_within_the_static_fraction() -> None:
    budget = compute(config(page_size=16), model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    page = 16 * TOKEN
    assert budget.pages == (7 * GIB // page - 1,)  # half of 16 GiB, less the one in use, less page 0
    assert GIB + (budget.pages[0] + 1) * page <= 8 * GIB
    assert (budget.page_size, budget.max_request_tokens) == (16, 1000)


def test_the_fraction_is_of_the_memory_that_other_processes_leave() -> None:
    """9.3 of 23.5 GiB are free: half of what this process can have is 4.9 GiB, of which 0.5 GiB hold its weights."""
    own_bytes, free, total = GIB // 2, int(9.3 * GIB), int(23.5 * GIB)
    budget = compute(config(page_size=16), model(), free_bytes=free, total_bytes=total, own_bytes=own_bytes)
    page = 16 * TOKEN
    assert budget.pages == ((int((free + own_bytes) * 0.5) - own_bytes) // page - 1,)


def test_the_refusal_names_each_part_of_the_memory() -> None:
    with pytest.raises(Refusal) as refusal:
        compute(config(), model(), free_bytes=GIB, total_bytes=16 * GIB, own_bytes=2 * GIB, reserved_bytes=GIB)
    reason = refusal.value.rejections[0].reason
    for part in (
        "1.00 GiB of 16.00 GiB are free after the weights are loaded",
        "2.00 GiB are this process's own weights",
        "13.00 GiB are used by others, or by the runtime",
        "1.50 GiB for weights and KV pool: mem_fraction_static 0.5 of the 3.00 GiB that are free or its own",
        "1.00 GiB stay free (reserved_memory)",
    ):
        assert part in reason, reason


def test_reserved_memory_stays_free_with_any_fraction() -> None:
    settings = config(mem_fraction_static=0.99)
    plain = compute(settings, model(), free_bytes=4 * GIB, total_bytes=8 * GIB)
    limited = compute(settings, model(), free_bytes=4 * GIB, total_bytes=8 * GIB, reserved_bytes=GIB)
    assert (limited.pages[0] + 1) * TOKEN <= 3 * GIB < (plain.pages[0] + 1) * TOKEN


def test_max_total_tokens_limits_the_pages() -> None:
    budget = compute(config(page_size=16, max_total_tokens=100), model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    assert budget.pages == (6,)
    assert budget.max_request_tokens == 96
    assert dict(budget.breakdown)["limit"] == "max_total_tokens 100 allows 6 pages"


def test_estimate_counts_the_weights() -> None:
    budget = estimate(config(), model(), device(1 * GIB))
    static = GIB // 2
    assert budget.pages == ((static - 200_000_000) // TOKEN - 1,)
    assert "190.73 MiB of weights in bfloat16" in dict(budget.breakdown)["memory"]


@every(
    ("values", "free", "remedy"),
    [
        ({}, 0, "The weights alone do not fit: use a device with more memory, or smaller or quantized weights."),
        ({}, 8 * GIB, "The weights alone take what --mem-fraction-static allows: raise it."),
        ({"page_size": 10**9}, 15 * GIB, "--page-size"),
        ({"page_size": 16, "max_total_tokens": 15}, 15 * GIB, "--max-total-tokens"),
        ({"page_size": 1, "mem_fraction_static": 0.0626}, 15 * GIB + TOKEN, "--mem-fraction-static"),
    ],
)
def test_pool_without_room_for_one_request_is_refused(values: dict[str, object], free: int, remedy: str) -> None:
    """The remedy is one that helps."""
    values = {"mem_fraction_static": 0.5, **values}
    total = 16 * GIB
    if values["mem_fraction_static"] == 0.0626:
        values["mem_fraction_static"] = (GIB + TOKEN) / total  # one page, which is needed as page 0
    with pytest.raises(Refusal, match="pool_too_small") as refusal:
        compute(config(**values), model(), free_bytes=free, total_bytes=total)
    assert remedy in refusal.value.rejections[0].remedy


def test_reserved_memory_that_leaves_no_room_beside_the_weights_is_named() -> None:
    total = {"free_bytes": 4 * GIB, "total_bytes": 16 * GIB}
    with pytest.raises(Refusal, match="What is reserved beside the weights leaves no room: use a smaller --chunked"):
        compute(config(mem_fraction_static=0.9), model(), reserved_bytes=5 * GIB, **total)
    assert compute(config(mem_fraction_static=0.9), model(), reserved_bytes=GIB, **total).pages[0] > 0


def test_one_page_of_two_tokens_is_enough() -> None:
    budget = compute(config(page_size=2, max_total_tokens=2), model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    assert (budget.pages, budget.max_request_tokens) == ((1,), 2)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Refusal, match=r"0 bytes of 128\.00 MiB are free"):
        estimate(config(), model(), device(2**27))


def test_the_fraction_of_memory_that_is_used_is_of_all_memory() -> None:
    """190.73 MiB of weights: two devices of 128 MiB hold them, each with 90 % of it, of which 12 MiB are reserved."""
    with pytest.raises(Refusal) as refusal:
        estimate(config(mem_fraction_static=0.9), model(config=CONFIG), device(128 * 2**20), 12 * 2**20)
    assert "2 such devices (--tp-size 2)" in refusal.value.rejections[0].remedy


def test_devices_are_counted_that_hold_the_weights_together() -> None:
    """190.73 MiB of weights: two devices of 160 MiB hold them; of 96 MiB it takes four."""
    divisible = model(config=CONFIG)
    for memory, ranks in ((160, 2), (96, 4)):
        with pytest.raises(Refusal) as refusal:
            estimate(config(mem_fraction_static=0.9), divisible, device(memory * 2**20))
        assert f"{ranks} such devices (--tp-size {ranks})" in refusal.value.rejections[0].remedy
    with pytest.raises(Refusal) as refusal:
        estimate(config(), divisible, device(2**27), shared=True)
    assert "such devices" not in refusal.value.rejections[0].remedy


def test_groups_of_full_attention_have_equal_numbers_of_pages() -> None:
    groups = (FullAttention((0, 1), 4, 64, 64), FullAttention((2,), 2, 32, 32))
    two = model(cache_groups=groups)
    assert bytes_per_page(config(), two) == [2 * 4 * 128 * 2, 2 * 64 * 2]
    pages = compute(config(), two, free_bytes=15 * GIB, total_bytes=16 * GIB).pages
    assert pages == (7 * GIB // (2 * 4 * 128 * 2 + 2 * 64 * 2) - 1,) * 2


def test_latents_get_the_pages_of_full_attention_with_as_many_bytes_per_token() -> None:
    latent, full = Latent((0, 1, 2), 96, 32), FullAttention((0, 1, 2), 1, 96, 32)
    window = SlidingWindow((3,), 4, 64, 64, 100)
    for more in ((), (window,)):
        budgets = [
            compute(config(page_size=16), model(cache_groups=(group, *more)), free_bytes=15 * GIB, total_bytes=16 * GIB)
            for group in (latent, full)
        ]
        assert budgets[0].groups == budgets[1].groups
        assert budgets[0].max_request_tokens == budgets[1].max_request_tokens
    assert "of 3 layers of latent attention in bfloat16" in dict(budgets[0].breakdown)["page"]


CONVOLUTION, STATE = StateTensor("conv", (8, 3), "float32"), StateTensor("state", (4, 8, 8), "float32")
GROUPS = (FullAttention((0,), 4, 64, 64), Recurrent((1, 2), (CONVOLUTION, STATE)))


@every("architecture,reason", [
    ("Zamba2ForCausalLM", "architecture Zamba2ForCausalLM has no native layers"),
    ("Qwen3NextForCausalLM", "hidden_act = 'gelu' is not implemented natively"),
])  # fmt: skip
def test_recurrent_states_without_native_layers_are_refused(architecture: str, reason: str) -> None:
    facts = model(architecture=architecture, config={"hidden_act": "gelu"}, cache_groups=GROUPS)
    rejected = missing_native_layers(config(), facts)
    assert rejected is not None
    assert rejected.code == "recurrent_states"
    assert "2 of its layers keep recurrent states (conv, state)" in rejected.reason
    assert reason in rejected.reason


@every("fields,values,reason,remedy", [
    ({}, {"model_impl": "transformers"}, "model_impl is transformers", "Leave --model-impl at auto."),
    ({"rope_interleave": False}, {}, "rope_interleave = False", "Choose a model whose configuration"),
])  # fmt: skip
def test_latent_attention_without_native_layers_is_refused(
    fields: dict[str, object], values: dict[str, object], reason: str, remedy: str
) -> None:
    facts = model(architecture="DeepseekV3ForCausalLM", config=fields, cache_groups=(Latent((0, 1), 512, 64),))
    rejected = missing_native_layers(config(**values), facts)
    assert rejected is not None
    assert rejected.code == "native_layers_only"
    assert (reason in rejected.reason, remedy in rejected.remedy) == (True, True)


@every(
    ("values", "slots"),
    [
        ({}, 10 + 1000 * 10 // 16),  # one snapshot per page of the tokens that there can be at most
        ({"max_total_tokens": 3200}, 10 + 200),
        ({"mamba_full_memory_ratio": 1e-9}, 10),
        ({"max_mamba_cache_size": 25}, 25),
        ({"disable_radix_cache": True}, 10),
    ],
)
def test_recurrent_states_take_their_part_of_the_pool(values: dict[str, object], slots: int) -> None:
    """The convolution has the dtype of the model."""
    facts = model(architecture="Qwen3NextForCausalLM", config={"rope_theta": 1e4}, cache_groups=GROUPS)
    settings = config(page_size=16, max_running_requests=10, **values)
    budget = compute(settings, facts, free_bytes=15 * GIB, total_bytes=16 * GIB)
    assert budget.state_slots == slots
    one, page = 2 * (8 * 3 * 2 + 4 * 8 * 8 * 4), 16 * 4 * 128 * 2
    assert bytes_per_slot(settings, facts) == one
    if "max_total_tokens" not in values:
        left = 7 * GIB - (slots + 1) * one
        assert budget.pages == (left // page - 1,)
    lines = dict(budget.breakdown)
    assert lines["state"].startswith("2.09 KiB hold the recurrent states of one request")
    assert f"{slots} slots" in lines["state_slots"]


WINDOWED = (FullAttention((0,), 4, 64, 64), SlidingWindow((1, 2, 3), 4, 64, 64, 100))
LAYER = 4 * 128 * 2  # bytes of one token in one layer


def windowed(**values: object):  # type: ignore[no-untyped-def]
    """A pool for a model with one layer of full attention and three with a window of 100 tokens."""
    arguments = {"page_size": 10, "chunked_prefill_size": 200, "max_running_requests": 3, **values}
    return compute(config(**arguments), model(cache_groups=WINDOWED), free_bytes=15 * GIB, total_bytes=16 * GIB)


def test_a_window_has_pages_for_all_running_requests_and_the_other_layers_get_the_rest() -> None:
    budget = windowed(disable_radix_cache=True)
    decoding = 12  # 99 tokens, up to 9 after the last whole page, and 2 in flight, wherever the first page begins
    assert budget.pages[1] == 3 * decoding + 2 * 200 // 10
    assert budget.pages[0] == (7 * GIB - (budget.pages[1] + 1) * 30 * LAYER) // (10 * LAYER) - 1
    assert dict(budget.breakdown)["pages_1"].endswith("for the last 100 tokens of 3 running requests")
    one_pool = windowed(disable_hybrid_swa_memory=True)
    assert one_pool.pages == (7 * GIB // (40 * LAYER) - 1,)
    assert budget.pages[0] > 3.9 * one_pool.pages[0]


def test_a_window_has_pages_for_the_ends_of_cached_prefixes() -> None:
    budget, without = windowed(), windowed(disable_radix_cache=True)
    assert budget.pages[1] == without.pages[1] + budget.pages[0] // 8
    assert dict(budget.breakdown)["pages_1"].endswith("of 3 running requests and of cached prefixes")


def test_a_window_never_has_more_pages_than_full_attention() -> None:
    assert windowed(max_total_tokens=300).pages == (30, 30)


def test_the_ratio_of_a_window_can_be_chosen() -> None:
    budget = windowed(swa_full_tokens_ratio=0.5)
    assert abs(budget.pages[1] - budget.pages[0] / 2) <= 1
    assert windowed(swa_full_tokens_ratio=0.0).pages[1] == 52  # for one request: 99 + 9 + 400 tokens
    assert 10 * LAYER * (budget.pages[0] + 1) + 30 * LAYER * (budget.pages[1] + 1) <= 7 * GIB


def test_a_model_with_windows_only_takes_requests_of_any_length() -> None:
    only = (SlidingWindow((0, 1), 4, 64, 64, 100),)
    settings = config(page_size=10, chunked_prefill_size=200, max_running_requests=3, max_total_tokens=520)
    budget = compute(settings, model(cache_groups=only), free_bytes=15 * GIB, total_bytes=16 * GIB)
    assert (budget.pages, budget.max_request_tokens) == ((52,), 1000)
    less = config(page_size=10, chunked_prefill_size=200, max_running_requests=3, max_total_tokens=510)
    budget = compute(less, model(cache_groups=only), free_bytes=15 * GIB, total_bytes=16 * GIB)
    assert (budget.pages, budget.max_request_tokens) == ((51,), 510)


def test_kv_dtype_determines_the_size_of_a_page() -> None:
    (wide,), (narrow,) = bytes_per_page(config(kv_cache_dtype="float32"), model()), bytes_per_page(config(), model())
    assert wide == 2 * narrow


def test_unresolved_dtype_counts_as_the_largest() -> None:
    """It is unresolved on a platform that declares no floating-point dtype."""
    unresolved = config(dtype="auto", kv_cache_dtype="auto")
    assert bytes_per_page(unresolved, model()) == bytes_per_page(config(kv_cache_dtype="float32"), model())


def test_int8_page_includes_its_scales() -> None:
    group = FullAttention((0, 1, 2), 4, 64, 32)
    assert KVLayout(group, 16, "int8").bytes_per_page() == 3 * 16 * 4 * (64 + 4 + 32 + 4)
    assert KVLayout(group, 16, "float16").bytes_per_page() == 3 * 16 * 4 * (64 + 32) * 2


def test_quantized_gguf_weights_count_as_packed_to_four_bits_or_unpacked_to_bytes() -> None:
    """Weights that are dequantized, by an argument or by another loader, count in the model's dtype."""
    quantized = dataclasses.replace(model(), format="gguf", quantization="gguf:Q4_K", stored_types={"Q4_K": 1600})
    plain = weight_bytes(config(), model())
    assert weight_bytes(config(), quantized) == plain - 1600 * 2 + 1100
    wider = dataclasses.replace(quantized, stored_types={"Q6_K": 800, "Q4_0": 800, "F32": 50})
    assert weight_bytes(config(), wider) == plain - 1600 * 2 + 900 + 450
    for values in ({"dequantize_weights": True}, {"model_impl": "transformers"}, {"load_format": "dummy"}):
        assert weight_bytes(config(**values), quantized) == plain


def test_int8_weights_count_as_one_byte() -> None:
    plain = weight_bytes(config(), model())
    assert weight_bytes(config(), dataclasses.replace(model(), stored_types={"int8": 1000})) == plain - 1000
    tree = native_tree("LlamaForCausalLM", CONFIG)
    small = model(config={**CONFIG, "head_dim": 16}, parameters=derive.parameters(tree))
    matrices = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)  # of two layers
    assert derive.projection_parameters(tree) == matrices
    scales = 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
    expected = 2 * (derive.parameters(tree) - matrices) + matrices + 4 * scales
    assert weight_bytes(config(torchao_config="int8dq"), small) == expected
