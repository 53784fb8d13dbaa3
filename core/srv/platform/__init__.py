"""The platform contract, version 1.

Every module but `interface`, `contract` and `ops` is torch-free:

    facts          device facts, defaults, contributions, constraints, backend specs: data
    capabilities   the closed vocabulary of what a platform can do
    manifest       what a plugin's entry point gives: pure data and pure functions
    checks         checks that a manifest follows the contract
    import_wall    refuses imports of torch while a manifest is imported
    patches        detects plugins that patch core
    installed      reads the entry points of installed distributions
    registry       discovery of plugins through entry points
    host           facts about installed packages, for probes
    probe          runs a plugin's probe in a child process (probe_child)
    choose         platform selection: command line > environment > config file > automatic
    doctor         examines one platform in a child process (doctor_child); results are `finding`s
    environment    checks the Python environment for `srv doctor`
    placeholder    stands in for device code that is not implemented yet

    interface      the live objects that `create` returns
    contract       creates a live platform from a manifest and checks it
    ops            binds a platform's op implementations to the callables that layers hold
"""

API_VERSION = (1, 3)
