"""The frame of every HTML page that is written or served."""

from __future__ import annotations

import html

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1500px; padding: 0 1em; color: #222;
       background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere; }
.bad { color: #b00020; font-weight: bold; }
.scroll { overflow-x: auto; }
"""


def html_page(title: str, body: str, style: str = "", head: str = "") -> str:
    """Return a page without scripts that loads nothing. ``body``: HTML; ``style``: more of CSS; ``head``: more tags."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>{head}'
        f"<style>{STYLE}{style}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def html_table(rows: list[list[str]]) -> str:
    """Return a table of cells that are HTML already. The first row has the titles."""
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ("".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
