"""Text from elsewhere made fit to show: control characters visible, secrets masked, length and
lines bounded.

Mask first, then make printable, then clip: an escape inside a secret, or a cut through it, would
hide it from `mask`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from urllib.parse import quote

MASK = "***"
MIN_SECRET = 6
"""Characters. Shorter values (`1`, `true`) would mask half of any text."""

_SECRET_NAME = re.compile(
    # TOKENIZERS_PARALLELISM and its like configure a tokenizer.
    "TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL",
    re.IGNORECASE,
)

_TOKEN = re.compile(
    # Hugging Face. A digit or 20 letters: `hf_overrides` is an option, not a token.
    r"(?<![A-Za-z0-9])hf_(?:[A-Za-z0-9]{20,}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{8,})"
    # Buildkite: user access, cluster, job and other tokens.
    r"|(?<![A-Za-z0-9])bk[a-z]{2}_[A-Za-z0-9]{6,}"
    # GitHub.
    r"|(?<![A-Za-z0-9])(?:gh[a-z]_|github_pat_)[A-Za-z0-9_]{20,}"
)
_AUTHORIZATION = re.compile(
    r"(\bbearer\s+|\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|token)\s+)[\w.~+/=-]{6,}",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^\s/\"'<>]+(?=@)")


def printable(text: str, *, lines: bool = False) -> str:
    r"""`text` with each character that is not printable (`str.isprintable`) as its escape.

    So an ANSI escape reads `\x1b[31m` and a bidi override `\u202e`. `lines` keeps newlines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )


def mask(text: str, environ: Mapping[str, str]) -> str:
    """`text` with `***` for the values of secret variables and for what looks like a token."""
    # Longest first: a secret may begin with another one.
    secrets = sorted(set(_secrets(environ)), key=lambda s: (-len(s), s))
    if secrets:
        # One pass, so that no value is looked for in the masks of others.
        text = re.sub("|".join(map(re.escape, secrets)), MASK, text)
    text = _USERINFO.sub(lambda m: MASK if ":" in m[0] else m[0], text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    return _TOKEN.sub(MASK, text)


def is_secret(name: str) -> bool:
    """True where a variable of this name holds a secret, by its name."""
    return _SECRET_NAME.search(name) is not None


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    """The forms in which a secret value may be written out."""
    for name, value in environ.items():
        if not is_secret(name):
            continue
        if "TOKENS" in name.upper() and value.isdigit():
            continue  # a count, such as VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE=163840
        # A key of many lines is often logged a line at a time, or in a URL.
        for form in (value, *value.splitlines(), quote(value, safe="", errors="replace")):
            if len(form.strip()) >= MIN_SECRET:
                yield form.strip()


def clip(text: str, limit: int) -> str:
    """`text` in at most `limit` characters, the middle replaced by how much was left out."""
    if len(text) <= limit:
        return text
    # Sized for the largest count there could be, so that the result cannot exceed the limit.
    keep = limit - len(_left_out(len(text)))
    if keep <= 1:
        return text[: max(0, limit)]
    tail = keep // 2
    return text[: keep - tail] + _left_out(len(text) - keep) + text[len(text) - tail :]


def _left_out(count: int) -> str:
    return f" ... [{count} characters left out] ... "


def columns(text: str) -> int:
    """Terminal columns of a printable text: 2 for a wide character, 0 for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me")
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def fold(word: str, width: int) -> list[str]:
    """`word` in parts of at most `width` (>= 2) columns, broken behind `_ - / , .` where it can."""
    parts = []
    while columns(word) > width:
        end = next(n for n in range(len(word), 0, -1) if columns(word[:n]) <= width)
        nice = max(word.rfind(c, 0, end) for c in "_-/,.") + 1
        parts.append(word[: nice or end])
        word = word[nice or end :]
    return [*parts, word]


def wrap(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """`text` in lines of at most `width` columns; `hanging` indents all but the first."""
    hanging = indent if hanging is None else hanging
    lines, line, empty = [], indent, True
    for word in text.split(" "):
        if not empty and columns(line) + 1 + columns(word) <= width:
            line += " " + word
            continue
        if not empty:
            lines.append(line)
            line = hanging
        fits = columns(line) + columns(word) <= width
        *full, rest = [word] if fits else fold(word, width - max(len(indent), len(hanging)))
        for part in full:
            lines.append(line + part)
            line = hanging
        line, empty = line + rest, False
    return [*lines, line]
