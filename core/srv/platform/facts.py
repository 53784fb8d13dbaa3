"""What a platform declares without its device: facts, defaults, constraints, backend specs. Torch-free data.

A default, contribution or constraint can read only the arguments that it declares in `reads`. Resolution
(`srv.args.resolve`) orders defaults and contributions by what they read, lets the highest layer win, records where each
value comes from, and then checks the constraints. Nothing here edits a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from srv.specs import LATENT, LatentDims, ModelFacts

FAMILIES = ("attention", "sampling", "moe", "quantization", "grammar")
LENGTHS = ("host", "device")  # the values of `BackendSpec.lengths`
WRITE_KV = "write_kv"  # the value of `OpSpec.op` for what writes keys and values into pages
SUPPORT = ("supported", "limited", "experimental", "unsupported", "not_applicable")  # the values of `Support.status`


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One kind of device, found on a machine or described by a profile.

    `variant`: one of the manifest's ("avx512", "a3"). `memory_bytes`: of one device. `count`: number of devices.
    `versions`: of drivers, toolkits and packages, by name; of a compiler that a backend needs, its path. `name`: as the
    vendor prints it. `features`: properties that the variant does not imply, by the vendor's own names (instruction
    sets, optional units). `simulated`: the device is emulated in software; it is never chosen automatically, and proves
    nothing about hardware.
    """

    variant: str
    memory_bytes: int
    count: int
    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    simulated: bool = False


class ResolutionContext(Protocol):
    """The argument of the function of a Default, Contribution, Constraint or BackendSpec.

    It gives facts about device and model, and the values of the arguments declared in `reads`; a BackendSpec may read
    any argument that the user set. Reading an argument that was not declared raises `UndeclaredRead`; reading one that
    has no value returns None.
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
    """A value for an argument that no higher layer has set.

    `compute(context)` returns the value, or None if this default does not apply. `reason` is a clause that completes
    "page_size = 128 because ...".
    """

    argument: str
    compute: Callable[[ResolutionContext], Any]
    reason: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contribution:
    """One part of a quantity that several owners add to (for example reserved device memory).

    `quantity` is a name declared by core; `compute(context)` returns a number in the quantity's unit, 0 for none.
    `replaces`: the names of core's parts of that quantity that this part replaces. `of_remaining`: the number is a
    fraction, from 0 to 1, of the device memory that the other parts leave; such parts are computed after all others.
    `for_default`: reserved memory of a rule that finds the default of `mem_fraction_static`: where the user sets that,
    it is at most what the fraction leaves.
    """

    quantity: str
    name: str
    compute: Callable[[ResolutionContext], float]
    reason: str
    reads: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    of_remaining: bool = False
    for_default: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that no layer overrides: a value that violates it is refused, whoever set it.

    `argument` is the one at fault; `check(context)` returns None, or the reason why its value is refused.
    """

    argument: str
    code: str
    check: Callable[[ResolutionContext], str | None]
    remedy: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Support:
    """A platform's declared support for an argument: the support matrix prints it, and launch enforces it.

    `status` is one of `SUPPORT`. `variants`: the variants it applies to, () for all. `values`: it applies to these
    values only. `only`: apart from the declared default, only these values are supported. Without either it applies
    to every value but the declared default. An unsupported or not applicable value is refused, whoever sets it.
    `reason` is a clause for an operator; it may be empty if the status is "supported". `since`: the release of the
    platform's package that first declared it.
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
    """A backend fits if each argument named here takes one of the listed values (best first).

    `slots`: the only arguments that may select it ("decode_attention_backend"); () for all of its family.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfit:
    """A backend does not fit: all reasons, each a clause ("head_dim 80 is not a multiple of 16")."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend that a platform, or a third party for that platform, offers.

    `check(context)` may read any argument that the *user* set, and the facts. With tensor parallelism, the heads in
    `context.model` are those of one rank. `target` is "module:class", imported only in a worker; "" in the family
    "moe", whose backends are the ops of their name (`srv.platform.experts`). `ops` (moe only): those of a backend that
    a third party adds; a platform lists its own in `PlatformFacts.ops`. `kv_order` (attention only) names the axes
    of the KV pool it reads. Automatic choice takes the highest `priority` that fits.
    `graphs` (attention): its `plan` keeps the metadata of one value of `AttentionBatch.graph`
    at the same addresses, as captured steps need; (moe): its ops read nothing back from the device. If the decode
    backend or that of experts does not, no step is captured.
    `lengths` (attention only): "device" if it takes `AttentionBatch.lengths`; with "host", a request
    waits for the result of a row with drafts before its next row is planned.
    `traits` (attention only): what it computes of `srv.specs.LAYER_TRAITS`. It does not fit a model that has a layer
    with any other trait.
    `arguments`: the server arguments whose values it reads, as `BackendContext.arguments`. Some are read by backends
    alone (`Arg.read_by`): a user's value of one that no chosen backend reads is refused.
    `batch_invariant` (attention and moe): the result of a token has the same bits with any other rows in its step, and
    however its row's tokens are divided among steps. `--enable-deterministic-inference` requires it.
    `fallback`: as that of an `OpSpec`.
    `latent` (attention only): "module:class" of its `srv.platform.latent.LatentAttentionBackend`, which serves cache
    groups of multi-head latent attention in the place of `target`; "" if it computes no such layers.
    `prompts` (with `latent`): prompts(dims, the values of `arguments`) says in which form it computes rows with several
    new tokens, and from how many on; a clause, for plans. None: it has one form.
    """

    name: str
    priority: int
    check: Callable[[ResolutionContext], Requires | Unfit]
    target: str
    kv_order: str = ""
    graphs: bool = False
    lengths: str = "host"
    traits: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    batch_invariant: bool = False
    fallback: bool = False
    latent: str = ""
    prompts: Callable[[LatentDims, Mapping[str, Any]], str] | None = None
    ops: tuple[OpSpec, ...] = ()

    @property
    def layer_traits(self) -> tuple[str, ...]:
        """What a layer may have of `srv.specs.AttentionLayer.traits`: `traits`, and that of latent attention."""
        return (*self.traits, LATENT) if self.latent else self.traits


