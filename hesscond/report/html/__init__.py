"""One file that a person can send to a co-author: what was run, what came of it, and how to repeat it.

`rendering` puts the page together from `templates`; the other modules say what is on it. Whatever comes from a run is
escaped by the template engine and made visible by `text`; nothing is loaded from anywhere.
"""

from hesscond.report.html.rendering import render_report, write_report

__all__ = ["render_report", "write_report"]
