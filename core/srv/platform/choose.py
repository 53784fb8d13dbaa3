"""Platform selection: the platform that `--device` names, or the best available one.

    --device                                  meaning
    NAME                                      that platform, with the device of this machine
    NAME:PROFILE                              the same, and the device must be of the profile's variant
    NAME:PROFILE,memory=64GiB,count=8         a machine described for `srv plan`, present or not
    NAME:CARD                                 a card by its own name, wherever a profile may stand

Selection: command line > environment > config file > automatic. The first three arrive here as
`requested`, and `source` says which one; automatic is None. Nothing falls back silently: a requested platform
that cannot be used is an error with its plugin's own reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from srv.errors import PlatformUnavailable, Refusal, Rejection
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import DEFAULT_TIMEOUT_S, ProbeResult
from srv.platform.registry import InstalledPlatform

Probe = Callable[[Mapping[str, InstalledPlatform], float], Mapping[str, ProbeResult]]

_DEVICE_PATTERN = re.compile(r"(?P<name>[A-Za-z][\w-]*)(?::(?P<profile>[\w.-]+))?(?P<rest>(?:,[^,]*)*)")
_MEMORY_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b?|b)?", re.IGNORECASE)
_PREFIXES = "kmgt"
_PROPERTIES = {"memory": ("an amount of memory", "memory=64GiB"), "count": ("a number of devices", "count=8")}
_EXAMPLE = "Write NAME, NAME:PROFILE, or NAME:PROFILE,memory=64GiB,count=8"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The parsed value of `--device`. None: not given. `source`: who set it, for messages."""

    name: str
    profile: str | None = None
    memory_bytes: int | None = None
    count: int | None = None
    text: str = ""
    source: str = "command line"

    def refusal(self, code: str, reason: str, remedy: str) -> Refusal:
        """A refusal of this request. A full stop is appended to `remedy`."""
        sentence = remedy if remedy.endswith("?") else f"{remedy}."
        return Refusal((Rejection(code, "device", self.text or self.name, self.source, reason, sentence),))


class ChosenPlatform(NamedTuple):
    """The platform to serve on, its device as found by the probe, and the reason why it was chosen."""

    installed: InstalledPlatform
    device: DeviceFacts
    reason: str
    notes: tuple[str, ...] = ()


def parse_device(text: str, source: str = "command line") -> DeviceRequest:
    """Parse the value of `--device`; Refusal if it is malformed. Does not check the platform's name."""
    request = DeviceRequest(text.strip(), text=text.strip(), source=source)
    match = _DEVICE_PATTERN.fullmatch(request.text)
    if match is None:
        raise request.refusal("bad_device", "it is not a valid device", _EXAMPLE)
    properties: dict[str, int] = {}
    for part in match["rest"].split(",")[1:]:
        key, value = _parse_property(part, request)
        if key in properties:
            raise request.refusal("bad_device", f"{key} is set twice", f"Set {key} once")
        properties[key] = value
    return replace(
        request,
        name=match["name"].lower(),
        profile=match["profile"] and match["profile"].lower(),
        memory_bytes=properties.get("memory"),
        count=properties.get("count"),
    )


def _parse_property(part: str, request: DeviceRequest) -> tuple[str, int]:
    key, equals, value = (field.strip() for field in part.partition("="))
    key = key.lower()
    if key not in _PROPERTIES:
        raise request.refusal(
            "bad_device", f"{key!r} is not a property of a device", _nearest(key, _PROPERTIES) or _EXAMPLE
        )
    number = _parse_bytes(value) if key == "memory" else _parse_count(value)
    if not equals or not number:
        expected, example = _PROPERTIES[key]
        raise request.refusal("bad_device", f"{value!r} is not {expected}", f"Use a number above zero, as in {example}")
    return key, number


def _parse_bytes(text: str) -> int | None:
    """Bytes of "64GiB", "64GB", "64G" (taken as GiB) or "68719476736"; None if it is not a size."""
    match = _MEMORY_PATTERN.fullmatch(text)
    if match is None:
        return None
    unit = (match["unit"] or "b").lower()
    base = 1000 if unit.endswith("b") and "i" not in unit else 1024
    power = _PREFIXES.find(unit[0]) + 1
    return int(float(match["number"]) * base**power)


