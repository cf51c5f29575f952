"""What stands inside the page instead of being loaded."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from hesscond.report.html.text import all_visible


def data_url(kind: str, content: bytes) -> Markup:
    """A file as a URL; base64 has nothing to escape, and is no text to be cut.

    Examples
    --------
    >>> data_url("text/plain", b"1")
    Markup('data:text/plain;base64,MQ==')
    """
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}")


def json_block(data: Any) -> Markup:
    """JSON that can stand in a script element."""
    return htmlsafe_json_dumps(all_visible(data), separators=(",", ":"), allow_nan=False)


def policy(style: str, script: str) -> str:
    """A Content-Security-Policy: pictures inside the page, this style and script, and nothing else."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (style, script)
    )
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        "base-uri 'none'; form-action 'none'"
    )
