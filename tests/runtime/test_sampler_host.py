"""The numpy way to find candidates."""

import numpy as np
import pytest

from ortolan.runtime.engine.sampler_host import likeliest


@pytest.mark.parametrize("n", [5, 64, 997, 4096, 49152])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "rising", "mostly -inf"])
def test_the_likeliest_are_those_of_a_stable_sort(n: int, kind: str) -> None:
    """A threshold that missed one, or broke a tie otherwise, would change answers now and then."""
    random = np.random.default_rng(n)
    logits = {
        "normal": random.standard_normal(n),
        "ties": random.integers(-3, 3, n),
        "equal": np.zeros(n),
        "rising": np.arange(n),
        "mostly -inf": np.where(np.arange(n) % 50 == 3, random.standard_normal(n), -np.inf),
    }[kind].astype(np.float32)
    expected = np.argsort(-logits, kind="stable")
    for k in (1, 2, 15, 64, 700, n):
        if k <= n:
            np.testing.assert_array_equal(likeliest(logits, k), expected[:k])
