"""The plugin declares graphs, but has no implementation of them.

Caught by graph.declared at L1, naming "Platform.graphs is None".
"""

from __future__ import annotations

from toy_graphs import with_graphs
from toy_variant import manifest

MANIFEST = manifest("claims_graphs", platform=with_graphs(lambda toy: lambda accelerator: None))  # the fault
