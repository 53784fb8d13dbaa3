"""The platform contract, version 1.

Every module but `interface`, `contract` and `ops` is torch-free:

    facts          device facts, statements (defaults, constraints), backend specs: data
    capabilities   the words that a platform's abilities are said in
    manifest       what a plugin's entry point gives: pure data and pure functions
    checks         is a manifest true to the contract?
    import_wall    no torch while a manifest is imported
    patches        no plugin changes core
    registry       discovery through entry points
    host           what a probe may ask about installed packages
    probe          asking a plugin about this machine, in a child process (probe_child)
    choose         command line > environment > config file > automatic

    interface      the live objects that `create` returns
    contract       from a manifest to a live platform, checked
    ops            from a platform's op implementations to the callables that layers hold
"""

API_VERSION = (1, 2)
