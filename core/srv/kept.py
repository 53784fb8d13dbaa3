"""Results that are computed once per immutable object: facts of a model or a platform, which cannot be hashed.

`srv plan` asks each question once or twice; the support matrix asks the same about few objects thousands of times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Object = TypeVar("Object")
More = ParamSpec("More")
Result = TypeVar("Result")


class _Same:
    """An object as the key of a cache: equal only to itself. The key holds it, so that its id is not given again."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of


def kept_per_object(
    function: Callable[Concatenate[Object, More], Result],
) -> Callable[Concatenate[Object, More], Result]:
    """Keep results by the identity of the first argument, which must never change, and by the others, if there are any.

    The results of the last 256 calls are kept; callers must not change them.
    """
    cached: Callable[..., Any] = functools.lru_cache(maxsize=256)(
        lambda key, *args, **kwargs: function(key.of, *args, **kwargs)
    )

    @functools.wraps(function)
    def asked(of: Object, /, *args: More.args, **kwargs: More.kwargs) -> Result:
        result: Result = cached(_Same(of), *args, **kwargs)
        return result

    return asked
