"""What can be read as an expectation, what cannot, and that nothing ever runs."""

import ast
import builtins
import time

import pytest
from hypothesis import given, settings, strategies as st

from hesscond.errors import ConfigError
from hesscond.expectations import Expectation, ExpressionError
from hesscond.expectations.parser import COLUMNS, Reader

PIECES = [
    *COLUMNS, "data", "layer", "unit", "iteration", "median", "quantile", "all", "any", "last", "share", "and",
    "or", "not", "bnp.kappa", '"bnp+groupnorm".', "(", ")", "[", "]", ",", ".", "=", "==", "<", "<=", "!=", "+", "-",
    "*", "/", "**", "1", "1e6", "0.5", "1e999", "'", '"', "train", "fc3", "__import__", "eval", "lambda", "\n",
    "\x00", "κ",
]  # fmt: skip


class Forbidden(BaseException):
    """Code would have been run; not an Exception, so that nothing hides it."""


def parse_without_code(text):
    """The tree or the sentence, with all that could run code taken away meanwhile."""

    def refuse(*args, **options):
        raise Forbidden(args)

    def compile_to_a_tree(text, name, mode, flags, **options):
        if flags != ast.PyCF_ONLY_AST:
            raise Forbidden(text)
        return saved["compile"](text, name, mode, flags, **options)

    saved = {name: getattr(builtins, name) for name in ("eval", "exec", "compile", "open", "__import__", "getattr")}
    start = time.perf_counter()
    try:
        for name in ("eval", "exec", "open", "__import__"):
            setattr(builtins, name, refuse)
        builtins.compile = compile_to_a_tree
        try:
            return Reader(text).expectation()
        except ConfigError as error:
            return str(error)
    finally:
        for name, function in saved.items():
            setattr(builtins, name, function)
        assert time.perf_counter() - start < 5


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(st.sampled_from(PIECES), max_size=25).map(" ".join)))
def test_any_text_is_a_tree_or_one_sentence(text):
    found = parse_without_code(text)
    if isinstance(found, str):
        assert "\n" not in found
        assert found.isprintable()
        assert found.startswith('expectation "')
        assert len(found) < 700
    else:
        assert found.truth


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000, "kappa<" * 300, "-" * 1900 + "kappa < 1", "not " * 400 + "kappa < 1", "max(" * 400,
        "kappa" + "[unit=1]" * 200 + "<1", "kappa" + "+1" * 900 + "<1", "2**" * 600 + "kappa<1", "kappa < 1" * 10**6,
        "kappa < " + "9" * 1900, "'" * 1999, "kappa" + " " * 1900,
    ],
)  # fmt: skip
def test_long_and_deep_ones_are_refused_at_once(text):
    start = time.perf_counter()
    assert isinstance(parse_without_code(text), str)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("text", "where", "complaint"),
    [
        ("kappa < kapa / 10", 9, "'kapa' is not a column of the log: did you mean kappa?"),
        ("kappa_preconditionned < 1", 1, "did you mean kappa_preconditioned?"),
        ("kappa[laier = fc1] < 1", 7, "did you mean layer?"),
        ("kappa", 1, "this is a number: compare it"),
        ("1 < 2", 1, "names no column"),
        ("kappa = 3", 7, "= is for filters"),
        ("kappa < 3 kappa", 11, "'kappa' cannot follow"),
        ("kappa <", 8, "a column, a number or a parenthesis is missing"),
        ("(kappa < 3", 11, "')' is missing"),
        ("kappa < 10 [data = train]", 12, "a filter belongs behind a column"),
        ("loss[layer = fc1] < 1", 6, "the table training has no such column"),
        ("kappa[kappa < 3] < 1", 7, "it has bounds"),
        ("kappa[data < train] < 1", 12, "use = or !="),
        ("kappa[unit = three] < 1", 14, "unit is compared with a number, not three"),
        ("iteration < 3", 1, "use it in a filter"),
        ("bnp.kappa < kappa", 13, "say of which method"),
        ("median(kappa < 3) < 1", 8, "median takes a number"),
        ("kappa and rank < 3", 1, "and takes a comparison"),
        ("quantile(kappa) < 1", 15, "quantile takes a number, too"),
        ("quantile(kappa, 2) < 1", 17, "from 0 to 1"),
        ("kappa < 1e999", 9, "too large"),
        ("kappa < 10k", 9, "a number is written as"),
        ('"bnp < 1', 1, "quotation mark is not closed"),
        ('"bnp" < 1', 1, "a dot and a column"),
        ("__import__('os').system('ls')", 1, "not a function"),
        ("", 1, "there is nothing"),
        ("κ < 3", 1, "means nothing here"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, where, complaint):
    with pytest.raises(ExpressionError) as caught:
        Expectation.of(text)
    assert complaint in str(caught.value)
    assert caught.value.start == where - 1
    assert f"at character {where}," in str(caught.value) or where == len(text) + 1


def test_the_methods_are_those_named():
    one = Expectation.of('"bnp+groupnorm".kappa < vanilla.kappa / 2 and bnp.rank == vanilla.rank')
    assert one.methods == ("bnp+groupnorm", "vanilla", "bnp")
    with pytest.raises(ConfigError, match="none of the runs is of method 'bnp'"):
        one.check_methods(["vanilla", "bnp+groupnorm"])
