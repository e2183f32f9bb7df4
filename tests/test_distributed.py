"""Layers in several processes: DDP with uneven batches, parameters sharded by `fully_shard`."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_work import alone, make_model, trained, work

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
# The same sums in another order, after a dozen steps of training.
RTOL = 1e-9


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What four processes have found; to start them takes longer than what they do."""
    folder = tmp_path_factory.mktemp("distributed")
    mp.spawn(work, (4, str(folder / "store"), str(folder / "results.pt")), nprocs=4)
    return torch.load(folder / "results.pt", weights_only=True)


def same(mine, others):
    assert len(mine) == len(others)
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b, rtol=RTOL, atol=RTOL)


@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize(("name", "kind", "world"), [("four", "argmin", 4), ("two", "root", 2)])
def test_uneven_batches_train_as_in_one_process(name, kind, world, found):
    """Every process has another number of batches, of another size, one of them empty."""
    same(found[name], alone(kind, world))
    assert found["traces"] >= 1, "layers were traced on the way"


@pytest.mark.xdist_group("distributed")
def test_sharded_layers_train_as_whole_ones(found):
    whole = trained(make_model("argmin"), range(4), 4)
    same(found["sharded"], [p.detach() for p in whole.parameters()])


@pytest.mark.xdist_group("distributed")
def test_a_score_that_is_sharded_alone_gets_a_sentence(found):
    """Its parameters are freed between the calls of a solve."""
    assert found["said"].startswith("score uses parameters that are freed after each call") and found["said"].endswith(".")
