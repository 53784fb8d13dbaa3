"""`srv`: a hardware-neutral server for large language models.

The package owns scheduling, memory, arguments, the HTTP API and the platform contract. It must not
know any device: platforms are plugins, found through the entry-point group ``srv.platforms``.
"""

__version__ = "0.1.0"
