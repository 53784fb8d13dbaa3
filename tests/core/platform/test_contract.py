"""The live contract checks: the platform that `create` returns has all members, compatible ones, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from every import every

from srv.dist.group import RankGroup
from srv.errors import PlatformUnavailable, PluginError
from srv.platform.capabilities import CAPABILITIES
from srv.platform.contract import OPTIONAL, check_platform, create_platform, join
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv.platform.interface import Check, GraphKey, KVBuffers, Memory, OpImpl, Platform
from srv.platform.manifest import EngineContext, Manifest, ProbeResult
from srv.platform.registry import InstalledPlatform
from srv.platform.streams import Streams, host_streams
from srv.specs import KVLayout

DEVICE = DeviceFacts("one", 1 << 30, 1)
CONTEXT = EngineContext(DEVICE, 0)


class Good:
    """A minimal platform."""

    name = "example"
    ops: tuple[Any, ...] = ()
    graphs: Any = None

    def device(self, index: int) -> torch.device:
        return torch.device("meta")

    def init_worker(self, rank: int) -> None: ...

    def memory(self, device: torch.device) -> Memory:
        return Memory(1, 1)

    def streams(self, device: torch.device) -> Streams:
        return host_streams()

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
        raise NotImplementedError

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        raise NotImplementedError

    def post_load(self, model: torch.nn.Module) -> None: ...

    def diagnose(self) -> list[Check]:
        return []

    def _own_business(self) -> None: ...


class Older:
    """A platform without one member of the present version."""

    name, ops, graphs = Good.name, Good.ops, None
    device, init_worker, memory = Good.device, Good.init_worker, Good.memory
    streams, staging, copy_pages = Good.streams, Good.staging, Good.copy_pages
    kv_buffers, post_load = Good.kv_buffers, Good.post_load


class Recorder:
    """A minimal implementation of `Graphs`."""

    def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        return run()

    def replay(self, key: GraphKey, metadata: Any) -> None: ...


class Capturing(Good):
    """A platform with graphs."""

    def __init__(self) -> None:
        self.graphs = Recorder()


class Lacking(Good):
    @property
    def memory(self) -> Any:  # type: ignore[override]
        raise AttributeError("not yet")


class Renamed(Good):
    def kv_buffers(self, layout: KVLayout, count: int) -> KVBuffers:  # type: ignore[override]
        raise NotImplementedError


class Demanding(Good):
    def post_load(self, model: torch.nn.Module, level: int) -> None: ...  # type: ignore[override]


class Generous(Good):
    def post_load(self, model: torch.nn.Module, level: int = 3, **more: object) -> None: ...


class Extra(Good):
    def synchronise(self) -> None: ...


class Misnamed(Good):
    name = "sample"


class BadOps(Good):
    ops = ("matmul",)


def found(
    create: Callable[[EngineContext], object], origin: str = "plugin_example", *capabilities: str
) -> InstalledPlatform:
    manifest = Manifest(
        name="example",
        api=(2, 1),
        core=">=0.1",
        variants=("one",),
        priority=1,
        summary="an example",
        facts=PlatformFacts(lambda device: frozenset(capabilities), {"one": DEVICE}),
        probe=lambda context: ProbeResult(True, device=DEVICE),
        create=create,  # type: ignore[arg-type]
    )
    return InstalledPlatform("example", "srv-example", "1.0", manifest, None, f"{origin}.manifest:MANIFEST")


@every("platform", [Good, Generous])
def test_a_platform_passes(platform: type) -> None:
    live = create_platform(found(lambda context: platform()), CONTEXT)
    assert isinstance(live, platform)


@every(
    ("platform", "member", "reason"),
    [
        (Lacking, "Lacking.memory", "missing"),
        (Renamed, "Renamed.kv_buffers", "count"),
        (Demanding, "Demanding.post_load", "level"),
        (Extra, "Extra.synchronise", "not a member of contract version 2.1"),
        (Misnamed, "Misnamed.name", "'sample'"),
        (BadOps, "BadOps.ops[0]", "str"),
        (lambda: None, "NoneType.copy_pages", "missing"),
    ],
)
def test_a_broken_platform_is_refused_by_member(platform: Callable[[], object], member: str, reason: str) -> None:
    with pytest.raises(PluginError) as raised:
        create_platform(found(lambda context: platform()), CONTEXT)
    assert raised.value.distribution == "srv-example"
    assert raised.value.member == member
    assert reason in raised.value.reason


def test_a_member_newer_than_the_declared_version_is_not_required_and_refused() -> None:
    since = {"diagnose": (2, 3)}
    check_platform(Older(), "srv-example", api=(2, 2), since=since)
    with pytest.raises(PluginError, match=r"Older\.diagnose: is missing"):
        check_platform(Older(), "srv-example", api=(2, 3), since=since)
    check_platform(Good(), "srv-example", api=(2, 3), since=since)
    with pytest.raises(PluginError, match=r"Good\.diagnose: belongs to contract version 2\.3.*Set api=\(2, 3\)"):
        check_platform(Good(), "srv-example", api=(2, 2), since=since)


def test_an_optional_member_is_required_only_with_its_capability_and_checked_if_present() -> None:
    assert OPTIONAL == {
        "communicator": "communicator",
        "memory_use": "memory_use",
        "profiler_range": "profiler_ranges",
        "graph_piece": "piecewise_graphs",
    }
    assert OPTIONAL.keys() <= vars(Platform).keys()
    assert set(OPTIONAL.values()) <= CAPABILITIES.keys()
    live: Any = Good()
    assert create_platform(found(lambda context: live, "plugin_example", "paged_kv"), CONTEXT) is live
    with pytest.raises(PluginError, match=r"Good\.communicator: is missing"):
        create_platform(found(lambda context: live, "plugin_example", "communicator"), CONTEXT)
    live.communicator = lambda: None
    with pytest.raises(PluginError, match=r"Good\.communicator: has the signature \(\)"):
        create_platform(found(lambda context: live), CONTEXT)


def test_signatures_of_graphs_are_checked() -> None:
    live = Capturing()
    check_platform(live, "srv-example")
    live.graphs.replay = lambda key: None  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(PluginError, match=r"Capturing\.graphs\.replay: has the signature \(key\)"):
        check_platform(live, "srv-example")
    live.graphs = object()  # type: ignore[assignment]
    with pytest.raises(PluginError, match=r"Capturing\.graphs\.capture: is missing"):
        check_platform(live, "srv-example")
    live.graphs = None  # type: ignore[assignment]
    check_platform(live, "srv-example")


def test_ops_must_be_op_impls() -> None:
    live = Good()
    good = OpImpl("rms_norm", "plain", lambda args: None, "package:function")
    live.ops = (good,)
    assert create_platform(found(lambda context: live), CONTEXT).ops == (good,)
    live.ops = (good, "rms_norm")  # type: ignore[assignment]
    with pytest.raises(PluginError, match=r"Good\.ops\[1\]"):
        create_platform(found(lambda context: live), CONTEXT)


def test_platform_unavailable_from_create_is_not_wrapped() -> None:
    def create(context: EngineContext) -> object:
        raise PlatformUnavailable("example", "no licence", "Buy one", "no_licence")

    with pytest.raises(PlatformUnavailable) as raised:
        create_platform(found(create), CONTEXT)
    assert raised.value.code == "no_licence"


def test_any_other_failure_of_create_names_the_plugin() -> None:
    def create(context: EngineContext) -> object:
        raise OSError("libexample.so: cannot open shared object file")

    with pytest.raises(PlatformUnavailable) as raised:
        create_platform(found(create), CONTEXT)
    assert raised.value.code == "create_failed"
    assert "libexample.so" in raised.value.reason
    assert "srv-example 1.0" in raised.value.reason


def test_a_refused_plugin_creates_nothing() -> None:
    error = PluginError("srv-example", "Manifest.api", "is too new", "Update srv")
    with pytest.raises(PluginError) as raised:
        create_platform(InstalledPlatform("example", "srv-example", "1.0", None, error), CONTEXT)
    assert raised.value is error


def test_create_that_patches_core_is_refused_and_undone() -> None:
    import srv.platform.ops

    original = srv.platform.ops.Ops.bind

    def create(context: EngineContext) -> object:
        srv.platform.ops.Ops.bind = lambda self, op, args: print  # type: ignore[method-assign, assignment, return-value]
        return Good()

    with pytest.raises(PluginError) as raised:
        create_platform(found(create), CONTEXT)
    assert raised.value.member == "srv.platform.ops.Ops.bind"
    assert srv.platform.ops.Ops.bind is original


def test_create_that_swaps_the_code_of_a_function_is_refused_and_undone() -> None:
    from srv.platform.host import versions

    def create(context: EngineContext) -> object:
        versions.__code__ = (lambda *distributions: {}).__code__
        return Good()

    with pytest.raises(PluginError, match=r"srv\.platform\.host\.versions"):
        create_platform(found(create), CONTEXT)
    assert "torch" in versions("torch")


def test_create_that_adds_to_core_is_refused_and_undone() -> None:
    import srv.types

    def create(context: EngineContext) -> object:
        srv.types.shortcut = 1  # type: ignore[attr-defined]
        return Good()

    with pytest.raises(PluginError, match=r"srv\.types\.shortcut"):
        create_platform(found(create), CONTEXT)
    assert not hasattr(srv.types, "shortcut")


class Joined:
    """A minimal implementation of `Communicator`."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def barrier(self) -> None: ...

    def abort(self) -> None: ...


def test_a_communicator_is_checked_when_ranks_join() -> None:
    live: Any = Good()
    joined = Joined()
    live.communicator = lambda group: joined
    assert join(live, RankGroup(size=2), {"communicator"}) is joined
    with pytest.raises(PluginError, match=r"Good\.communicator\('tensor'\)\.send: is missing"):
        join(live, RankGroup(size=2), {"communicator", "send_recv"})
    joined.all_reduce = lambda: None  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(PluginError, match=r"Good\.communicator\('tensor'\)\.all_reduce: has the signature \(\)"):
        join(live, RankGroup(size=2), {"communicator"})
