"""`python -m srv` is `srv`."""

from srv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
