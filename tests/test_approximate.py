"""Approximate codes: errors by enumeration and in the papers' closed forms."""

import itertools
import math

import numpy as np
import pytest
from code_cases import TOLERANCE, all_patterns, dense

from jaxcode import approximate
from jaxcode.approximate import (
    bernoulli_error,
    expander_error_bound,
    one_step_weights,
    repetition_error,
    second_eigenvalue,
)
from jaxcode.codes import bernoulli, expander, fractional_repetition, graph_code, polynomial


def random_survivors(n, s, trials, seed=0):
    rng = np.random.default_rng(seed)
    survivors = np.ones((trials, n), bool)
    for row in survivors:
        row[rng.choice(n, s, replace=False)] = False
    return survivors


def optimal_error(B, survivors):
    """The least of ||a B - 1||^2 / k over vectors a on the survivors, by projection."""
    target = np.ones(B.shape[1])
    fitted = np.linalg.pinv(B[survivors].T) @ target if survivors.any() else np.zeros(0)
    return ((fitted @ B[survivors] - target) ** 2).mean() if survivors.any() else 1.0


@pytest.mark.parametrize("stragglers", range(8))
@pytest.mark.parametrize("one_step", [False, True])
def test_error_of_fractional_repetition_is_the_published_formula(stragglers, one_step):
    n, d = 8, 2
    code = fractional_repetition(n, d - 1)
    patterns = all_patterns(n)
    survivors = patterns[(~patterns).sum(1) == stragglers]
    weights = one_step_weights(code, survivors) if one_step else None
    error = code.decoding_error(survivors, weights).mean()
    expected = repetition_error(n, d, stragglers, one_step=one_step)
    assert error == pytest.approx(expected, abs=TOLERANCE)
    if 0 < stragglers and not one_step:
        assert expected < repetition_error(n, d, stragglers, one_step=True)


@pytest.mark.parametrize(("d", "s"), [(2, 6), (3, 12), (5, 30), (4, 0), (6, 59)])
def test_formulas_are_the_textbook_ones(d, s):
    n = 60
    lost = math.comb(n - d, s - d) / math.comb(n, s) if s >= d else 0
    assert repetition_error(n, d, s) == pytest.approx(lost)
    weights = (n - d) * s / ((n - s) * d * (n - 1))
    assert repetition_error(n, d, s, one_step=True) == pytest.approx(weights)
    p = s / n  # about p^d and p / ((1 - p) d), as the papers have it
    assert repetition_error(n, d, s) <= p**d
    assert weights == pytest.approx(p / ((1 - p) * d), rel=0.15)


def test_one_step_weights_are_n_over_survivors_and_load():
    B = dense(bernoulli(12, 3, seed=2))[..., 0]
    code = expander(12, 3)
    survivors = random_survivors(12, 4, 5)
    weights = one_step_weights(code, survivors)
    assert weights[survivors[:, None]] == pytest.approx(12 / 8)  # A / d has entries of 1/d
    assert not weights[~survivors[:, None]].any()
    assert one_step_weights(bernoulli(12, 3, seed=2), np.ones(12, bool))[0, 0] == pytest.approx(
        12 / B.sum()
    )
    assert not one_step_weights(code, np.zeros(12, bool)).any()


@pytest.mark.parametrize(
    "code",
    [bernoulli(9, 2, seed=4), expander(8, 3, seed=1), graph_code(9, 3, seed=1)],
    ids=lambda code: code.name,
)
def test_decoding_error_is_the_best_there_is_for_every_pattern(code):
    B = dense(code)[..., 0]
    for survivors in all_patterns(code.num_workers)[::3]:
        expected = optimal_error(B, survivors)
        assert code.decoding_error(survivors) == pytest.approx(expected, abs=TOLERANCE)
        judged = code.decoding_error(survivors, code.decoding_weights(survivors))
        assert judged == pytest.approx(expected, abs=TOLERANCE)
        fixed = code.decoding_error(survivors, one_step_weights(code, survivors))
        assert fixed >= expected - TOLERANCE


def test_bernoulli_draws_each_entry_with_its_probability_and_nobody_is_left_out():
    held = np.array([dense(bernoulli(40, 4, seed=i))[..., 0] for i in range(50)])
    assert set(np.unique(held)) == {0, 1}
    assert held.mean() == pytest.approx(0.1, rel=0.03)
    assert held.any(1).all()
    assert held.any(2).all()
    assert (held[0] != held[1]).any()
    np.testing.assert_array_equal(dense(bernoulli(40, 4, seed=1))[..., 0], held[1])


@pytest.mark.parametrize(("d", "s"), [(2, 6), (5, 12)])
def test_expected_one_step_error_of_raw_bernoulli_draws(d, s):
    n, rng = 60, np.random.default_rng(0)
    errors = []
    for _ in range(400):
        B = rng.random((n - s, n)) < d / n
        errors.append(((B.sum(0) * n / ((n - s) * d) - 1) ** 2).mean())
    assert np.mean(errors) == pytest.approx(bernoulli_error(n, d, s), rel=0.03)
    code = bernoulli(n, d)
    survivors = random_survivors(n, s, 50)
    assert code.decoding_error(survivors).mean() < bernoulli_error(n, d, s)


