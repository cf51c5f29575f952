"""What the tests of all statements ask of a verdict."""

import numpy as np

from hesscond.theorems import verify


def observed_inputs(H):
    """ĤU, μ and σ of inputs H (N, n), constant features left out."""
    H = H[:, H.min(0) != H.max(0)]
    mu, sigma = H.mean(0), H.std(0)
    return np.hstack([np.ones((len(H), 1)), H - mu]), mu, sigma


def tallies(verdict):
    return {tally.claim.name: tally for tally in verdict.tallies}


def check_known(id, *, trials, least=0.5, seldom=()):
    """True claims are never violated and mostly hold; false ones are violated, and by certified counterexamples.

    ``seldom``: claims that apply to few random cases, or are violated by few.
    """
    verdict = verify(id, trials=trials)
    assert verdict.ok
    examples = {example.claim: example for example in verdict.counterexamples}
    assert set(examples) == {tally.claim.name for tally in verdict.tallies if not tally.claim.true}
    assert all(example.factor > 1 for example in verdict.counterexamples)
    assert all(isinstance(i, int) for example in verdict.counterexamples for row in example.matrix for i in row)
    for tally in verdict.tallies:
        wanted = 1 if tally.claim.name in seldom else least * trials
        assert (tally.holds if tally.claim.true else tally.violated) >= wanted, tally
        assert tally.violated == 0 or not tally.claim.true
    assert verdict.status == verdict.expected
    again = verify(id, trials=2)
    assert [e.matrix for e in again.counterexamples] == [e.matrix for e in verdict.counterexamples]
    return verdict


def check_broken(broken, claims, *, trials=40):
    """These claims of the variant come out violated."""
    verdict = verify(broken, trials=trials, counterexamples=False)
    assert not verdict.ok
    assert all(tallies(verdict)[claim].violated > 0 for claim in claims)


def example_of(verdict, claim):
    (example,) = [example for example in verdict.counterexamples if example.claim == claim]
    return example


def kappa(M):
    """Of a symmetric matrix, by |λ|."""
    values = np.abs(np.linalg.eigvalsh(np.array(M, dtype=float)))
    return values.max() / values.min()
