"""The inventory of ops, their implementations, and endpoints, which can be listed only with torch and the HTTP server.

It is stored in `support_matrix/inventory.json`, so that generating the matrix needs neither. `python -m
srv_matrix.inventory` prints a new one. Modules are resolved by name at run time, because this package must not import
torch, kernels or platforms.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from srv.errors import PlatformUnavailable
from srv.platform.facts import OpCall, PlatformFacts
from srv.platform.manifest import EngineContext, Manifest
from srv.platform.op_choice import choose_op
from srv.platform.placeholder import NO_DEVICE_CODE
from srv.platform.registry import find_platforms
from srv_matrix.repository import MatrixError

_BUILT_IN = "srv"
_TIMEOUT_S = 120
PLUGIN = "--plugin"  # of this module as a program: a platform of another distribution, which follows
_SIZE = 128  # of every dimension in the calls for which implementations are checked


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the kernel contracts. `dtypes`: the dtypes that an implementation may have to support."""

    name: str
    signature: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """`endpoints`: "METHOD path". `implemented`: "platform:variant" -> op -> dtypes that an implementation supports.

    A variant that is missing is one of which nothing is known. `unbuilt`: platforms without device code, with their own
    reason.
    """

    endpoints: tuple[str, ...] = ()
    ops: tuple[Op, ...] = ()
    implemented: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    unbuilt: Mapping[str, str] = field(default_factory=dict)


def to_json(inventory: Inventory) -> str:
    """The text of the file."""
    return json.dumps(asdict(inventory), indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> Inventory:
    """The inverse of `to_json`; MatrixError for any other text."""
    try:
        raw = json.loads(text)
        ops = tuple(Op(entry["name"], entry["signature"], tuple(entry["dtypes"])) for entry in raw["ops"])
        implemented = {
            variant: {op: tuple(dtypes) for op, dtypes in ops_by_variant.items()}
            for variant, ops_by_variant in raw["implemented"].items()
        }
        return Inventory(tuple(raw["endpoints"]), ops, implemented, dict(raw["unbuilt"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MatrixError(f"the inventory cannot be read: {error!r}. Run `make matrix`") from error


def read(path: Path) -> Inventory:
    """The inventory of a checkout; empty if there is no file."""
    return from_json(path.read_text(encoding="utf-8")) if path.is_file() else Inventory()


def observe_in_child(plugin: str = "") -> Inventory:
    """Run `observe` in a child process. MatrixError if that fails."""
    command = [sys.executable, "-P", "-m", __name__, *([PLUGIN, plugin] if plugin else [])]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if process.returncode != 0:
        raise MatrixError(f"the inventory cannot be generated: {process.stderr[-2000:]}")
    return from_json(process.stdout)


def observe(plugin: str = "") -> Inventory:
    """The current inventory; imports torch and the HTTP server into this process.

    `plugin`: a platform. Then its facts alone say what is implemented, and nothing is said if they list no ops.
    """
    contracts = pkgutil.resolve_name("srv_kernels.contracts:CONTRACTS")
    ops = tuple(
        Op(contract.name, contract.signature, tuple(map(_dtype_name, contract.dtypes)))
        for contract in contracts.values()
    )
    implemented: dict[str, dict[str, tuple[str, ...]]] = {}
    unbuilt: dict[str, str] = {}
    for platform in find_platforms().values():
        if platform.name != plugin if plugin else platform.distribution != _BUILT_IN:
            continue
        if plugin and not platform.loaded.facts.ops:
            continue
        reason = None if plugin else without_code(platform.loaded)
        if reason is not None:
            unbuilt[platform.loaded.name] = reason
            continue
        for variant in platform.loaded.variants:
            implemented[f"{platform.loaded.name}:{variant}"] = {
                contract.name: _supported(platform.loaded.facts, variant, contract) for contract in contracts.values()
            }
    return Inventory(_endpoints(), ops, implemented, unbuilt)


def without_code(manifest: Manifest) -> str | None:
    """Why a platform has no device code; None if it has, whether or not it can start on this machine."""
    try:
        manifest.create(EngineContext(manifest.facts.profiles[manifest.variants[0]], 0))
    except PlatformUnavailable as error:
        return error.reason if error.code == NO_DEVICE_CODE else None
    return None


def _supported(facts: PlatformFacts, variant: str, contract: Any) -> tuple[str, ...]:
    """The dtypes of an op's contract for which a platform has an implementation."""
    device, sizes = facts.profiles[variant], dict.fromkeys(contract.sizes, _SIZE)
    dtypes = map(_dtype_name, contract.dtypes)
    return tuple(
        dtype for dtype in dtypes if choose_op(facts.ops, device, contract.name, OpCall(dtype, sizes)).spec is not None
    )


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the HTTP server; imports it into this process."""
    document: dict[str, Any] = _app().openapi()
    return document


def _app() -> Any:
    """The HTTP application, with an engine that computes nothing."""
    settings = pkgutil.resolve_name("srv.server.app:ServerSettings")
    create_app = pkgutil.resolve_name("srv.server.app:create_app")
    text = pkgutil.resolve_name("srv.testing.fake_engine:ByteTokenizer")()
    client = pkgutil.resolve_name("srv.server.client:EngineClient")(
        pkgutil.resolve_name("srv.testing.fake_engine:FakeEngine")()
    )
    server_settings = settings(
        model_name="any", context_length=16, max_request_tokens=16, vocab_size=text.vocab_size, hidden_size=1
    )
    return create_app(server_settings, client, text)


def _endpoints() -> tuple[str, ...]:
    """The routes of the HTTP server, without the documentation routes that its framework adds."""
    app = _app()
    described = {app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url}
    return tuple(
        f"{method} {route.path}"
        for route in app.routes
        if route.path not in described
        for method in sorted(route.methods - {"HEAD"})
    )


if __name__ == "__main__":
    sys.stdout.write(to_json(observe(sys.argv[2] if sys.argv[1:2] == [PLUGIN] else "")))
