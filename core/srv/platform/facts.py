"""What a platform says without its device: facts, defaults, constraints, backend specs. Torch-free data.

A statement never sees more than it declares in `reads`; resolution (`srv.args.resolve`) orders statements
by what they read, applies them by layer, and tells their story. Nothing here edits a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from srv.models.facts import ModelFacts

FAMILIES = ("attention", "sampling", "moe", "quantization", "grammar")
SUPPORT = ("supported", "limited", "experimental", "unsupported", "not_applicable")  # what `Support.status` may be


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One kind of device as a machine has it, or as a profile describes it.

    `variant` is one of the manifest's ("avx512", "a3"); `memory_bytes` of one device; `count` devices;
    `versions` of drivers and toolkits by name; `name` as the vendor prints it. `features`: what this device
    has and its variant does not imply, by the vendor's own names (instruction sets, optional units).
    `simulated`: software plays the device; it is never chosen automatically, and proves nothing about hardware.
    """

    variant: str
    memory_bytes: int
    count: int
    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    simulated: bool = False


class Seen(Protocol):
    """What a statement sees: device and model facts, and the arguments it declared in `reads`.

    Reading an argument that was not declared raises `UndeclaredRead`; reading one that has no value
    gives None.
    """

    @property
    def device(self) -> DeviceFacts: ...
    @property
    def model(self) -> ModelFacts | None: ...
    @property
    def capabilities(self) -> frozenset[str]: ...
    def __getitem__(self, argument: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Default:
    """A value for an argument that nobody above this layer has set.

    `compute(seen)` gives the value, or None for "nothing to say here". `reason` is a clause that completes
    "page_size = 128 because ...".
    """

    argument: str
    compute: Callable[[Seen], Any]
    reason: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contribution:
    """One part of a quantity that several owners add to (reserved device memory, say).

    `quantity` is a name declared by core; `compute(seen)` gives a number in the quantity's unit, 0 for none.
    `instead_of`: core's parts of that quantity, by name, whose place a platform's part takes. `of_rest`: the number is
    a share, from 0 to 1, of what the parts before it leave of the device's memory; such parts come after all others.
    """

    quantity: str
    name: str
    compute: Callable[[Seen], float]
    reason: str
    reads: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    of_rest: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A law that no layer outranks: whoever set the value, what breaks it is refused.

    `argument` is the one to blame; `check(seen)` gives None, or the reason why its value cannot be.
    """

    argument: str
    code: str
    check: Callable[[Seen], str | None]
    remedy: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Support:
    """What a platform says of an argument before anyone asks: the support matrix prints it, and launch obeys it.

    `status` is one of `SUPPORT`. `variants`: those it speaks of, () for all. `values`: it speaks of these values
    alone. `only`: of all values but the declared default, these alone are supported. Without either it speaks of
    every value but the declared default. What is unsupported or not applicable is refused, whoever sets it.
    `reason` is a clause for an operator; it may be empty where the status is "supported". `since`: the release
    of the platform's package that first said so.
    """

    argument: str
    status: str
    reason: str = ""
    variants: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()
    since: str = ""


@dataclass(frozen=True, slots=True)
class Requires:
    """A backend fits if each argument named here takes one of the values listed (best first).

    `slots`: the arguments that it fits alone ("decode_attention_backend"); () for all of its family.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfit:
    """A backend does not fit: every reason, each a clause ("head_dim 80 is not a multiple of 16")."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that a platform, or a third party for that platform, offers.

    `check(seen)` may read any argument that the *user* set, and the facts. `target` is "module:class",
    imported only in a worker. `kv_order` (attention only) names the axes of the KV pool it reads.
    Automatic choice takes the highest `priority` that fits. `summary` is one line for the support page.
    `graphs` (attention only, contract 1.1): its `plan` keeps metadata in place for one value of
    `AttentionBatch.graph`, as captured steps need. Where it decodes without, no step is captured.
    """

    name: str
    priority: int
    check: Callable[[Seen], Requires | Unfit]
    target: str
    kv_order: str = ""
    summary: str = ""
    graphs: bool = False


@dataclass(frozen=True)
class PlatformFacts:
    """Everything that can be known without the device.

    `capabilities(device)` is conservative: what is not listed is not there. `profiles` names devices for
    `srv plan --device NAME:PROFILE` (every variant has one of its own name; others may follow, such as a
    32 GiB card). Values in `defaults` and `constraints` speak as layer PLATFORM. `support`: what the platform
    says of arguments that no other statement speaks of, planned ones among them.
    """

    capabilities: Callable[[DeviceFacts], frozenset[str]]
    profiles: Mapping[str, DeviceFacts]
    defaults: tuple[Default, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    backends: Mapping[str, tuple[BackendSpec, ...]] = field(default_factory=dict)
    support: tuple[Support, ...] = ()
