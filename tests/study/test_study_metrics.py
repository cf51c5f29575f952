"""Metrics of the test set: what scikit-learn makes of the same outputs, and what is left out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from hesscond.study.metrics import METRICS, hits, of_characters, of_classes, of_values


@settings(deadline=None)
@given(st.integers(2, 30), st.integers(1, 40), st.integers(0, 10**6))
def test_of_classes_as_scikit_learn_has_them(classes, samples, seed):
    """On classes that are not all in the test set, and not as often as each other."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(samples, classes, generator=generator)
    targets = (classes * torch.rand(samples, generator=generator).square()).long()
    parts = [hits(output[start : start + 7], targets[start : start + 7]) for start in range(0, samples, 7)]
    found = of_classes(torch.cat(parts), targets, classes)
    guess, targets = output.argmax(1).numpy(), targets.numpy()
    assert set(found) == set(METRICS)
    assert found["test_accuracy"] == accuracy_score(targets, guess)
    by_class = np.mean([accuracy_score(targets[targets == c], guess[targets == c]) for c in np.unique(targets)])
    assert found["test_class_accuracy"] == pytest.approx(by_class)
    if classes < 10:
        assert found["test_top5"] is None
    else:
        assert found["test_top5"] == top_k_accuracy_score(targets, output.numpy(), k=5, labels=range(classes))
    assert found["test_psnr"] is None


def test_of_values():
    """A tenth of full scale off is 20 dB."""
    targets = torch.tensor([[0.0], [0.5], [1.0]])
    assert of_values(0.01, targets)["test_psnr"] == pytest.approx(20)
    assert of_values(0.0, targets)["test_psnr"] == math.inf
    assert of_values(4.0, targets)["test_psnr"] == pytest.approx(-20 * math.log10(2))
    assert of_values(0.01, targets)["test_accuracy"] is None
    assert of_values(0.01, targets + 0.1)["test_psnr"] is None
    assert of_values(0.01, targets - 0.1)["test_psnr"] is None


@settings(deadline=None)
@given(st.integers(2, 20), st.integers(1, 30), st.integers(0, 10**6))
def test_bits_per_character(vocabulary, characters, seed):
    """−log₂ of the probability that each character was given, from the softmax in numpy."""
    generator = torch.Generator().manual_seed(seed)
    output = 3 * torch.randn(characters, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (characters,), generator=generator)
    p = np.exp(output.numpy())
    given_to = p[np.arange(characters), targets.numpy()] / p.sum(1)
    nats = torch.nn.functional.cross_entropy(output, targets).item()
    assert of_characters(nats)["test_bits_per_character"] == pytest.approx(-np.log2(given_to).mean())
