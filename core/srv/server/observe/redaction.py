"""Hides credentials in texts that are logged: the server's own keys, and what has the form of one.

A text is judged before it is cut, and with what follows the cut: a part of a credential has no form. Must not know what
the texts are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

REDACTED = "[redacted]"
MIN_KEY = 6  # characters of a key of the server that is redacted: a shorter one is part of ordinary words
LONGEST = 1024  # characters, or tokens, that must follow a cut, so that what is cut has its form; keys may be longer

# Repetitions are bounded or possessive, or begin where the repeated characters do, so that no text takes a time that
# grows with its square.
_QUOTE = r"\\{0,7}[\"']"  # also within JSON that is a string of JSON
_KINDS = (
    "access|account|auth|client|encryption|function|license|master|private|refresh|secret|service|session|shared|signing"
    "|storage|subscription"
)
_OF_TEXT = (  # words before "token" that speak of a model's tokens
    "begin|beginning|bos|boundary|chat|class|cls|completion|count|current|decoder|drafted|each|encoder|end|eos|eot|every"
    "|extra|fim|final|first|forced|image|input|last|length|mask|max|maximum|message|min|minimum|model|new|next|num"
    "|number|of|one|output|pad|padding|per|prefix|previous|prompt|reasoning|sampled|sep|special|start|stop|suffix|text"
    "|this|thinking|time|tool|top|total|unk|unknown|vision|vocab"
)
_NAMES = (
    r"(?:password|passwd|pwd|passphrase|secret(?:[-_]?(?:id|string|value))?|\bcredentials?|connection[-_]?string"
    rf"|api[-_]?key(?:[-_]?id)?|(?:{_KINDS})[-_]?key"
    rf"|(?<![\w-])(?!(?:[\w-]{{0,40}}[-_])?(?:{_OF_TEXT})[-_]?token)[\w-]{{0,40}}?token(?:[-_]?(?:string|value))?)"
)
_VALUE = (
    # Ends at the quote that is not escaped; one with more backslashes is within the value.
    r"(?:(?P<quote>\\{0,7}[\"'])(?:[^\n]{0,256}?)(?<!\\)(?P=quote)"
    rf"|(?:{_QUOTE})?[^\s\"'&,;]{{4,}})"
)
_LIST = rf"\[\s{{0,64}}{_QUOTE}[^\]]{{0,1024}}+\]?"
_QUOTED_COOKIE = r"=\"[^\"\n]{0,1024}\"(?=[;\s]|\Z)"
_COOKIES = (  # quoted, or up to the end of the line or to a quote that does not begin a cookie's value
    r"(?:(?P<jar>\\{0,7}[\"'])[^\n]{0,1024}?(?<!\\)(?P=jar)"
    rf"|(?:{_QUOTE})?(?:[^\s=;,\"']{{1,64}};\s{{0,9}}){{0,8}}[^\s=;,\"']{{1,128}}(?=\=)(?:{_QUOTED_COOKIE}|[^\n\"'\\])*+)"
)
_PARAMETER = r"\s{0,9}[\w-]{1,40}=(?:\\{0,7}\"[^\"\n]{0,1024}\"|[^\s\"',]{1,1024})"  # of an authorization
_SECRETS = re.compile(
    rf"(?i)\bauthorization(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}(?:{_QUOTE})?(?:"
    rf"[\w-]{{1,20}}\s{{1,9}}{_PARAMETER}(?:,{_PARAMETER}){{0,32}}|(?:[\w-]{{1,20}}\s{{1,9}})?[^\s\"',;]{{4,}})"
    rf"|\b(?:set-)?cookie2?(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}{_COOKIES}"
    r"|\bbearer\s{1,9}[\w.~+/=-]{8,}"
    r"|\b(?:sk|pk|rk|hf|gh[oprsu]|github_pat|xox[abceprs]|glpat|GOCSPX)[-_][\w-]{12,}|\bnpm_[a-z0-9]{30,}"
    r"|\b(?-i:AKIA|ASIA)(?-i:[0-9A-Z]{16,})|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}"
    r"|(?<![\w-])eyJ[\w-]{8,}+(?:\.[\w-]{8,}+\.[\w-]*|\.?[\w-]*\Z)"  # also one that the text ends in
    # The last @ ends a password, which may have others; one with a slash is no port.
    r"|\b[a-z][a-z0-9+.-]{0,19}://(?:[^\s/@]{1,512}+@(?:[^\s@]{0,512}+@)*|[^\s/@:]{1,256}:(?!\d{1,5}\b)[^\s@]{1,512}+@)"
    rf"|{_NAMES}(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}{_VALUE}"
    rf"|{_NAMES}s?(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}{_LIST}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)


def redact(text: str, keys: Sequence[str] = (), cut: int | None = None) -> str:
    """The text without what looks like a credential, and without these keys.

    cut: the number of characters after which it ends, counted before anything is replaced. What begins before is
    hidden whole; the characters after it are needed to find that (`LONGEST`).
    """
    end = len(text) if cut is None else cut
    parts, at = [], 0
    for start, stop in sorted(_credentials(text, keys)):
        if start >= end:
            break
        if start >= at:
            parts += [text[at:start], REDACTED]
        at = max(at, stop)
    return "".join([*parts, text[at:end]])


def _credentials(text: str, keys: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where they start and end; they may overlap."""
    for key in keys:
        at = text.find(key) if len(key) >= MIN_KEY else -1
        while at >= 0:
            yield at, at + len(key)
            at = text.find(key, at + 1)
    for match in _SECRETS.finditer(text):
        yield match.span()
