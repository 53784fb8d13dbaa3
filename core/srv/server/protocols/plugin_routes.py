"""Adds the routes of plugins to the HTTP application, and describes them in its OpenAPI document.

A plugin's path may not match what another route serves, or be matched by another route: it would shadow that route, or
would never be reached. Must not know any endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.convertors import PathConvertor
from starlette.routing import Route, compile_path

from srv.errors import PluginError
from srv.platform.extensions import contested
from srv.platform.hook_plugins import HookPlugin, Hooks

_HOOK = "srv_routes"


def add_plugin_routes(app: FastAPI, hooks: Hooks) -> list[tuple[HookPlugin, Route]]:
    """Add the routes of all plugins after those of the app, and return them. Raises PluginError for the first fault."""
    added: list[tuple[HookPlugin, Route]] = []
    owners: list[tuple[str, Route]] = [("srv", route) for route in app.router.routes if isinstance(route, Route)]
    for plugin, returned in hooks.collect(_HOOK):
        checked = [_checked(plugin, route, owners) for route in _listed(plugin, returned)]
        app.router.routes.extend(checked)
        owners += [(plugin.distribution, route) for route in checked]
        added += [(plugin, route) for route in checked]
    return added


def describe_plugin_routes(document: dict[str, Any], routes: Iterable[tuple[HookPlugin, Route]]) -> dict[str, Any]:
    """The OpenAPI document with these routes. Those of FastAPI have schemas; others only their methods."""
    paths, schemas = document["paths"], document["components"]["schemas"]
    for plugin, route in routes:
        if isinstance(route, APIRoute):
            described = get_openapi(title="", version="", routes=[route])
            paths.setdefault(route.path_format, {}).update(described.get("paths", {}).get(route.path_format, {}))
            for name, schema in described.get("components", {}).get("schemas", {}).items():
                if schemas.setdefault(name, schema) != schema:
                    raise plugin.error(
                        _HOOK, f"{route.path} has a schema called {name}, and another route has one, too"
                    )
        elif route.include_in_schema:
            operation = {"responses": {"200": {"description": "Success"}}}
            methods = sorted(method.lower() for method in route.methods or ())
            paths.setdefault(route.path_format, {}).update((method, operation) for method in methods)
    return document


def _listed(plugin: HookPlugin, returned: object) -> Sequence[object]:
    if isinstance(returned, APIRouter):
        return returned.routes
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return returned
    raise plugin.error(_HOOK, f"returned {type(returned).__name__}, neither a sequence of routes nor an APIRouter")


def _checked(plugin: HookPlugin, route: object, owners: Iterable[tuple[str, Route]]) -> Route:
    if not isinstance(route, Route):
        reason = f"returned {route!r}; only routes of HTTP requests can be added (starlette.routing.Route, or APIRoute)"
        raise plugin.error(_HOOK, reason)
    for owner, other in owners:
        if _overlap(route, other):
            raise _shadowing(plugin, route, owner, other)
    return route


def _shadowing(plugin: HookPlugin, route: Route, owner: str, other: Route) -> PluginError:
    what = f"{plugin.name}.{_HOOK}: path {route.path}"
    if other.path != route.path:
        what += f", which overlaps with {other.path}"
    return contested(what, [plugin.distribution, owner], "this path")


def _overlap(one: Route, other: Route) -> bool:
    """Whether a path may match both. Two parameters in the same place may, whatever their types are."""
    for pattern, fixed in ((one, other), (other, one)):
        if "{" not in fixed.path:
            return bool(pattern.path_regex.match(fixed.path))
    for first, second in zip_longest(one.path.split("/"), other.path.split("/")):
        if _spans_segments(first) or _spans_segments(second):
            return True
        if first is None or second is None or not _may_be_equal(first, second):
            return False
    return True


def _spans_segments(segment: str | None) -> bool:
    return any(isinstance(convertor, PathConvertor) for convertor in compile_path(f"/{segment}")[2].values())


def _may_be_equal(one: str, other: str) -> bool:
    """Whether two segments of paths have a value in common."""
    if "{" in one and "{" in other:
        return True
    pattern, fixed = (one, other) if "{" in one else (other, one)
    return bool(compile_path(f"/{pattern}")[0].match(f"/{fixed}"))
