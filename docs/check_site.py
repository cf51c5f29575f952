"""Check the built pages: ``python docs/check_site.py FOLDER``.

Every link inside the site leads to a file, and to a place in it that exists; nothing that a page needs is fetched from
elsewhere, so that the site can be read and searched without a network.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

#: What a page loads by itself.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


class Page(HTMLParser):
    """The links, the loaded files and the places of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.pictures_without_text = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of one tag."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given[LOADED[tag]])
        if tag == "img" and not given.get("alt"):
            self.pictures_without_text += 1


@cache
def page_of(path: Path) -> Page:
    """A page, read once."""
    return Page(path.read_text(encoding="utf-8"))


def complaints(site: Path) -> list[str]:
    """What is wrong with the pages of a site."""
    found = []
    for path in sorted(site.rglob("*.html")):
        page, here = page_of(path), path.relative_to(site)
        for link in page.links + page.loaded:
            if (trouble := broken(link, path)) is not None:
                found.append(f"{here}: {trouble}")
        found += [f"{here}: needs {link} from the network" for link in page.loaded if is_remote(link)]
        if page.pictures_without_text:
            found.append(f"{here}: {page.pictures_without_text} pictures have no alternative text")
    if not (site / "searchindex.js").is_file():
        found.append("there is no search index")
    return found


def is_remote(link: str) -> bool:
    """Whether it leads out of the site."""
    parts = urlparse(link)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "mailto")


def broken(link: str, page: Path) -> str | None:
    """What is wrong with a link on a page, if anything."""
    if is_remote(link) or link.startswith(("data:", "javascript:")):
        return None
    address, place = urldefrag(link)
    address = unquote(address.partition("?")[0])
    target = (page.parent / address).resolve() if address else page
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return f"{link} leads nowhere"
    if place and target.suffix == ".html" and unquote(place) not in page_of(target).places:
        return f"{link}: there is no such place"
    return None


def main() -> int:
    """Print what is wrong; exit code 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    found = complaints(parser.parse_args().site)
    print("\n".join(found) or "all links lead somewhere, nothing is fetched from elsewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
