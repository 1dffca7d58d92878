"""Docstrings for the API page: drawings in them become code blocks.

A docstring here may hold a drawing as a paragraph whose lines are indented. In a terminal that is
plain; Markdown would join its lines and take `[ 7 ][ 2 ]` for a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def with_code_blocks(text: str) -> str:
    """Paragraphs with an indented line, indented by four more."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        re.sub(r"^", "    ", paragraph, flags=re.MULTILINE)
        if any(line.startswith("  ") for line in paragraph.splitlines())
        else paragraph
        for paragraph in paragraphs
    )


class Drawings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_code_blocks(obj.docstring.value)
