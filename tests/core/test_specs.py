"""Cache specs and pool layouts: names, shapes and bytes, the closed union, and everything that distinguishes specs."""

from __future__ import annotations

import math

import msgspec
import pytest
from args_world import model
from every import every
from hypothesis import given
from hypothesis import strategies as st

from srv.dtypes import ITEM_SIZES
from srv.errors import InternalError
from srv.models.facts.sharding import rank_facts
from srv.specs import (
    PLAIN_ORDERS,
    CacheSpec,
    FullAttention,
    KVLayout,
    Latent,
    Recurrent,
    SlidingWindow,
    StateTensor,
    attention_specs,
    single_pool,
    spec_name,
)

STATES = (StateTensor("convolution", (6, 3), "float32"), StateTensor("recurrence", (2, 4, 5), "bfloat16"))
FULL = FullAttention((0, 4), 2, 24, 16)
WINDOW = SlidingWindow((1,), 2, 24, 16, 7)
LATENT = Latent((2, 5, 6), 33, 9)
INDEXED = Latent((2, 5, 6), 33, 9, index_dim=7, indexed=(2, 6))
RECURRENT = Recurrent((3, 7), STATES)
SPECS: tuple[CacheSpec, ...] = (FULL, WINDOW, LATENT, RECURRENT, INDEXED)

SIZES = st.integers(1, 65)
LAYERS = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True).map(tuple)
STATE = st.builds(
    StateTensor,
    st.text("abc", min_size=1, max_size=3),
    st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    st.sampled_from(sorted(ITEM_SIZES)),
)
PAGED = st.one_of(
    st.builds(FullAttention, LAYERS, SIZES, SIZES, SIZES),
    st.builds(SlidingWindow, LAYERS, SIZES, SIZES, SIZES, SIZES),
    st.builds(Latent, LAYERS, SIZES, SIZES),
    LAYERS.flatmap(
        lambda layers: st.builds(
            Latent, st.just(layers), SIZES, SIZES, index_dim=SIZES, indexed=st.just(layers[: len(layers) // 2])
        )
    ),
)
RECURRENTS = st.builds(
    Recurrent, LAYERS, st.lists(STATE, min_size=1, max_size=4, unique_by=lambda state: state.name).map(tuple)
)


def layout(spec: CacheSpec, dtype: str = "bfloat16", order: str = "page_token_head") -> KVLayout:
    return KVLayout(spec, 16, dtype, order)


def test_the_union_survives_msgspec() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SPECS), type=tuple[CacheSpec, ...]) == SPECS
    assert [spec_name(spec) for spec in SPECS] == ["full", "window", "latent", "recurrent", "latent"]
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'ring'"):
        msgspec.json.decode(b'{"type": "ring", "layers": []}', type=CacheSpec)


def test_names_and_plain_tensors_of_each_spec() -> None:
    assert [layout(spec).names() for spec in SPECS] == [
        ("key", "value"),
        ("key", "value"),
        ("latent", "rope"),
        ("convolution", "recurrence"),
        ("latent", "rope", "index"),
    ]
    assert layout(INDEXED).plain_tensors(5)["index"] == ((6, 16, 7), "bfloat16")
    assert [layout(INDEXED).layers_of(name) for name in ("rope", "index")] == [(2, 5, 6), (2, 6)]
    assert layout(FULL).plain_tensors(5) == {"key": ((6, 16, 2, 24), "bfloat16"), "value": ((6, 16, 2, 16), "bfloat16")}
    flat = layout(WINDOW, order="page_token_flat").plain_tensors(5)
    assert flat == {"key": ((6, 16, 48), "bfloat16"), "value": ((6, 16, 32), "bfloat16")}
    for order in (*PLAIN_ORDERS, "an_order_of_heads"):
        assert layout(LATENT, order=order).plain_tensors(5) == {
            "latent": ((6, 16, 33), "bfloat16"),
            "rope": ((6, 16, 9), "bfloat16"),
        }
        assert layout(RECURRENT, "float16", order).plain_tensors(5) == {
            "convolution": ((6, 6, 3), "float32"),
            "recurrence": ((6, 2, 4, 5), "bfloat16"),
        }


@given(PAGED, st.sampled_from(sorted(ITEM_SIZES)), st.integers(1, 40), st.integers(0, 9), st.sampled_from(PLAIN_ORDERS))
def test_a_page_has_the_bytes_of_its_plain_tensors(
    spec: FullAttention | SlidingWindow | Latent, dtype: str, page_size: int, pages: int, order: str
) -> None:
    kv_layout = KVLayout(spec, page_size, dtype, order)
    tensors = kv_layout.plain_tensors(pages)
    assert tuple(tensors) == kv_layout.names()
    layers = {name: len(kv_layout.layers_of(name)) for name in tensors}
    size = sum(math.prod(shape) * ITEM_SIZES[kind] * layers[name] for name, (shape, kind) in tensors.items())
    assert size == (pages + 1) * kv_layout.bytes_per_page() == (pages + 1) * page_size * spec.bytes_per_token(dtype)


@given(RECURRENTS, st.integers(0, 9))
def test_a_slot_has_the_bytes_of_its_plain_tensors(spec: Recurrent, slots: int) -> None:
    tensors = layout(spec).plain_tensors(slots)
    assert tuple(tensors) == layout(spec).names()
    size = sum(math.prod(shape) * ITEM_SIZES[kind] for shape, kind in tensors.values()) * len(spec.layers)
    assert size == (slots + 1) * spec.bytes_per_slot()


def test_int8_counts_a_scale_per_vector_and_has_no_plain_tensors() -> None:
    assert FULL.bytes_per_token("int8") == 2 * 2 * (24 + 4 + 16 + 4)
    assert LATENT.bytes_per_token("int8") == 3 * (33 + 4 + 9 + 4)
    for spec in (FULL, WINDOW, LATENT):
        with pytest.raises(InternalError, match=rf"of a {spec_name(spec)} cache group have no place for int8 scales"):
            layout(spec, "int8").plain_tensors(1)
    assert layout(RECURRENT, "int8").plain_tensors(1) == layout(RECURRENT).plain_tensors(1)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(InternalError, match="head_page_token is not a plain order: page_token_head or page_token_flat"):
        layout(FULL, order="head_page_token").plain_tensors(1)
    with pytest.raises(InternalError, match="a recurrent cache group has no pages"):
        layout(RECURRENT).bytes_per_page()
    with pytest.raises(ValueError, match="two states of a layer have the same name: convolution, convolution"):
        Recurrent((0,), (STATES[0], STATES[0]))
    with pytest.raises(ValueError, match="state position has dtype int64, which is not one of float32, bfloat16"):
        StateTensor("position", (1,), "int64")


def test_one_pool_merges_attention_layers_only() -> None:
    assert single_pool(SPECS) == (FullAttention((0, 1, 4), 2, 24, 16), LATENT, RECURRENT, INDEXED)
    assert single_pool((RECURRENT, LATENT)) == (RECURRENT, LATENT)
    assert attention_specs(SPECS) == (FULL, WINDOW)


@every("spec", [spec for spec in SPECS if not isinstance(spec, Recurrent)])
def test_a_rank_stores_its_kv_heads_and_all_latents(spec: CacheSpec) -> None:
    (rank_group,) = rank_facts(model(cache_groups=(spec,)), 2).cache_groups
    match spec:
        case FullAttention() | SlidingWindow():
            assert rank_group == msgspec.structs.replace(spec, kv_heads=spec.kv_heads // 2)
        case Latent():
            assert rank_group == spec
