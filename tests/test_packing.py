"""How parameters lie in leaves, and the rows that no leaf holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import AdamMCMC, FullData, Gaussian, Prior, Sampler, TensorExamples, Underdamped
from adammcmc.samplers.packing import Packing, padding_rows
from tests.optimizers import OPTIMIZERS, seeded

X = torch.randint(6, (40, 4), generator=seeded(1))
Y = torch.randint(3, (40,), generator=seeded(2))


class Words(nn.Module):
    """Row 2 of the embedding is padding, and not zero: its value enters the function."""

    def __init__(self, padding: int | None = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, padding_idx=padding)
        self.out = nn.Linear(3, 3)
        with torch.no_grad():
            self.table.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1).tanh())


def closure(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(X), Y)


class Laplace(Prior):
    """Of the whole tensors, held rows included."""

    def log_density(self, params: Any) -> Tensor:
        assert params[0].shape == (6, 3)
        return -sum(p.abs().sum(dtype=torch.float64) for p in params)  # type: ignore[return-value]


def test_rows_that_are_held_are_in_no_leaf() -> None:
    params = [nn.Parameter(torch.arange(12.0).reshape(4, 3)), nn.Parameter(torch.ones(2))]
    packing = Packing(params, ["a", "a"], {0: [2]})
    leaves = packing.pack([p.detach() for p in params], packing.current)
    assert leaves[0].tolist() == [[0, 1, 2, 3, 4, 5, 9, 10, 11, 1, 1]]
    assert packing.sizes == [9, 2]
    moved = (leaves[0] + 100,)
    assert torch.equal(packing.join([p.detach() for p in params])[0], leaves[0])
    assert packing.whole(moved, fill=7.0)[0][:, 0].tolist() == [100, 103, 7, 109]
    packing.write(moved)
    assert params[0][:, 0].tolist() == [100, 103, 6, 109]
    own = Packing(params, [None, "a"], {0: [0, 3]})  # a leaf of its own, several rows
    assert own.pack([p.detach() for p in params], own.current)[0].shape == (1, 2, 3)


def test_which_rows_are_padding() -> None:
    bag = nn.EmbeddingBag(5, 2, padding_idx=-1)
    model = nn.ModuleList([nn.Embedding(4, 2, padding_idx=1), nn.Embedding(4, 2), bag, nn.Linear(2, 2)])
    assert padding_rows(model.modules()) == {id(model[0].weight): {1}, id(bag.weight): {4}}
    tied = nn.Linear(2, 4, bias=False)
    tied.weight = model[0].weight  # which trains that row
    assert padding_rows([*model.modules(), tied]) == {id(bag.weight): {4}}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "AdamMCMC, not fused", "MALA, Laplace", "Underdamped, full data"])
def test_padding_rows_stay_as_they_are(name: str) -> None:
    """P = 6 * 3 - 3 + 12, every other weight moves, and a flat direction is not counted in the temperature."""
    model = Words()
    options: dict[str, Any] = {"fixed_data": True, "num_data": 40}
    if "not fused" in name:
        options["fused"] = False
    if "Laplace" in name:
        options["prior"] = Laplace()
    if "full data" in name:
        examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
        options |= {"fixed_data": False, "acceptance": FullData(), "examples": examples}
    sampler = OPTIMIZERS[name.split(",")[0]](model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(30):
        sampler.step(closure(model))
    assert torch.equal(model.table.weight[2], before[0][2])
    free = [0, 1, 3, 4, 5]
    assert (model.table.weight[free] != before[0][free]).all()
    assert (model.out.weight != before[1]).all()
    assert "P = 27 |" in sampler.describe()
    assert "padding rows held: parameter 0" in sampler.describe()
    assert sampler.health_state()["sizes"] == [15, 9, 3]


def test_the_other_rows_move_as_they_would_without_the_padding_row() -> None:
    """A chain with a held row is the chain of a model in which that row is a constant, bit for bit."""

    class Split(Words):
        def __init__(self) -> None:
            super().__init__()
            whole = self.table.weight.detach()
            self.rest = nn.Parameter(whole[[0, 1, 3, 4, 5]].clone())
            self.row = whole[2:3].clone()
            del self.table

        def forward(self, x: Tensor) -> Tensor:
            table = torch.cat([self.rest[:2], self.row, self.rest[2:]])
            return self.out(F.embedding(x, table).mean(1).tanh())

    model, split = Words().double(), Split().double()
    split.row = split.row.double()
    samplers = []
    for one, params in ((model, list(model.parameters())), (split, [split.rest, *split.out.parameters()])):
        sampler = Underdamped(params, 0.03, num_data=40, prior=Gaussian(), fixed_data=True, generator=seeded())
        if one is model:
            sampler.hold_padding(model)  # found at the first step, the random numbers would be others
        for _ in range(20):
            sampler.step(closure(one))
        samplers.append(sampler)
    torch.testing.assert_close(model.table.weight[[0, 1, 3, 4, 5]], split.rest, rtol=0, atol=1e-12)
    assert samplers[0].describe().replace(" | padding rows held: parameter 0", "") == samplers[1].describe()


def test_a_state_goes_on_bit_for_bit_and_fused_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words()

    def make(model: nn.Module) -> Sampler:
        return OPTIMIZERS["AdamMCMC"](model, fixed_data=True, num_data=40, burn_in=30)

    first = make(model)
    for _ in range(10):
        first.step(closure(model))
    other = copy.deepcopy(model)
    second = make(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(10):
        first.step(closure(model))
        second.step(closure(other))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    moments = torch.optim.Adam(model.parameters())
    closure(model)().backward()
    moments.step()
    make(model).load_state_dict(moments.state_dict())
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return  # Triton's interpreter, which the CPU needs, is off
    monkeypatch.setattr("adammcmc.samplers.sampler.FUSED_DEVICES", {"cpu"})
    fused = AdamMCMC(model.parameters(), num_data=40, sigma=0.01, fused=True)
    with pytest.raises(ValueError, match="padding rows"):
        fused.step(closure(model))


@pytest.mark.parametrize("stacked", [True, False])
def test_sample_holds_padding_rows(stacked: bool, tmp_path: Any) -> None:
    model, other = Words(), Words()
    with torch.no_grad():
        other.table.weight.add_(1.0)
    starts = [model.state_dict(), copy.deepcopy(other.state_dict())]
    run = partial(
        adammcmc.sample, train=(X, Y), loss=F.cross_entropy, burn_in=5, gap=5, num_chains=2, initial=starts, stacked=stacked,
        sampler=partial(Underdamped, step_size=0.05), path=tmp_path / "run", progress=False, resume=True,
    )  # fmt: skip
    run(model, num_draws=1)
    posterior = run(Words(), num_draws=3)
    assert "P = 27 |" in posterior.target
    assert "padding rows held: parameter 'table.weight'" in posterior.target
    for chain, start in enumerate(starts):
        for draw in posterior.chain(chain):
            assert torch.equal(draw["table.weight"][2], start["table.weight"][2])
            assert not torch.equal(draw["table.weight"][1], start["table.weight"][1])