@pytest.mark.parametrize(("n", "d"), [(8, 3), (20, 4), (60, 5), (10, 9), (9, 6), (6, 1), (50, 3)])
def test_expanders_are_regular_simple_graphs_within_the_bound(n, d):
    code = expander(n, d)
    A = dense(code)[..., 0] * d
    np.testing.assert_allclose(A, A.T, atol=TOLERANCE)
    np.testing.assert_allclose(A.sum(0), d, atol=TOLERANCE)
    assert set(np.unique(A.round(9))) <= {0, 1}
    assert not np.diag(A).any()
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(A)))
    assert second_eigenvalue(code) == pytest.approx(eigenvalues[-2], abs=1e-6)
    assert code.is_decodable(np.ones(n, bool))
    for s in range(1, n, max(1, n // 5)):
        survivors = random_survivors(n, s, 20)
        survivors[0] = np.arange(n) >= s
        bound = expander_error_bound(n, d, s, second_eigenvalue(code))
        assert bound == pytest.approx((eigenvalues[-2] / d) ** 2 * s / (n - s), abs=1e-6)
        fixed = code.decoding_error(survivors, one_step_weights(code, survivors))
        assert (fixed <= bound + TOLERANCE).all()
        assert (code.decoding_error(survivors) <= fixed + TOLERANCE).all()
    if d in (4, 5):
        assert eigenvalues[-2] < 1.1 * 2 * math.sqrt(d - 1)  # near the least there is


def test_workers_of_a_graph_code_are_the_edges_of_a_regular_graph():
    code = graph_code(30, 5)
    B = dense(code)[..., 0]
    assert B.shape == (30, 12)
    np.testing.assert_array_equal(B.sum(1), 2)
    np.testing.assert_array_equal(B.sum(0), 5)
    assert len(np.unique(B, axis=0)) == 30  # simple
    assert code.computation == pytest.approx(np.full(30, 5 / 30))


def test_a_graph_code_loses_what_its_bipartite_components_say():
    code = graph_code(15, 3)
    edges = np.argwhere(dense(code)[..., 0])[:, 1].reshape(-1, 2)
    for survivors in random_survivors(15, 9, 40):
        lost = 0.0
        side = {}
        for start in range(10):
            if start in side:
                continue
            side[start], component, odd = 0, [start], False
            for vertex in component:
                for a, b in edges[survivors]:
                    for x, y in ((a, b), (b, a)):
                        if x == vertex and y not in side:
                            side[y] = 1 - side[x]
                            component.append(y)
                        elif x == vertex and side[y] == side[x]:
                            odd = True
            left = sum(side[v] for v in component)
            right = len(component) - left
            lost += 0 if odd else (left - right) ** 2 / (left + right)
        assert code.decoding_error(survivors) == pytest.approx(lost / 10, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("d", "s", "repetition", "graph"),
    [(2, 6, 0.0085, None), (3, 12, 0.0064, 0.0068), (5, 12, 1.5e-4, None), (5, 30, 0.026, 0.025)],
)
def test_published_comparison_at_sixty_workers(d, s, repetition, graph):
    """Measured means of err over random stragglers, and the theory of fractional repetition."""
    n = 60
    assert repetition_error(n, d, s) == pytest.approx(repetition, rel=0.04)
    if graph is not None:  # the others are rare events, or depend on the graph's cycles
        found = graph_code(n, d).decoding_error(random_survivors(n, s, 300)).mean()
        assert found == pytest.approx(graph, rel=0.5)
    for code in (bernoulli(n, d), expander(n, d)):
        assert code.decoding_error(random_survivors(n, s, 100)).mean() > 1.2 * repetition


def test_regular_graphs_of_every_degree_exist():
    rng = np.random.default_rng(0)
    for n, d in itertools.product(range(2, 12), range(1, 11)):
        if d < n and n * d % 2 == 0:
            A = approximate._regular_graph(rng, n, d)
            assert (A.sum(0) == d).all()
            assert (A == A.T).all()
            assert not np.diag(A).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bernoulli(4, 5), "load to be an integer from 1 to 4; got 5"),
        (lambda: bernoulli(0, 1), "num_workers"),
        (lambda: bernoulli(4, 2, seed=-1), "seed"),
        (lambda: expander(5, 3), "even product only; got 5 x 3. Use 2 or 4"),
        (lambda: expander(5, 5), "load to be an integer from 1 to 4"),
        (lambda: expander(1, 1), "num_workers"),
        (lambda: graph_code(30, 7), "for n = 30, where the valid ones are 2, 3, 4, 5, 6"),
        (lambda: graph_code(1, 2), "there is none"),
        (lambda: graph_code(30, True), "got True"),
        (lambda: repetition_error(8, 3, 1), "n = 8, d = 3"),
        (lambda: repetition_error(8, 2, 8), "num_missing"),
        (lambda: expander_error_bound(8, 2, 1, 3), "second_eigenvalue to be .* from 0 to 2"),
        (lambda: second_eigenvalue(fractional_repetition(8, 1)), "made by `expander`"),
        (lambda: second_eigenvalue(graph_code(9, 3)), "made by `expander`"),
        (
            lambda: one_step_weights(polynomial(6, 1, num_fragments=2), np.ones(6, bool)),
            "one fragment and entries with a positive sum",
        ),
        (lambda: one_step_weights(expander(6, 3), [True] * 5), "survivors to be bool of shape"),
    ],
)
def test_bad_arguments_are_one_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
