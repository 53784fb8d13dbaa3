"""Reading `--device`, and choosing: explicit, automatic, and never by falling back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from srv.errors import PlatformUnavailable, PluginError, Refusal
from srv.platform.choose import DeviceRequest, choose, device_for_plan, parse_device
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv.platform.manifest import Manifest, ProbeResult
from srv.platform.registry import Found

GIB = 1 << 30
DRIVERLESS = ProbeResult(False, "no driver is here", "Install it", "driver_missing")


def platform(name: str, priority: int, *variants: str, simulated: bool = False) -> Found:
    profiles = {variant: DeviceFacts(variant, 64 * GIB, 1) for variant in variants or ("one",)}
    manifest = Manifest(
        name=name,
        api=(1, 0),
        core=">=0.1",
        variants=tuple(profiles),
        priority=priority,
        summary=name,
        facts=PlatformFacts(lambda device: frozenset(), profiles),
        probe=lambda context: DRIVERLESS,
        create=lambda context: None,  # type: ignore[arg-type, return-value]
        simulated=simulated,
    )
    return Found(name, f"srv-{name}", "1.0", manifest, None, f"{name}.manifest:MANIFEST")


HOST = platform("host", 0)
FAST = platform("fast", 50, "f1", "f2")
RIVAL = platform("rival", 50)
FAKE = platform("fake", 99, simulated=True)
BROKEN = Found("broken", "srv-broken", "1.0", None, PluginError("srv-broken", "Manifest.api", "is 9.0", "Update srv"))
ALL = {each.name: each for each in (BROKEN, FAKE, FAST, HOST)}


class Probes:
    """Stands in for `probe_all`: those named are available; remembers who was asked."""

    def __init__(self, *available: str, variant: str = "one", simulated: str = "") -> None:
        self.asked: list[str] = []
        self._available = available
        self._variant = variant
        self._simulated = simulated

    def __call__(self, found: Mapping[str, Found], timeout_s: float) -> dict[str, ProbeResult]:
        self.asked += found
        return {name: self._there(name) if name in self._available else DRIVERLESS for name in found}

    def _there(self, name: str) -> ProbeResult:
        device = DeviceFacts(self._variant, GIB, 1, simulated=name == self._simulated)
        return ProbeResult(True, device=device, notes=("seen",))


@pytest.mark.parametrize(
    ("text", "name", "profile", "memory", "count"),
    [
        ("fast", "fast", None, None, None),
        (" Fast:F1 ", "fast", "f1", None, None),
        ("fast:f1-32gb", "fast", "f1-32gb", None, None),
        ("fast:f1,memory=64GiB,count=8", "fast", "f1", 64 * GIB, 8),
        ("fast,memory=1.5TiB", "fast", None, 1536 * GIB, None),
        ("fast, memory = 80GB", "fast", None, 80 * 10**9, None),
        ("fast,memory=80G", "fast", None, 80 * GIB, None),
        ("fast,memory=1024", "fast", None, 1024, None),
    ],
)
def test_a_device_is_read(text: str, name: str, profile: str | None, memory: int | None, count: int | None) -> None:
    request = parse_device(text)
    assert (request.name, request.profile, request.memory_bytes, request.count) == (name, profile, memory, count)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is no device"),
        ("fast:", "it is no device"),
        ("fast:f1:f2", "it is no device"),
        ("fast f1", "it is no device"),
        ("fast,", "'' is no property"),
        ("fast,memroy=1GiB", "Did you mean memory?"),
        ("fast,memory=lots", "'lots' is no memory"),
        ("fast,memory=0GiB", "above zero"),
        ("fast,count=-1", "'-1' is no count"),
        ("fast,count=1.5", "'1.5' is no count"),
        ("fast,count", "'' is no count"),
        ("fast,count=1,count=2", "count is given twice"),
    ],
)
def test_bad_text_is_refused_with_who_set_it(text: str, says: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse_device(text, "config file serve.yaml")
    (rejected,) = raised.value.rejections
    assert rejected.code == "bad_device"
    assert rejected.who == "config file serve.yaml"
    assert says in str(rejected)


def test_a_plan_takes_its_device_from_the_profile_and_the_words_behind_it() -> None:
    assert device_for_plan(parse_device("fast:f2"), ALL) == DeviceFacts("f2", 64 * GIB, 1)
    assert device_for_plan(parse_device("fast:f2,memory=32GiB,count=8"), ALL) == DeviceFacts("f2", 32 * GIB, 8)
    assert device_for_plan(parse_device("host"), ALL).variant == "one"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("fast", "profile_needed", "fast:f1, fast:f2"),
        ("fast:f3", "unknown_profile", "Did you mean f"),
    ],
)
def test_a_plan_without_a_known_profile_is_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(Refusal) as raised:
        device_for_plan(parse_device(text), ALL)
    assert raised.value.rejections[0].code == code
    assert says in str(raised.value)


def test_an_unknown_platform_is_refused_with_the_nearest_and_what_is_installed() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        choose("fats", ALL, Probes())
    assert raised.value.code == "unknown_platform"
    assert raised.value.remedy == "Did you mean fast? Installed: broken, fake, fast, host"
    with pytest.raises(PlatformUnavailable, match="no installed plugin brings it"):
        device_for_plan(DeviceRequest("fats"), ALL)


def test_an_explicit_device_is_taken_and_no_other_is_asked() -> None:
    probes = Probes("host", "fast")
    chosen = choose("host", ALL, probes, who="environment variable SRV_DEVICE")
    assert chosen.found is HOST
    assert chosen.device == DeviceFacts("one", GIB, 1)
    assert chosen.why == "host was asked for by environment variable SRV_DEVICE"
    assert chosen.notes == ("seen",)
    assert probes.asked == ["host"]


def test_an_explicit_simulator_is_taken() -> None:
    assert choose("fake", ALL, Probes("fake")).found is FAKE


def test_an_explicit_device_that_fails_is_fatal_with_its_own_reason() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        choose("fast", ALL, Probes("host"))
    error = raised.value
    assert (error.platform, error.reason, error.remedy, error.code) == (
        "fast",
        "no driver is here",
        "Install it",
        "driver_missing",
    )


def test_an_explicit_device_whose_plugin_was_refused_is_fatal_with_the_fault() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        choose("broken", ALL, Probes("host"))
    assert raised.value.code == "plugin_refused"
    assert "srv-broken: Manifest.api: is 9.0" in raised.value.reason
    assert raised.value.remedy == "Update srv"


def test_a_profile_is_a_demand_on_the_machine() -> None:
    assert choose("fast:f1", ALL, Probes("fast", variant="f1")).device.variant == "f1"
    with pytest.raises(PlatformUnavailable) as raised:
        choose("fast:f1", ALL, Probes("fast", variant="f2"))
    assert raised.value.code == "variant_mismatch"


def test_a_described_machine_is_no_machine_to_serve_on() -> None:
    with pytest.raises(Refusal) as raised:
        choose("fast:f1,memory=64GiB", ALL, Probes("fast"))
    assert raised.value.rejections[0].code == "plan_only"


def test_automatic_takes_the_highest_priority_and_tells_of_the_others() -> None:
    chosen = choose(None, ALL, Probes("host", "fast"))
    assert chosen.found is FAST
    assert chosen.why == (
        "fast has the highest priority (50) of what is available here; not broken: its plugin was refused (is 9.0); "
        "not fake: a simulator is never chosen automatically; not host: its priority is 0"
    )


def test_automatic_passes_over_what_is_not_available_and_says_so() -> None:
    chosen = choose(None, ALL, Probes("host"))
    assert chosen.found is HOST
    assert "not fast: no driver is here" in chosen.why


def test_automatic_never_asks_or_takes_a_simulator() -> None:
    probes = Probes("fake")
    with pytest.raises(PlatformUnavailable) as raised:
        choose(None, ALL, probes)
    assert raised.value.code == "none_available"
    assert "fake" not in probes.asked


def test_automatic_passes_over_a_platform_whose_device_is_simulated_now() -> None:
    chosen = choose(None, ALL, Probes("host", "fast", simulated="fast"))
    assert chosen.found is HOST
    assert "a simulated one is never chosen automatically" in chosen.why


def test_a_simulated_device_is_taken_where_it_is_asked_for() -> None:
    chosen = choose("fast", ALL, Probes("fast", simulated="fast"))
    assert (chosen.found, chosen.device.simulated) == (FAST, True)


def test_equal_priority_is_an_error_that_names_both() -> None:
    with pytest.raises(Refusal) as raised:
        choose(None, {"fast": FAST, "rival": RIVAL}, Probes("fast", "rival"))
    (rejected,) = raised.value.rejections
    assert rejected.code == "ambiguous_device"
    assert "fast and rival" in rejected.reason
    assert rejected.remedy == "Say --device fast or --device rival"
