"""The Jacobian operator: all products agree with each other, with the dense matrix and with torch.func."""

import pytest
import torch
from problems import Cube

from torchdil import operator as operator_module
from torchdil.operator import Operator

STRATEGIES = ("backward", "forward", "traced", "measure")
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
POINT = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def root(y):
    return torch.tanh(y @ W) + y**2 * y.sum(dim=1, keepdim=True)


def gradient(y):
    return torch.func.grad(lambda u: (torch.cosh(u @ W) + u.sum(dim=1, keepdim=True) ** 4).sum())(y)


FUNCTIONS = [pytest.param(root, False, id="root"), pytest.param(gradient, True, id="argmin")]


def per_sample_jacobian(fn, y):
    return torch.stack([torch.func.jacrev(lambda u: fn(u.unsqueeze(0)).squeeze(0))(row) for row in y])


@pytest.mark.parametrize(("fn", "symmetric"), FUNCTIONS)
def test_dense_is_the_jacobian(fn, symmetric):
    torch.testing.assert_close(Operator(fn, POINT, symmetric).dense(), per_sample_jacobian(fn, POINT))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("fn", "symmetric"), FUNCTIONS)
def test_products_equal_the_dense_matrix(fn, symmetric, strategy):
    J, operator, p = per_sample_jacobian(fn, POINT), Operator(fn, POINT, symmetric), draw(3, 4, 6)
    torch.testing.assert_close(operator.mv(p, strategy), (J @ p.unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(operator.rmv(p, strategy), (J.mT @ p.unsqueeze(2)).squeeze(2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("fn", "symmetric"), FUNCTIONS)
def test_adjoint_identity(fn, symmetric, strategy):
    operator, u, v = Operator(fn, POINT, symmetric), draw(4, 4, 6), draw(5, 4, 6)
    left = (operator.mv(v, strategy) * u).sum(dim=1)
    right = (v * operator.rmv(u, strategy)).sum(dim=1)
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_products_fall_back_where_rules_are_missing(strategy):
    operator, p = Operator(Cube.apply, POINT, False), draw(6, 4, 6)
    torch.testing.assert_close(operator.mv(p, strategy), 3 * POINT**2 * p)
    torch.testing.assert_close(operator.rmv(p, strategy), 3 * POINT**2 * p)
    torch.testing.assert_close(operator.dense(), torch.diag_embed(3 * POINT**2))


@pytest.mark.parametrize("limits", [{"_DENSE_ROWS": 1}, {"_DENSE_ROWS": 4}, {"_DENSE_CHUNK": 2 * POINT.numel()}], ids=str)
@pytest.mark.parametrize(("fn", "symmetric"), FUNCTIONS)
def test_dense_in_batches_of_rows_has_the_columns_of_mv(fn, symmetric, limits, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(operator_module, name, value)
    operator, batches = Operator(fn, POINT, symmetric), []
    rows = operator.rows
    monkeypatch.setattr(operator, "rows", lambda vectors: batches.append(len(vectors)) or rows(vectors))
    J = operator.dense()
    most = limits.get("_DENSE_ROWS", 2)
    assert sum(batches) == 6 and max(batches) == most
    columns = [operator.mv(unit.expand(4, 6)) for unit in torch.eye(6, dtype=torch.float64)]
    torch.testing.assert_close(J, torch.stack(columns, dim=2))


def test_dense_takes_fewer_rows_at_a_time_where_the_function_has_many_weights(monkeypatch):
    batches = []
    for arguments in ((), (torch.empty(operator_module._DENSE_CHUNK // 3),)):
        operator = Operator(root, POINT, False)
        operator.bound = (root, arguments)
        rows = operator.rows
        monkeypatch.setattr(operator, "rows", lambda vectors, rows=rows: batches.append(len(vectors)) or rows(vectors))
        torch.testing.assert_close(operator.dense(), per_sample_jacobian(root, POINT))
    assert batches == [6, 3, 3]


def test_running_out_of_memory_is_not_taken_for_a_missing_batching_rule(monkeypatch):
    operator = Operator(root, POINT, False)
    operator.graph()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.autograd, "grad", full)
    monkeypatch.setattr(operator_module, "_vjp", lambda y, F, p: torch.zeros_like(p))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        operator.dense()


def test_diagonal():
    expected = torch.diagonal(per_sample_jacobian(root, POINT), dim1=1, dim2=2)
    torch.testing.assert_close(Operator(root, POINT, False).diagonal(), expected)


def test_products_are_counted():
    operator, p = Operator(root, POINT, False), draw(7, 4, 6)
    assert operator.products == 0
    operator.mv(p)
    operator.rmv(p, "traced")
    assert operator.products == 2
    operator.dense()
    assert operator.products == 2 + 6


def test_a_given_graph_is_used():
    leaf = POINT.clone().requires_grad_()
    F = root(leaf)

    def forbidden(y):
        raise AssertionError("F must not be evaluated again")

    operator, p = Operator(forbidden, POINT, False, graph=(leaf, F)), draw(8, 4, 6)
    J = per_sample_jacobian(root, POINT)
    torch.testing.assert_close(operator.rmv(p), (J.mT @ p.unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(operator.mv(p), (J @ p.unsqueeze(2)).squeeze(2))


def test_measure_remembers_its_choice(monkeypatch):
    timed = []

    def seconds(self, strategy, transpose):
        timed.append(strategy)
        return {"backward": 2.0, "forward": 3.0, "traced": 1.0}[strategy]

    monkeypatch.setattr(Operator, "_seconds", seconds)
    monkeypatch.setattr(operator_module, "_choices", {})
    p = draw(9, 4, 6)
    for _ in range(2):
        Operator(root, POINT, False, key="measured").rmv(p, "measure")
    assert sorted(timed) == ["backward", "forward", "traced"]
    assert set(operator_module._choices.values()) == {"traced"}
    Operator(root, POINT[:2], False, key="measured").rmv(p[:2], "measure")  # other shapes are timed anew
    assert len(timed) == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("depends_on_parameter", [False, True])
def test_no_dependence_on_y_gives_zeros(strategy, depends_on_parameter):
    constant = torch.ones(4, 6, dtype=torch.float64, requires_grad=depends_on_parameter)
    operator, p = Operator(lambda y: constant * 2, POINT, False), draw(10, 4, 6)
    assert not operator.mv(p, strategy).any()
    assert not operator.rmv(p, strategy).any()
    assert operator.dense().shape == (4, 6, 6)
    assert not operator.dense().any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_products_carry_no_graph(strategy):
    weight = W.clone().requires_grad_()
    operator = Operator(lambda y: torch.tanh(y @ weight), POINT, False)
    for product in (operator.mv, operator.rmv):
        assert not product(draw(11, 4, 6), strategy).requires_grad


def test_bad_strategy():
    with pytest.raises(ValueError, match="product must be one of"):
        Operator(root, POINT, False).mv(POINT, "magic")