def _parse_count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def device_for_plan(request: DeviceRequest, platforms: Mapping[str, InstalledPlatform]) -> DeviceFacts:
    """The device that `srv plan` resolves for, from the manifest's profiles; nothing is probed.

    The name alone is enough if a platform has only one profile. PlatformUnavailable for an unknown name or a
    refused plugin, Refusal for a profile that is unknown or missing.
    """
    facts = _requested_platform(request, platforms).loaded.facts
    profiles, cards = facts.profiles, facts.cards
    profile_names = ", ".join(f"{request.name}:{profile}" for profile in profiles)
    if request.profile is None:
        if len(profiles) != 1:
            raise request.refusal(
                "profile_needed", f"{request.name} has several profiles", f"Choose one of {profile_names}"
            )
        device = next(iter(profiles.values()))
    elif request.profile in profiles:
        device = profiles[request.profile]
    elif (card := _card(request.profile, cards)) is not None:
        device = cards[card]
    else:
        hint = _cards_elsewhere(request.profile, platforms) or _nearest(request.profile, (*profiles, *cards))
        hint_known = f"Known: {profile_names}" + (f", and the cards {', '.join(cards)}" if cards else "")
        reason = f"{request.name} has no profile {request.profile!r}" + (" and no card of that name" if cards else "")
        raise request.refusal("unknown_profile", reason, f"{hint} {hint_known}" if hint else hint_known)
    return replace(
        device, memory_bytes=request.memory_bytes or device.memory_bytes, count=request.count or device.count
    )


def choose(
    requested: str | None,
    platforms: Mapping[str, InstalledPlatform],
    probe: Probe | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    source: str = "command line",
) -> ChosenPlatform:
    """The platform to launch on. `requested`: the text of `--device`, from `source`; None: automatic.

    PlatformUnavailable if the requested platform (or, automatically, every platform) cannot be used; Refusal if the
    text is malformed, describes another machine, or two platforms have equal priority. `probe`: replaces `probe_all`
    in tests.
    """
    if probe is None:
        from srv.platform.probe import probe_all  # a plan for another machine probes nothing

        probe = probe_all
    if requested is None:
        return _choose_automatically(platforms, probe, timeout_s)
    return _choose_requested(parse_device(requested, source), platforms, probe, timeout_s)


def _choose_requested(
    request: DeviceRequest, platforms: Mapping[str, InstalledPlatform], probe: Probe, timeout_s: float
) -> ChosenPlatform:
    if request.memory_bytes is not None or request.count is not None:
        raise request.refusal(
            "plan_only",
            "memory and count describe a machine for `srv plan`; a server uses the machine as it is",
            "Leave them out",
        )
    platform = _requested_platform(request, platforms)
    variant = None if request.profile is None else device_for_plan(request, platforms).variant
    result = probe({platform.name: platform}, timeout_s)[platform.name]
    if not result.available or result.device is None:
        raise PlatformUnavailable(platform.name, result.reason, result.remedy, result.code or "unavailable")
    if variant is not None and result.device.variant != variant:
        raise PlatformUnavailable(
            platform.name,
            f"{request.text} was requested by {request.source}, but this machine has {result.device.variant}",
            f"Use --device {platform.name}, or start on a machine with {variant}",
            "variant_mismatch",
        )
    return ChosenPlatform(platform, result.device, f"{request.text} was requested by {request.source}", result.notes)


def _choose_automatically(platforms: Mapping[str, InstalledPlatform], probe: Probe, timeout_s: float) -> ChosenPlatform:
    candidates = {
        name: platform
        for name, platform in platforms.items()
        if platform.manifest is not None and not platform.manifest.simulated
    }
    results = probe(candidates, timeout_s)
    devices = {
        name: result.device
        for name, result in results.items()
        if result.available and result.device is not None and not result.device.simulated
    }
    if not devices:
        raise PlatformUnavailable(
            "(automatic choice)",
            f"no platform is available here: {_rejection_reasons(platforms, results)}",
            "Install a platform for this machine, or fix what the reasons name",
            "none_available",
        )
    best = max(candidates[name].loaded.priority for name in devices)
    leaders = sorted(name for name in devices if candidates[name].loaded.priority == best)
    if len(leaders) > 1:
        raise _tie_refusal(leaders, best)
    chosen = leaders[0]
    others = _rejection_reasons({name: platform for name, platform in platforms.items() if name != chosen}, results)
    reason = f"{chosen} has the highest priority ({best}) of the platforms available here"
    reason = f"{reason}; {others}" if others else reason
    return ChosenPlatform(
        platforms[chosen], devices[chosen], reason, (*results[chosen].notes, *unused_cards(results, chosen))
    )


