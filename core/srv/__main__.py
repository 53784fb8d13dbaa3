"""`python -m srv` is `srv`."""

from srv.cli.main import console

if __name__ == "__main__":
    raise SystemExit(console())