@dataclass(frozen=True, slots=True)
class OpCall:
    """Dtype (its torch name) and sizes of an op's calls: an `OpArgs` of `srv.platform.interface` without torch."""

    dtype: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What is known, without the device, of an implementation that a platform has for an op.

    `op`: a contract of `srv_kernels.contracts`; "linear" or "embedding" for a kernel that `Platform.post_load` gives to
    layers with unquantized weights; or "write_kv", by which attention backends write keys and values into pages
    (`srv.platform.interface.NamesWriter`). `name`: that of the `OpImpl`, or the `OpLayer.implementation` of layers.
    `check(device, call)`: None, or why it cannot be used, a clause; it must agree with `OpImpl.supports_args`.
    `target`: "module:function"; "" if the live platform provides the callable, or `post_load` the kernel.
    `batch_invariant`: as that of the `OpImpl`. `fallback`: a slower implementation for what the others cannot compute,
    listed after them; its use is shown, and counted in a metric. `rounds`: what it does to activations that the
    checkpoint leaves in the model's dtype ("rounds activations to 8 bits"), a clause after "it": plans show it, and
    `--activation-precision full` passes it over; "" if it does not round them.
    """

    op: str
    name: str
    check: Callable[[DeviceFacts, OpCall], str | None]
    target: str = ""
    batch_invariant: bool = False
    fallback: bool = False
    rounds: str = ""


@dataclass(frozen=True)
class PlatformFacts:
    """Everything that can be known without the device.

    `capabilities(device)` is conservative: a capability that is not listed is not available. `profiles` names devices
    for `srv plan --device NAME:PROFILE` (every variant has one of its own name; there may be others, such as a 32 GiB
    card). `cards` names devices as their owners call them, in lower case ("x100"), and may be used like profiles.
    `defaults` apply at layer PLATFORM. `support`: declarations about arguments that no default or constraint
    covers, including planned arguments. `ops`: what `Platform.ops` and `post_load` have, best first, for
    `srv plan --kernels`; () says that it is not known without the device.
    """

    capabilities: Callable[[DeviceFacts], frozenset[str]]
    profiles: Mapping[str, DeviceFacts]
    defaults: tuple[Default, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    backends: Mapping[str, tuple[BackendSpec, ...]] = field(default_factory=dict)
    support: tuple[Support, ...] = ()
    cards: Mapping[str, DeviceFacts] = field(default_factory=dict)
    ops: tuple[OpSpec, ...] = ()
