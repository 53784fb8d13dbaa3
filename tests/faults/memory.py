"""Faults of the KV cache's bookkeeping: pages, the radix tree, leases."""

from fault import Fault

_CACHE = "tests/core/memory/test_cache.py"
_RADIX = "tests/core/memory/test_radix.py"

FAULTS = (
    Fault(
        name="last-page-not-counted",
        file="core/srv/memory/cache.py",
        text="return -(-tokens // self.page_size)",
        planted="return tokens // self.page_size",
        effect="The last tokens of a prompt have no page: their KV overwrites that of other requests.",
        tests=("tests/core/sched/test_scheduler.py", _CACHE),
    ),
    Fault(
        name="split-keeps-wrong-half",
        file="core/srv/memory/radix.py",
        text="node.pages = tuple(pages[count:] for pages in node.pages)",
        planted="node.pages = tuple(pages[: node.count - count] for pages in node.pages)",
        effect="Two prompts with a common prefix read each other's KV.",
        tests=(_RADIX,),
    ),
    Fault(
        name="lock-does-not-reach-ancestors",
        file="core/srv/memory/radix.py",
        text="            current.locks += 1\n            current = current.parent\n",
        planted="            current.locks += 1\n            current = None\n",
        effect="The beginning of a running request's prefix can be evicted.",
        tests=(_RADIX,),
    ),
    Fault(
        name="hot-prefix-evicted-first",
        file="core/srv/memory/radix.py",
        text="            node.last_used = self._clock\n            if",
        planted="            if",
        effect="A prefix that every request uses is evicted as early as one that was used once.",
        tests=(_RADIX,),
    ),
    Fault(
        name="stale-match",
        file="core/srv/memory/radix.py",
        text="        self.version += 1\n        for group, pages in enumerate(node.pages):",
        planted="        for group, pages in enumerate(node.pages):",
        effect="A waiting request counts on cached pages that have been evicted.",
        tests=(_RADIX,),
    ),
    Fault(
        name="page-zero-is-allocated",
        file="core/srv/memory/pages.py",
        text="self._free = list(range(total, 0, -1))",
        planted="self._free = list(range(total - 1, -1, -1))",
        effect="Padded rows of captured steps overwrite a request's KV.",
        tests=("tests/core/memory/test_pages.py",),
    ),
    Fault(
        name="duplicates-are-lost",
        file="core/srv/memory/cache.py",
        text="            duplicates.extend(table[lease.shared : present])\n",
        planted="            duplicates.extend(table[lease.shared : lease.shared])\n",
        effect="Each prompt that two requests compute at the same time leaks pages.",
        tests=(_CACHE,),
    ),
    Fault(
        name="eviction-ignores-free-pages",
        file="core/srv/memory/cache.py",
        text="shortage = missing - min(allocator.free_count for allocator in self._allocators)",
        planted="shortage = missing",
        effect="Cached prefixes are evicted although pages are free, and hit rates fall.",
        tests=(_CACHE,),
    ),
)
