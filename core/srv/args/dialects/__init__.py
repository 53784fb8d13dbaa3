"""Translation of other engines' command lines to arguments of `srv`: one table per engine (data), and pure conversions.

    <engine>.toml ────► table (rows) ────────┐
    command line ─────► words (parsed flags) ─┴─► translate ──► settings, notes, refusals

Values are only converted here. The declarations of the arguments validate them afterwards, like any other user input.
"""

from srv.args.dialects.table import DIALECTS, Dialect, DialectRow, read_dialect
from srv.args.dialects.translate import Setting, Translation, translate

__all__ = ["DIALECTS", "Dialect", "DialectRow", "Setting", "Translation", "read_dialect", "translate"]
