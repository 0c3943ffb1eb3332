"""Plain text: one document a row, for continued pre-training and PTX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import register, text
from accord.data.records import PlainText


@register("text", ("text",))
def read(row: Mapping[str, Any]) -> PlainText:
    return PlainText(text(row, "text"))
