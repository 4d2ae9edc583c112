"""What cannot work is refused at wrapping, by the module's name, with the way out."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import Varuna
from varuna.partition import PartitionError, trace


class Model(nn.Module):
    def __init__(self, embedding: nn.Module, *, weight_norm: bool = False) -> None:
        super().__init__()
        self.embedding = embedding
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if weight_norm:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(self.body[1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.embedding(x)).square().mean()
        return out


INPUTS = {"x": torch.arange(6).reshape(2, 3)}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_module_with_sparse_gradients_is_named(kind: type[nn.Embedding] | type[nn.EmbeddingBag]) -> None:
    embedding = kind(16, 4, sparse=True)
    words = rf"embedding is an nn\.{kind.__name__} with sparse=True \(in Model, .*{re.escape(__file__)}:\d+\).*AdamW"
    with pytest.raises(PartitionError, match=words):
        trace(Model(embedding), INPUTS)
    trace(Model(kind(16, 4)), INPUTS)
    trace(Model(embedding.requires_grad_(False)), INPUTS)  # it has no gradient


def test_the_old_weight_norm_is_named_and_the_new_one_trains() -> None:
    with pytest.raises(PartitionError, match=r"body\.1 has the old .*weight_norm on its weight .*parametrizations"):
        trace(Model(nn.Embedding(16, 4), weight_norm=True), INPUTS)
    model = Model(nn.Embedding(16, 4))
    nn.utils.parametrizations.weight_norm(model.body[1])
    trace(model, INPUTS)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, sparse=True).square().mean()


def test_a_sparse_gradient_of_a_function_is_named_at_the_first_step() -> None:
    model = Varuna(Functional(), get_batch_fn=INPUTS, batch_size=2, chunk_size=2)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"the gradient of table is sparse_coo, but only dense gradients"):
        model.step(INPUTS)


class Detached(Model):
    """Its loss has no gradient, or it trains in the head only that the loss does not use."""

    def __init__(self, *, drops_gradient: bool = True) -> None:
        super().__init__(nn.Embedding(16, 4))
        self.drops_gradient = drops_gradient
        if not drops_gradient:
            self.requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.drops_gradient):
            return super().forward(x)


@pytest.mark.parametrize("drops_gradient", [True, False], ids=["without gradients", "unused"])
def test_a_loss_that_depends_on_nothing_that_trains_is_refused(drops_gradient: bool) -> None:
    with pytest.raises(PartitionError, match=r"the loss depends on no parameter that trains.*no_grad.*detach.*freeze"):
        Varuna(Detached(drops_gradient=drops_gradient), get_batch_fn=INPUTS)


def test_a_model_that_is_all_frozen_evaluates() -> None:
    frozen = Detached().requires_grad_(False)
    model = Varuna(frozen, get_batch_fn=INPUTS)
    assert model.evaluate(INPUTS) == pytest.approx(frozen(**INPUTS).item())
