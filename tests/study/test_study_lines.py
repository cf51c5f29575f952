"""Lines of keys: every document that tomllib reads, whatever its form."""

import tomllib

import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from hesscond.study.toml_lines import lines_of

KEYS = st.text(min_size=1, max_size=6) | st.sampled_from(["a", "b-c", "1", "x.y", '"', "'", "#", "[z]", "é = 1"])
VALUES = st.recursive(
    st.integers(-5, 5)
    | st.booleans()
    | st.text(max_size=8)
    | st.sampled_from(['"""', "a # b", "]]", "{", "\\", "'''"]),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(KEYS, own, max_size=3),
    max_leaves=12,
)


def paths_of(value, place=()):
    """Every path in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in items:
        yield (*place, key)
        yield from paths_of(own, (*place, key))


def inline(value):
    """TOML of a value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {inline(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return quoted(value) if isinstance(value, str) else str(value).lower()


def quoted(text):
    return tomli_w.dumps({"k": text}).removeprefix("k = ").rstrip("\n")


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({"a": [{"b": [1, {"c": 2}]}, {"b": []}]})
def test_every_path_and_no_other_is_found(content):
    for text in (tomli_w.dumps(content), tomli_w.dumps(content, multiline_strings=True)):
        assert set(lines_of(text)) == set(paths_of(tomllib.loads(text)))
    text = "\n".join(f"{quoted(key)} = {inline(value)}" for key, value in content.items())
    found = lines_of(text)
    assert set(found) == set(paths_of(content))
    # one statement a line
    assert all(line == 1 + list(content).index(path[0]) for path, line in found.items())


@given(st.integers(1, 9), st.integers(0, 5), st.sampled_from(["", "# [no] = 'table'\n", "\n\n", "z = '''\n'''\n"]))
def test_the_line_is_that_of_the_marked_key(tables, number, between):
    """Tables of arrays with gaps between them: the line is found by looking for the text of the key."""
    lines = []
    for k in range(tables):
        lines.append(
            f"[[t.u]] # {k}\nwidths = [\n  1, # one\n  {{ v{k} = 2 }},\n]\n{between}m{k} = 1979-05-27 07:32:00 # x"
        )
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)
    k = min(number, tables - 1)
    found = lines_of(text)
    for marker, path in ((f"m{k} =", (f"m{k}",)), (f"v{k} =", ("widths", 1, f"v{k}")), (f"# {k}\n", ())):
        line = text[: text.index(marker)].count("\n") + 1
        assert found["t", "u", k, *path] == line


def test_dotted_and_quoted_keys():
    text = 'a . "b.c".\'d\' = 1\n[ x . y ]\nz.w = """\n[no]\nk = 1\n\\"""""\n[x.q]\n'
    assert lines_of(text) == {
        ("a",): 1,
        ("a", "b.c"): 1,
        ("a", "b.c", "d"): 1,
        ("x",): 2,
        ("x", "y"): 2,
        ("x", "y", "z"): 3,
        ("x", "y", "z", "w"): 3,
        ("x", "q"): 7,
    }
    assert set(lines_of(text)) == set(paths_of(tomllib.loads(text)))
