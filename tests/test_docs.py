"""What the site generates: pages of methods and statements with what these say of themselves, the reference; links."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hesscond
from hesscond.methods import registered
from hesscond.report import FIGURES
from hesscond.theorems import statement, statements, verify

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return module_of("generate")


@pytest.fixture(scope="module")
def reference_pages(generate):
    return module_of("reference_pages")


@pytest.mark.parametrize("method", list(registered()), ids=lambda m: m.name)
def test_the_page_of_a_method_is_its_docstring(generate, method):
    page = generate.method_page(method)
    assert generate.linked(method.source) in page
    assert method.summary[1:] in page
    assert not re.search(r"(?<!`)``(?!`)", page)
    assert method.name in generate.NOTATION["formulas"], "write its formula into docs/notation.toml"
    assert "](../statements/" in page or not any(method.name in one.id.split("-") for one in statements())


@pytest.mark.share(3)
@pytest.mark.parametrize("one", list(statements()), ids=lambda s: s.id)
def test_the_page_of_a_statement_has_its_claims(generate, one):
    page = generate.statement_page(one, verify(one, trials=1, counterexamples=False))
    assert one.text in page
    for claim in one.claims:
        assert claim.text.replace("|", "\\|") in page


def test_the_table_says_where_only_a_counterexample_violates_a_claim(generate):
    one = statement("bnp-theorem-4")
    page = generate.statement_page(one, verify(one, trials=5))
    assert "| violated (by the counterexample below) | 0 of 5 |" in page
    assert page.count("by the counterexample below") == 1


@pytest.mark.parametrize("one", [*registered(), *statements()], ids=lambda one: getattr(one, "id", None) or one.name)
def test_every_source_is_a_paper(generate, one):
    assert one.source == "-" or "](../papers.md#" in generate.linked(one.source), "name it in papers.toml"


def test_the_page_of_the_papers_is_that_of_the_program(generate):
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    assert page == generate.papers_page(), "python docs/generate.py writes it"
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert len({generate.slug(title) for title in headings}) == len(headings)


def test_the_gallery_shows_every_kind_of_figure():
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^hesscond figure (\S+).* -o (\S+)\.png$", page, re.MULTILINE)
    assert drawn == [(kind, kind) for kind, _ in drawn]
    assert {kind for kind, _ in drawn} == {*FIGURES, "rate"}
    assert set(re.findall(r"\]\(gallery/(\S+)\.png\)", page)) == {*FIGURES, "rate", "probe"}


@pytest.mark.slow
def test_the_gallery_is_drawn_by_its_commands(tmp_path):
    subprocess.run([sys.executable, DOCS / "generate.py", "--gallery", tmp_path, "--trials", "2"], check=True)
    assert {path.stem for path in tmp_path.glob("*.png")} == {*FIGURES, "rate", "probe"}
    assert (tmp_path / "site" / "report.html").is_file()


def test_all_pages_are_written_and_none_is_left_over(generate, tmp_path, monkeypatch):
    one = next(s for s in statements() if s.id == "wc-proposition-1")
    monkeypatch.setattr(generate, "statements", lambda: [one])
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "gone.md").write_text("")
    generate.write_pages(tmp_path, trials=5)
    assert {p.stem for p in (tmp_path / "methods").iterdir()} == {m.name for m in registered()} | {"index"}
    assert {p.name for p in (tmp_path / "statements").iterdir()} == {f"{one.id}.md", f"{one.id}.png", "index.md"}
    assert (tmp_path / "statements" / f"{one.id}.png").stat().st_size > 5000
    assert f"[{one.id}]({one.id}.md)" in (tmp_path / "statements" / "index.md").read_text(encoding="utf-8")


def test_symbols_and_formulas_are_of_what_there_is(generate):
    notation = generate.NOTATION
    assert set(notation["formulas"]) == {one.name for one in registered()}
    assert set(notation["statements"]) == {one.id for one in statements()}
    assert {key for keys in notation["statements"].values() for key in keys} == set(notation["symbols"])
    for one in statements():
        shown = " ".join([one.text, *one.hypotheses, *(claim.text for claim in one.claims)])
        for key in notation["statements"][one.id]:
            for symbol in re.findall(r"[^\s,…·\[\]⟨⟩‖]+", key.partition(" [")[0]):
                assert symbol in shown or "⟨" in key or "‖" in key, f"{one.id} has no {symbol}"


def test_links_lead_to_pages_that_are_there_or_generated():
    written = {DOCS / "methods" / f"{one.name}.md" for one in registered()}
    written |= {DOCS / "statements" / f"{one.id}.md" for one in statements()}
    written |= {DOCS / "methods" / "index.md", DOCS / "statements" / "index.md"}
    for page in set(DOCS.rglob("*.md")) - written:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            there = (page.parent / target).resolve()
            drawn = there.is_relative_to(DOCS / "gallery")
            assert drawn or there in written or there.exists(), f"{page.relative_to(DOCS)}: {target}"


def test_the_reference_of_the_log_explains_every_column(reference_pages):
    page = reference_pages.tables()
    for table, columns in reference_pages.TABLES.items():
        for column in columns:
            assert reference_pages.meaning(table, column).strip()
        assert f"## `{table}`" in page


def test_every_public_name_is_in_the_reference():
    rooms = {p.stem for p in (DOCS / "reference" / "python").glob("*.md")}
    package = Path(hesscond.__file__).parent
    public = {p.parent.name for p in package.glob("*/__init__.py") if "__all__" in p.read_text(encoding="utf-8")}
    # the engine's inner rooms are not public; what users call of them is a name of `hesscond` itself
    assert public - {"problem", "capture", "probing", "export", "runs"} <= rooms


@pytest.mark.parametrize("page", ["docs/contributing.md", "tests/README.md"])
def test_every_path_on_the_map_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    tops = "hesscond|_hesscond_pytest|tests|docs|studies|figures|benchmarks"
    paths = set(re.findall(rf"`((?:{tops})(?:/[\w./*-]*)?)`", text))
    assert len(paths) > 15
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{page}: there is no {path}"


def test_every_room_is_on_the_map():
    text = (DOCS / "contributing.md").read_text(encoding="utf-8")
    for room in Path(hesscond.__file__).parent.glob("*/__init__.py"):
        assert f"`hesscond/{room.parent.name}`" in text, room.parent.name


def test_the_smallest_method_is_that_of_the_package():
    page = (DOCS / "contributing.md").read_text(encoding="utf-8")
    source = (Path(hesscond.__file__).parent / "methods" / "vanilla.py").read_text(encoding="utf-8")
    assert f"```python\n# hesscond/methods/vanilla.py\n{source}```" in page


#: Words with which a summary line names no noun.
NO_NOUN = {"Of", "Those", "That", "As", "With", "So", "What", "They", "It", "Its"}


def test_summaries_name_their_noun():
    """Ten at most begin with a word that makes one look for it."""
    found = []
    for path in sorted((ROOT / "hesscond").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                first = re.match(r"\W*(\w+)", summary)
                if first and first[1] in NO_NOUN:
                    found.append(f"{path.relative_to(ROOT)}: {summary}")
    assert len(found) <= 10, "\n".join(found)
