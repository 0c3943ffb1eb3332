"""The shapes rows come in. Each format is one function row → record, found by the row's keys or named by `data.format`.

A new format is one small file beside these:

    @register("my-format", columns=("question", "answer"))
    def read(row: Mapping[str, Any]) -> Record:
        return Demonstration((Message("user", text(row, "question")), Message("assistant", text(row, "answer"))))

`columns` are the keys a row must have to be taken for this format; `looks_like` tells apart formats with the same keys. Import the file
in `_load_all` below.
"""

from __future__ import annotations

from accord.data.formats.base import (
    FORMATS,
    Format,
    RowError,
    UnusableError,
    check_roles,
    detect,
    message_list,
    number,
    optional_text,
    read_row,
    register,
    text,
)

__all__ = [
    "FORMATS",
    "Format",
    "RowError",
    "UnusableError",
    "check_roles",
    "detect",
    "message_list",
    "number",
    "optional_text",
    "read_row",
    "register",
    "text",
]


def _load_all() -> None:
    """Formats register themselves when imported; the order is the order in which they are tried."""
    from accord.data.formats import chatllama, sharegpt, comparisons, alpaca, hh, messages, plain  # noqa: F401, I001


_load_all()
