"""The simulated device computes what the CPU does, whatever the program uses of torch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def make_blocks(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(*layers).to(device)


def train(device: str, *, dropout: float = 0.0, dtype: torch.dtype | None = None, **optimizer: Any) -> list[float]:
    model, data = make_blocks(device, dropout), torch.Generator().manual_seed(1)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        x = torch.randn(4, 8, 32, generator=data).to(device)
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("given", [{}, {"foreach": True}, {"fused": True}, {"dropout": 0.1}], ids=str)
def test_a_transformer_trains_as_on_the_cpu(given: dict[str, Any]) -> None:
    assert train("sim", **given) == pytest.approx(train("cpu", **given), rel=1e-6)


def test_autocast_has_the_types_of_cudas() -> None:
    assert train("sim", dtype=torch.bfloat16) == pytest.approx(train("sim"), rel=0.05)
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = torch.randn(3, 3, device="sim") @ torch.randn(3, 3, device="sim")
        assert product.dtype is torch.bfloat16
        assert F.layer_norm(product, (3,)).dtype is torch.float32
        assert F.softmax(product, -1).dtype is torch.float32


def test_checkpointing_draws_the_same_numbers_again() -> None:
    gradients = []
    for again in (False, True):
        model = make_blocks("sim", dropout=0.3)
        torch.manual_seed(3)
        x = torch.ones(2, 4, 32, device="sim", requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.pow(2).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


def test_embedding_attention_and_cross_entropy() -> None:
    def run(device: str) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        embedding, tokens = nn.Embedding(11, 8).to(device), torch.arange(10).reshape(2, 5).to(device)
        query = embedding(tokens).unsqueeze(1)
        hidden = F.scaled_dot_product_attention(query, query, query, is_causal=True).squeeze(1)
        loss = F.cross_entropy((hidden @ embedding.weight.t()).flatten(0, 1), tokens.flatten(), ignore_index=3)
        loss.backward()
        assert embedding.weight.grad is not None
        return loss.item(), embedding.weight.grad.cpu()

    (loss, gradient), (expected, expected_gradient) = run("sim"), run("cpu")
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient)


def test_convolution_and_batch_norm() -> None:
    layers, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    ours = copy.deepcopy(layers).to("sim")
    for model, inputs in ((layers, x), (ours, x.to("sim"))):
        model(inputs).square().mean().backward()
    for one, other in zip(ours.parameters(), layers.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    torch.testing.assert_close(ours.state_dict()["1.running_mean"].cpu(), layers.state_dict()["1.running_mean"])


def test_views_masks_and_outputs() -> None:
    x = torch.zeros(4, 4, device="sim")
    x.view(-1)[::2].fill_(1)
    x.T.mul_(2)
    out = torch.empty(0, device="sim")
    torch.cat([x, x], out=out)
    assert out.shape == (8, 4)
    x[x > 1] = 5
    assert x.sum().item() == 40
    assert x.nonzero().shape == (8, 2)


def test_generators_are_the_devices_own() -> None:
    host = torch.get_rng_state()
    generator = torch.Generator(device="sim").manual_seed(3)
    first = torch.randn(4, device="sim", generator=generator)
    assert torch.equal(first, torch.randn(4, device="sim", generator=generator.manual_seed(3)))
    state = torch.get_device_module("sim").get_rng_state()
    drawn = torch.rand(3, device="sim")
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.rand(3, device="sim")
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3, device="sim"))
    assert torch.equal(host, torch.get_rng_state())


def test_tensors_are_saved_and_loaded() -> None:
    layer, file = nn.Linear(2, 2).to("sim"), io.BytesIO()
    torch.save(layer.state_dict(), file)
    for where in ("cpu", "sim:1"):
        file.seek(0)
        weight = torch.load(file, map_location=where)["weight"]
        assert weight.device == torch.device(where)
        assert torch.equal(weight.cpu(), layer.weight.detach().cpu())


def test_peaks_of_memory_are_exact() -> None:
    torch.accelerator.reset_peak_memory_stats(0)
    before = torch.accelerator.memory_allocated(0)
    held = torch.zeros(1 << 20, device="sim")
    del held
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) == before + (4 << 20)
