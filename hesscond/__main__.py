"""``python -m hesscond``."""

from hesscond.cli import main

main()