def unused_cards(results: Mapping[str, ProbeResult], chosen: str | None) -> tuple[str, ...]:
    """A warning for each platform that has a card on this machine but cannot use it, except for the chosen one."""
    return tuple(
        f"{', '.join(result.present)} is not used: {name}: {result.reason}. {result.remedy.rstrip('.')}."
        for name, result in sorted(results.items())
        if result.present and not result.available and name != chosen
    )


def _tie_refusal(leaders: list[str], priority: int) -> Refusal:
    options = " or ".join(f"--device {name}" for name in leaders)
    reason = f"{' and '.join(leaders)} are available with the same priority {priority}"
    return Refusal((Rejection("ambiguous_device", "device", None, "automatic choice", reason, f"Use {options}."),))


def _rejection_reasons(platforms: Mapping[str, InstalledPlatform], results: Mapping[str, ProbeResult]) -> str:
    return "; ".join(
        f"not {name}: {_rejection_reason(platform, results.get(name))}" for name, platform in sorted(platforms.items())
    )


def _rejection_reason(installed: InstalledPlatform, result: ProbeResult | None) -> str:
    if installed.manifest is None:
        error = installed.error
        return "its plugin was refused" if error is None else f"its plugin was refused ({error.reason})"
    if installed.manifest.simulated:
        return "a simulator is never chosen automatically"
    if result is None:
        return "it was not probed"
    if result.device is not None and result.device.simulated:
        return f"its device is {result.device.name}, and a simulated one is never chosen automatically"
    return f"its priority is {installed.manifest.priority}" if result.available else result.reason


def _requested_platform(request: DeviceRequest, platforms: Mapping[str, InstalledPlatform]) -> InstalledPlatform:
    """The requested platform; PlatformUnavailable if there is none of that name, or its plugin was refused."""
    platform = platforms.get(request.name)
    if platform is None:
        hint = _cards_elsewhere(request.name, platforms) or _nearest(request.name, platforms)
        remedy = f"{hint} {_list_installed(platforms)}" if hint else _list_installed(platforms)
        raise PlatformUnavailable(request.name, "no installed plugin provides it", remedy, "unknown_platform")
    if platform.manifest is None:
        error = platform.error
        reason = "it has no manifest" if error is None else f"{error.distribution}: {error.member}: {error.reason}"
        remedy = f"Reinstall {platform.distribution}" if error is None else error.remedy
        raise PlatformUnavailable(platform.name, f"its plugin was refused: {reason}", remedy, "plugin_refused")
    return platform


def _card(name: str, cards: Iterable[str]) -> str | None:
    """The card that a name in lower case means; hyphens and underscores do not count ("x-100" is "x100")."""
    return next((card for card in cards if _bare(card) == _bare(name)), None)


def _bare(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _cards_elsewhere(name: str, platforms: Mapping[str, InstalledPlatform]) -> str:
    """A hint at the platforms that have a card of this name; "" if none has."""
    of = {
        platform.name: platform.manifest.facts.cards for platform in platforms.values() if platform.manifest is not None
    }
    cards = [f"{platform}:{card}" for platform, cards in of.items() if (card := _card(name, cards)) is not None]
    return f"Did you mean {' or '.join(cards)}?" if cards else ""


def _list_installed(platforms: Mapping[str, InstalledPlatform]) -> str:
    return f"Installed: {', '.join(sorted(platforms)) or 'none'}"


def _nearest(name: str, names: Iterable[str]) -> str:
    import difflib  # imported only if a name is misspelt

    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else ""
