"""Parsing `--device`, and platform selection: explicit or automatic, and never with a silent fallback."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from every import every

from srv.errors import PlatformUnavailable, PluginError, Refusal
from srv.platform.choose import DeviceRequest, choose, device_for_plan, parse_device
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv.platform.manifest import Manifest, ProbeResult
from srv.platform.registry import InstalledPlatform

GIB = 1 << 30
DRIVERLESS = ProbeResult(False, "no driver is here", "Install it", "driver_missing")


def platform(
    name: str, priority: int, *variants: str, simulated: bool = False, cards: Mapping[str, DeviceFacts] | None = None
) -> InstalledPlatform:
    profiles = {variant: DeviceFacts(variant, 64 * GIB, 1) for variant in variants or ("one",)}
    manifest = Manifest(
        name=name,
        api=(2, 1),
        core=">=0.1",
        variants=tuple(profiles),
        priority=priority,
        summary=name,
        facts=PlatformFacts(lambda device: frozenset(), profiles, cards=cards or {}),
        probe=lambda context: DRIVERLESS,
        create=lambda context: None,  # type: ignore[arg-type, return-value]
        simulated=simulated,
    )
    return InstalledPlatform(name, f"srv-{name}", "1.0", manifest, None, f"{name}.manifest:MANIFEST")


HOST = platform("host", 0)
FAST = platform("fast", 50, "f1", "f2", cards={"x-100": DeviceFacts("f2", 24 * GIB, 1, "Fast X100")})
RIVAL = platform("rival", 50)
FAKE = platform("fake", 99, simulated=True)
BROKEN = InstalledPlatform(
    "broken", "srv-broken", "1.0", None, PluginError("srv-broken", "Manifest.api", "is 9.0", "Update srv")
)
ALL = {entry.name: entry for entry in (BROKEN, FAKE, FAST, HOST)}


class Probes:
    """A fake `probe_all`: the named platforms are available. `probed` lists the platforms that were probed."""

    def __init__(self, *available: str, variant: str = "one", simulated: str = "") -> None:
        self.probed: list[str] = []
        self._available = available
        self._variant = variant
        self._simulated = simulated

    def __call__(self, platforms: Mapping[str, InstalledPlatform], timeout_s: float) -> dict[str, ProbeResult]:
        self.probed += platforms
        return {name: self._result(name) if name in self._available else DRIVERLESS for name in platforms}

    def _result(self, name: str) -> ProbeResult:
        device = DeviceFacts(self._variant, GIB, 1, simulated=name == self._simulated)
        return ProbeResult(True, device=device, notes=("seen",))


@every(
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
def test_device_is_parsed(text: str, name: str, profile: str | None, memory: int | None, count: int | None) -> None:
    request = parse_device(text)
    assert (request.name, request.profile, request.memory_bytes, request.count) == (name, profile, memory, count)


@every(
    ("text", "message"),
    [
        ("", "it is not a valid device"),
        ("fast:", "it is not a valid device"),
        ("fast:f1:f2", "it is not a valid device"),
        ("fast f1", "it is not a valid device"),
        ("fast,", "'' is not a property of a device"),
        ("fast,memroy=1GiB", "Did you mean memory?"),
        ("fast,memory=lots", "'lots' is not an amount of memory"),
        ("fast,memory=0GiB", "above zero"),
        ("fast,count=-1", "'-1' is not a number of devices"),
        ("fast,count=1.5", "'1.5' is not a number of devices"),
        ("fast,count", "'' is not a number of devices"),
        ("fast,count=1,count=2", "count is set twice. Set count once. [bad_device]"),
    ],
)
def test_malformed_device_is_refused_with_its_source(text: str, message: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse_device(text, "config file serve.yaml")
    (rejected,) = raised.value.rejections
    assert rejected.code == "bad_device"
    assert rejected.who == "config file serve.yaml"
    assert message in str(rejected)


def test_plan_takes_its_device_from_the_profile_and_its_settings() -> None:
    assert device_for_plan(parse_device("fast:f2"), ALL) == DeviceFacts("f2", 64 * GIB, 1)
    assert device_for_plan(parse_device("fast:f2,memory=32GiB,count=8"), ALL) == DeviceFacts("f2", 32 * GIB, 8)
    assert device_for_plan(parse_device("host"), ALL).variant == "one"


@every("name", ["x-100", "X100", "x_100"])
def test_card_is_named_as_its_owner_calls_it(name: str) -> None:
    described = device_for_plan(parse_device(f"fast:{name},count=2"), ALL)
    assert described == DeviceFacts("f2", 24 * GIB, 2, "Fast X100")


def test_card_as_a_platform_is_refused_with_its_platform() -> None:
    with pytest.raises(PlatformUnavailable, match=r"Did you mean fast:x-100\? Installed"):
        device_for_plan(parse_device("x100"), ALL)


@every(
    ("text", "code", "message"),
    [
        ("fast", "profile_needed", "fast:f1, fast:f2"),
        ("fast:f3", "unknown_profile", "Did you mean f"),
        ("fast:x101", "unknown_profile", "Did you mean x-100? Known: fast:f1, fast:f2, and the cards x-100."),
        ("host:x100", "unknown_profile", "Did you mean fast:x-100? Known: host:one."),
    ],
)
def test_a_plan_without_a_known_profile_is_refused(text: str, code: str, message: str) -> None:
    with pytest.raises(Refusal) as raised:
        device_for_plan(parse_device(text), ALL)
    assert raised.value.rejections[0].code == code
    assert message in str(raised.value)


def test_unknown_platform_is_refused_with_the_nearest_and_the_installed_ones() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        choose("fats", ALL, Probes())
    assert raised.value.code == "unknown_platform"
    assert raised.value.remedy == "Did you mean fast? Installed: broken, fake, fast, host"
    with pytest.raises(PlatformUnavailable, match="no installed plugin provides it"):
        device_for_plan(DeviceRequest("fats"), ALL)


def test_explicit_device_is_chosen_and_no_other_is_probed() -> None:
    probes = Probes("host", "fast")
    chosen = choose("host", ALL, probes, source="environment variable SRV_DEVICE")
    assert chosen.installed is HOST
    assert chosen.device == DeviceFacts("one", GIB, 1)
    assert chosen.reason == "host was requested by environment variable SRV_DEVICE"
    assert chosen.notes == ("seen",)
    assert probes.probed == ["host"]


def test_explicit_simulator_is_chosen() -> None:
    assert choose("fake", ALL, Probes("fake")).installed is FAKE


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


def test_profile_must_match_the_machine() -> None:
    assert choose("fast:f1", ALL, Probes("fast", variant="f1")).device.variant == "f1"
    with pytest.raises(PlatformUnavailable) as raised:
        choose("fast:f1", ALL, Probes("fast", variant="f2"))
    assert raised.value.code == "variant_mismatch"


def test_described_machine_cannot_be_served_on() -> None:
    with pytest.raises(Refusal) as raised:
        choose("fast:f1,memory=64GiB", ALL, Probes("fast"))
    assert raised.value.rejections[0].code == "plan_only"


def test_automatic_choice_takes_the_highest_priority_and_explains_the_others() -> None:
    chosen = choose(None, ALL, Probes("host", "fast"))
    assert chosen.installed is FAST
    assert chosen.reason == (
        "fast has the highest priority (50) of the platforms available here; "
        "not broken: its plugin was refused (is 9.0); not fake: a simulator is never chosen "
        "automatically; not host: its priority is 0"
    )


def test_automatic_choice_skips_unavailable_platforms_with_their_reason() -> None:
    chosen = choose(None, ALL, Probes("host"))
    assert chosen.installed is HOST
    assert "not fast: no driver is here" in chosen.reason


def test_automatic_choice_never_probes_or_takes_a_simulator() -> None:
    probes = Probes("fake")
    with pytest.raises(PlatformUnavailable) as raised:
        choose(None, ALL, probes)
    assert raised.value.code == "none_available"
    assert "fake" not in probes.probed


def test_automatic_choice_skips_a_platform_whose_device_is_simulated() -> None:
    chosen = choose(None, ALL, Probes("host", "fast", simulated="fast"))
    assert chosen.installed is HOST
    assert "a simulated one is never chosen automatically" in chosen.reason


def test_requested_simulated_device_is_chosen() -> None:
    chosen = choose("fast", ALL, Probes("fast", simulated="fast"))
    assert (chosen.installed, chosen.device.simulated) == (FAST, True)


def test_equal_priority_is_an_error_that_names_both() -> None:
    with pytest.raises(Refusal) as raised:
        choose(None, {"fast": FAST, "rival": RIVAL}, Probes("fast", "rival"))
    (rejected,) = raised.value.rejections
    assert rejected.code == "ambiguous_device"
    assert "fast and rival" in rejected.reason
    assert rejected.remedy == "Use --device fast or --device rival."
