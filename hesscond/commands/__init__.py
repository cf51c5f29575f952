"""Commands that are too long for `hesscond.cli`, and how commands print. Only `hesscond.cli` imports this."""
