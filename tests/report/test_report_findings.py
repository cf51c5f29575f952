"""What is said of runs: names, differences, warnings, verdicts."""

from dataclasses import replace

import pytest

from hesscond.report import html_report
from hesscond.report.findings import (
    configurations,
    differences,
    environment,
    findings,
    named_runs,
    unresolved,
    verdicts,
)
from hesscond.report.html_report import render_report
from hesscond.theorems import statement
from tests.report_page import Page


def kinds(runs):
    named = named_runs(runs)
    return {finding.kind: finding.text for finding in findings(named, verdicts(named))}


def outcome(status, claim="scaling", known=1, reason="", used=None):
    row = {"statement": "bnp-theorem-4", "claim": claim, "known": known}
    return row | {"status": status, "reason": reason, "used": used}


def test_runs_have_different_names_and_files(make):
    runs = [
        make.run("bnp"),
        make.run("bnp", 1),
        make.run("bnp", learning_rate=0.5),
        make.run("bnp"),
        make.run("bnp:rho=0.9"),
    ]
    named = named_runs(runs)
    assert [one.name for one in named] == [
        "bnp, seed 0, lr 0.1, batch 60 #1",
        "bnp, seed 1",
        "bnp, seed 0, lr 0.5, batch 60",
        "bnp, seed 0, lr 0.1, batch 60 #2",
        "bnp:rho=0.9, seed 0",
    ]
    assert len({one.file for one in named}) == len(named)
    assert {one.file for one in named} > {"bnp-seed1", "bnp-rho-0.9-seed0"}


def test_differences_are_those_and_no_others(make):
    named = named_runs([make.run("vanilla"), make.run("bnp", 1, versions={"torch": "2.13"})])
    assert {row.key: row.values for row in differences(named)} == {
        "run.method": ('"vanilla"', '"bnp"'),
        "run.seed": ("0", "1"),
        "run.versions.torch": ("–", '"2.13"'),
    }
    first, second = configurations(named)
    assert {line for line, differs in first.lines if differs} == {'method = "vanilla"', "seed = 0"}
    marked = {line for line, differs in second.lines if differs and line}
    assert marked == {'method = "bnp"', "seed = 1", "[run.versions]", 'torch = "2.13"'}
    assert {fact.name: fact.values for fact in environment(named)} == {
        "device": (("cpu", ""),),
        "data source": (("made", ""),),
        "torch": (("–", "vanilla, seed 0"), ("2.13", "bnp, seed 1")),
    }


@pytest.mark.parametrize("status", ["diverged", "killed", "interrupted", "failed", "running", "silent", "strange"])
def test_a_run_that_did_not_finish_is_a_warning(make, status):
    run = make.run("bnp", probes=[make.probe()], message="the loss is nan")
    found = kinds([replace(run, facts=run.facts | {"status": status})])
    assert status in found[status.capitalize()]
    assert found[status.capitalize()].endswith("(4 iterations): the loss is nan")


def test_a_sound_run_has_no_warnings(make, monkeypatch):
    run = make.run("bnp", probes=[make.probe(samples=1437)] * 3)
    assert kinds([run]) == {}
    monkeypatch.setattr(html_report, "FIGURES", {})
    assert "Nothing unusual: every run finished" in Page(render_report([run])).words


def test_what_the_probes_show_is_a_warning(make):
    assert list(kinds([make.run("bnp")])) == ["Not probed"]
    wide = make.probe(rank=60, nullity=41, dead=2)
    found = kinds([make.run("bnp", probes=[wide, wide])])
    assert list(found) == ["Rank deficient", "Singular everywhere", "Dead features"]
    assert "at 2 of 2 probes" in found["Rank deficient"]
    assert "rank 60 of 101" in found["Singular everywhere"]
    assert "at most 2 of 100" in found["Dead features"]
    tall = make.probe(samples=1437, negative=3)
    found = kinds([make.run("bnp", probes=[tall, make.probe(samples=1437, kappa=float("inf"), resolved=0)])])
    assert list(found) == ["Indefinite", "Unresolved"]
    assert found["Indefinite"].startswith("1 of 2 Hessians")
    assert found["Unresolved"].startswith("1 of 6 ")
    assert list(kinds([make.run("bnp", probes=[tall | {"negative": 0}], versions={"torch": v}) for v in "12"])) == [
        "Different versions"
    ]


def test_unresolved_are_counted_by_run_data_and_quantity(make):
    lost = make.probe(kappa=float("inf"), resolved=0)
    named = named_runs([make.run("bnp", probes=[lost, lost, make.probe(), lost | {"data": "train"}])])
    assert [(row.data, row.quantity, row.unresolved, row.measured) for row in unresolved(named)] == [
        ("mini-batches", "κ(H)", 2, 3),
        ("mini-batches", "κ(PᵀHP)", 0, 3),
        ("mini-batches", "κ own", 0, 3),
        ("training set", "κ(H)", 1, 1),
        ("training set", "κ(PᵀHP)", 0, 1),
        ("training set", "κ own", 0, 1),
    ]


def test_verdicts_say_what_the_statement_says(make):
    rows = [
        outcome("holds", used=0.4),
        outcome("violated", used=2.0),
        outcome("not-applicable", "centring", reason="Ĥ has no full column rank"),
        outcome("unresolved", "both together", known=0, reason="the bounds lie on both sides"),
    ]
    named = named_runs([make.run("bnp", probes=[make.probe()], statements=rows)])
    (found,) = verdicts(named)
    known = statement("bnp-theorem-4")
    assert (found.title, found.source, found.text, found.hypotheses) == (
        known.title,
        known.source,
        known.text,
        known.hypotheses,
    )
    scaling, centring, together = found.rows
    assert (scaling.holds, scaling.violated, scaling.worst, scaling.status) == (1, 1, 2.0, "violated")
    assert scaling.first == "bnp, seed 0, iteration 1"
    assert centring.status == "not-applicable"
    assert centring.reasons == (("Ĥ has no full column rank", 1),)
    assert (together.status, together.known) == ("unresolved", False)
    assert found.sentence == "4 checks of 3 claims; 1 violation of what is known to be true."
    text = next(claim.text for claim in known.claims if claim.name == "scaling")
    assert scaling.text == text
    assert "A statement that is known to be true was violated." in kinds([one.run for one in named])


def test_a_statement_of_a_later_version_is_shown_by_its_name(make):
    rows = [outcome("holds") | {"statement": "theorem-9000", "claim": "all is well"}]
    (found,) = verdicts(named_runs([make.run("bnp", statements=rows)]))
    assert found.id == "theorem-9000"
    assert "does not know" in found.text
    assert found.rows[0].holds == 1
