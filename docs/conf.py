"""How Sphinx builds these pages: ``make docs``, which turns warnings into errors and needs no network.

``make docs TRIALS=5`` verifies the statements with so few trials, to see whether the pages build.
"""

import os
import re
import sys
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# for the processes that draw the gallery and execute notebooks
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])

import generate  # noqa: E402
import reference_pages  # noqa: E402

import hesscond  # noqa: E402

project = "hesscond"
author = "The hesscond developers"
copyright = author
version = release = hesscond.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
# browsers draw MathML themselves: no script, no network
html_math_renderer = "mathml"
# `like this` in a docstring is a name: a link where it is documented, code where it is not
default_role = "py:obj"
napoleon_google_docstring = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
# a name may be documented in its room and be meant from another
suppress_warnings = ["ref.python"]
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# notebooks are executed with each build, and one that fails fails it
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

html_theme = "furo"
html_title = f"hesscond {version}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "scorer.js")
# the report that the gallery shows
html_extra_path = ["gallery/site"]

#: Lists that are read on a code host too: what Sphinx needs of them is added here.
CONTENTS = {"methods/index": "*", "statements/index": "*", "reference/python": "python/*"}


if os.environ.get("PAGE"):
    # one page is built with what is there of the others
    exclude_patterns += ["methods", "statements"]
    html_extra_path.clear()
    suppress_warnings += ["toc.not_readable", "toc.excluded", "myst.xref_missing", "image.not_readable"]
    nb_execution_mode = "force" if os.environ["PAGE"].startswith("examples/") else "off"
elif os.environ.get("TRIALS"):
    generate.write(HERE, int(os.environ["TRIALS"]))
    # the next build writes them with all trials
    os.utime(HERE / "statements" / "index.md", (0, 0))
elif generate.outdated():
    generate.write(HERE)


def complete(app, docname, source):
    """Put in what is written from the program."""
    source[0] = reference_pages.filled_in(source[0])
    if docname in CONTENTS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{CONTENTS[docname]}\n```\n"


def escape_bars(app, what, name, obj, options, lines):
    """|λ| is a magnitude, not a substitution of reStructuredText's; code keeps its bars."""
    literal = None
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None and not line.lstrip().startswith(">>>"):
            parts = re.split(r"(``.+?``)", line)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[number] = "".join(parts)
            literal = indent if line.rstrip().endswith("::") else None


def write_inline(translator, node):
    """A formula within a line."""
    translator.body.append(convert(node.astext()))
    raise SkipNode


def write_display(translator, node):
    """A formula on a line of its own."""
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>\n')
    raise SkipNode


def delete_page(app, env, docname):
    """Delete the page of a document that is gone, with its links; that of one that has changed is written anew."""
    (Path(app.outdir) / f"{docname}.html").unlink(missing_ok=True)


def setup(app):
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_display, None))
    app.connect("source-read", complete)
    app.connect("env-purge-doc", delete_page)
    app.connect("autodoc-process-docstring", escape_bars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
