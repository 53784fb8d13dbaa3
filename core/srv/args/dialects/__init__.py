"""Command lines of other engines, said with arguments of `srv`: a table an engine, as data, and pure conversions.

    <engine>.toml ──► table (rows) ──┐
    foreign words ──► words (said) ──┴─► translate ──► settings, notes, refusals

Values are converted here and judged by the declarations afterwards, like anything else that a user says.
"""

from srv.args.dialects.table import DIALECTS, Dialect, Row, read_dialect
from srv.args.dialects.translate import Setting, Translation, translate

__all__ = ["DIALECTS", "Dialect", "Row", "Setting", "Translation", "read_dialect", "translate"]
