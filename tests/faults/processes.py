"""Faults between the scheduler and the device: worker, executor, engine loop, engine process, channels."""

from fault import Fault

_SLOTS = "tests/core/worker/test_slots.py"
_LOOP = "tests/core/engine/test_loop.py"
_EXECUTOR = "tests/core/executor/test_multi_process.py"
_SHARDING = "tests/core/models/test_sharding.py"

FAULTS = (
    Fault(
        name="digests-of-ranks-not-compared",
        file="core/srv/executor/multi_process.py",
        text="if (answer.step, answer.digest) != (step, first.digest):",
        planted="if answer.step != step:",
        effect="Ranks that sample different tokens go on, with KV pools that contradict one another.",
        tests=(_EXECUTOR,),
    ),
    Fault(
        name="largest-rank-sizes-the-pool",
        file="core/srv/engine/build.py",
        text="return min(found, key=lambda budget: budget.pages)",
        planted="return max(found, key=lambda budget: budget.pages)",
        effect="The rank with the least memory runs out of it.",
        tests=(_EXECUTOR,),
    ),
    Fault(
        name="stopped-ranks-are-waited-for",
        file="core/srv/executor/multi_process.py",
        text="elif time.monotonic() - rank.stopped_since > self._timeout_s:",
        planted="elif time.monotonic() - rank.stopped_since > 1000 * self._timeout_s:",
        effect="If all ranks are stopped, the engine waits for them forever.",
        tests=(_EXECUTOR,),
        hangs=True,
    ),
    Fault(
        name="every-rank-adds-the-bias",
        file="core/srv/models/layers/linear.py",
        text="if sharding.columns is None or sharding.columns.begin == 0 else None",
        planted="if bias else None",
        effect="With several ranks, models with a bias in o_proj or down_proj add it once per rank.",
        tests=(_SHARDING,),
    ),
    Fault(
        name="a-dead-rank-blocks-the-next-plan",
        file="core/srv/executor/multi_process.py",
        text="rank.socket.send(encoded, zmq.NOBLOCK)",
        planted="rank.socket.send(encoded)",
        effect="If a rank dies while the engine is idle, the engine hangs.",
        tests=(_EXECUTOR,),
        hangs=True,
    ),
    Fault(
        name="page-table-of-the-last-request",
        file="core/srv/worker/slots.py",
        text="            table[slot, : used[slot]] = 0\n            used[slot] = 0\n",
        planted="            table[slot, : used[slot]] = 0\n",
        effect="A request's pages are appended to those of the last request in its slot, and it reads the wrong KV.",
        tests=(_SLOTS,),
    ),
    Fault(
        name="stale-page-table",
        file="core/srv/worker/slots.py",
        text="    def append_pages(self, row: Row) -> None:\n        self._table_version += 1\n",
        planted="    def append_pages(self, row: Row) -> None:\n",
        effect="A request that needs another page continues with the page table of the previous step.",
        tests=(_SLOTS,),
    ),
    Fault(
        name="padded-rows-keep-their-pages",
        file="core/srv/worker/graphs.py",
        text="            pages[rows:count, :width].zero_()\n",
        planted="            pass\n",
        effect="A padded row of a captured step writes to a page of a running request.",
        tests=("tests/core/worker/test_graphs.py",),
    ),
    Fault(
        name="split-attention-swaps-rows",
        file="core/srv/worker/attention.py",
        text="kv_lens=[batch.kv_lens[row] for row in rows],",
        planted="kv_lens=[batch.kv_lens[index] for index, _ in enumerate(rows)],",
        effect="With two attention backends, rows are attended with the lengths of other rows.",
        tests=("tests/core/worker/test_attention.py",),
    ),
    Fault(
        name="failed-step-ends-the-engine",
        file="core/srv/engine/loop.py",
        text="        except Exception as error:\n",
        planted="        except ValueError as error:\n",
        effect="One failed step ends the engine and all requests.",
        tests=(_LOOP,),
    ),
    Fault(
        name="engine-outlives-its-parent",
        file="core/srv/engine/loop.py",
        text="            if not parent_alive():\n",
        planted="            if self._stopped and not parent_alive():\n",
        effect="After the server is killed, the engine keeps running and holds the device's memory.",
        tests=(_LOOP,),
        hangs=True,
    ),
    Fault(
        name="requests-accepted-while-draining",
        file="core/srv/engine/loop.py",
        text="        if self._drain_until is not None:\n            error",
        planted="        if self._stopped:\n            error",
        effect="A server that shuts down accepts new requests and then aborts them.",
        tests=(_LOOP,),
    ),
    Fault(
        name="sockets-of-living-servers-removed",
        file="core/srv/io/channel.py",
        text="        fcntl.flock(self._lock, fcntl.LOCK_EX)\n",
        planted="",
        effect="Starting a second server cuts the first one off from its engine.",
        tests=("tests/core/io/test_channel.py",),
    ),
)
