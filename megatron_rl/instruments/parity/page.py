"""A certificate as one HTML page without further files: the verdict, what was compared, the picture, every operator."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: 2px 10px; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.beyond td { background: #fde3e1 } .pass { color: #1a7f37 } .fail { color: #c1121f } img { max-width: 100% }
pre { overflow-x: auto }
"""


def page(certificate: Mapping[str, Any], text: str, picture: Figure) -> str:
    """``certificate`` as `report.certificate` makes it, ``text`` of the report, ``picture`` of the errors by depth."""
    verdict = certificate["verdict"]
    image = io.BytesIO()
    picture.savefig(image, format="png", dpi=110)
    facts = [(name, certificate[name]) for name in ("model", "dtypes", "layout", "precision", "hardware", "versions")]
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            f"<title>parity: {verdict}</title><style>{_STYLE}</style>",
            f'<h1>Parity: <span class="{verdict}">{verdict}</span></h1>',
            f"<p>{html.escape(certificate['sentence'])}</p>",
            f"<pre>{html.escape(text)}</pre>",
            f'<img alt="error by depth" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">',
            "<h2>What was compared</h2>",
            _table(("", ""), [((name, _words(value)), False) for name, value in facts]),
            "<h2>Prefill against decode</h2>",
            _differences(certificate["prefill_against_decode"]),
            "<h2>Operators</h2>",
            _operators(certificate["operators"]),
            "</html>\n",
        ]
    )


def _differences(differences: Mapping[str, float] | None) -> str:
    if differences is None:
        return "<p>vLLM did not run.</p>"
    rows = [((tap, _number(difference)), False) for tap, difference in differences.items()]
    return _table(("tap", "largest difference"), rows)


def _operators(entries: Sequence[Mapping[str, Any]]) -> str:
    columns = ("own", "bound", "ratio", "inherited")
    rows = [((e["witness"], e["tap"], *(_number(e[name]) for name in columns)), not e["pass"]) for e in entries]
    return _table(("witness", "operator", "own error", "its bound", "ratio", "inherited"), rows)


def _table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]]) -> str:
    """``rows``: cells, and whether they are marked. Cells after the second are numbers."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    lines = [f"<table><tr>{head}</tr>"]
    for cells, is_marked in rows:
        drawn = "".join(
            f"<td{' class=number' if place > 1 else ''}>{html.escape(cell)}</td>" for place, cell in enumerate(cells)
        )
        lines.append(f"<tr{' class=beyond' if is_marked else ''}>{drawn}</tr>")
    return "\n".join([*lines, "</table>"])


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list) else str(value)
