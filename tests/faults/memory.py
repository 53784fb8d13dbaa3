"""Faults of the KV cache's bookkeeping: pages, the radix tree, leases."""

from fault import Fault

_CACHE = "tests/core/memory/test_cache.py"
_RADIX = "tests/core/memory/test_radix.py"
_WINDOWS = "tests/core/engine/test_windows.py"

FAULTS = (
    Fault(
        name="last-page-not-counted",
        file="core/srv/memory/groups.py",
        text="return -(-tokens // self.page_size)",
        planted="return tokens // self.page_size",
        effect="The last tokens of a prompt have no page: their KV overwrites that of other requests.",
        tests=("tests/core/sched/test_scheduler.py", _CACHE),
    ),
    Fault(
        name="split-keeps-wrong-half",
        file="core/srv/memory/radix.py",
        text="node.pages = tuple(pages[count * ratio :] for pages, ratio in",
        planted="node.pages = tuple(pages[: (node.count - count) * ratio] for pages, ratio in",
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
        text="        self.version += 1\n        for group, (pages, ratio) in enumerate(",
        planted="        for group, (pages, ratio) in enumerate(",
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
        text="duplicates.extend(table[lease.shared * ratio : present * ratio])\n",
        planted="duplicates.extend(table[lease.shared * ratio : lease.shared * ratio])\n",
        effect="Each prompt that two requests compute at the same time leaks pages.",
        tests=(_CACHE,),
    ),
    Fault(
        name="eviction-ignores-free-pages",
        file="core/srv/memory/cache.py",
        text="shortages = [count - allocator.free_count for",
        planted="shortages = [count for",
        effect="Cached prefixes are evicted although pages are free, and hit rates fall.",
        tests=(_CACHE,),
    ),
    Fault(
        name="window-freed-one-page-early",
        file="core/srv/memory/groups.py",
        text="max(0, position - self.window + 1) // self.page_size",
        planted="-(-max(0, position - self.window + 1) // self.page_size)",
        effect="A token near the edge of its window reads the keys and values of another request.",
        tests=(_CACHE, _WINDOWS),
    ),
    Fault(
        name="window-behind-a-prefix-not-checked",
        file="core/srv/memory/window_pages.py",
        text="            if missing < 0:\n",
        planted="            if missing < units * self._ratio:\n",
        effect="A request continues a prefix whose last window was freed.",
        tests=(_RADIX, _CACHE),
    ),
    Fault(
        name="window-trimmed-by-bound",
        file="core/srv/sched/running_batch.py",
        text="self.cache.trim(lease, request.confirmed)",
        planted="self.cache.trim(lease, request.bound)",
        effect="Pages are freed while a step in flight reads them.",
        tests=("tests/core/sched/test_scheduler.py",),
    ),
    Fault(
        name="page-of-a-window-freed-while-shared",
        file="core/srv/memory/window_pages.py",
        text="        if not leases:\n",
        planted="        if True:\n",
        effect="The first request that leaves a prefix behind makes its pages evictable for all others.",
        tests=(_CACHE,),
    ),
    Fault(
        name="prompt-not-shared-before-its-window-moves-on",
        file="core/srv/sched/running_batch.py",
        text="self.cache.publish(lease, request.start_tokens[: request.confirmed])",
        planted="pass",
        effect="A prompt that branches off a long one finds no prefix, because its window is gone.",
        tests=(_WINDOWS,),
    ),
    Fault(
        name="listed-graphs-are-not-reserved",
        file="core/srv/args/rules/reserve.py",
        text="        max_rows = max(sizes) if sizes else max_rows\n        return float(",
        planted="        return float(",
        effect="Graphs of listed batch sizes run out of memory while they are captured.",
        tests=("tests/platforms/test_rules_memory.py",),
    ),
)
