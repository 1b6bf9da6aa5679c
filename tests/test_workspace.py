"""The fast path is the pure kernel, bit for bit; blocks, packing and float64 sums under it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adammcmc.acceptance import Minibatch
from adammcmc.backends.workspace import Workspace
from adammcmc.kernels import AdamMCMCKernel
from adammcmc.kernels.direction import Adam, AdamMemory
from adammcmc.kernels.kernel import ChainState
from adammcmc.kernels.proposal import Prolate
from adammcmc.samplers.packing import Packing
from adammcmc.target.leaves import blocks, inner, select, standard_normal
from adammcmc.target.potential import Evaluation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1,), (17, 3), (524288,), (131073, 5), (524288 + 15, 30_001)])
def test_in_place_and_pure_propose_the_same_bits(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    params, grad, m1 = (tuple(torch.randn(1, n, dtype=dtype, generator=draw) for n in sizes) for _ in range(3))
    m2 = tuple(x.square() for x in standard_normal(params, draw))
    memory = AdamMemory(m1, m2, tuple(range(3, 3 + len(sizes))))
    options = [0.01] * len(sizes), [(0.9, 0.99)] * len(sizes), [1e-8] * len(sizes)
    parts = Adam(*options), Prolate([0.1 + i for i in range(len(sizes))], 1.5), Minibatch()
    here = Evaluation(torch.ones(1), torch.zeros(1), grad)
    generator, frozen_at = torch.Generator().manual_seed(9), torch.full((1,), -1)
    state = ChainState(params, memory, None, None, 0, frozen_at)
    expected, expected_memory = AdamMCMCKernel(*parts)._propose(params, here, state, generator)
    fresh = AdamMemory(tuple(x.clone() for x in m1), tuple(x.clone() for x in m2), memory.step)
    work = Workspace(tuple(map(torch.empty_like, params)))
    move, new_memory = work.propose(AdamMCMCKernel(*parts), params, here, fresh, torch.Generator().manual_seed(9), frozen_at)
    for a, b in zip(move.proposed, expected.proposed, strict=True):
        assert torch.equal(a, b)
    for field, other in zip(new_memory, expected_memory, strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(field, other, strict=True))
    assert torch.equal(parts[1].log_q_ratio(move), parts[1].log_q_ratio(expected))
    assert new_memory.exp_avg[0] is fresh.exp_avg[0], "in place"


@pytest.mark.parametrize("bad", ["grad", "loss", "prior"])
def test_what_is_not_finite_does_not_reach_the_moments_in_place(bad: str) -> None:
    params = (torch.zeros(1, 4),)
    memory = AdamMemory((torch.ones(1, 4),), (torch.ones(1, 4),), (1,))
    work = Workspace(tuple(map(torch.empty_like, params)))
    kernel = AdamMCMCKernel(Adam(0.1), Prolate(0.1), Minibatch())
    here = Evaluation(
        torch.tensor([torch.inf if bad == "loss" else 1.0]),
        torch.tensor([-torch.inf if bad == "prior" else 0.0]),
        (torch.tensor([[1.0, torch.nan if bad == "grad" else 1.0, 0, 0]]),),
    )
    work.propose(kernel, params, here, memory, torch.Generator(), torch.full((1,), -1))
    assert torch.equal(memory.exp_avg[0], torch.ones(1, 4))


@pytest.mark.parametrize("length", [1, 15, 16, 524288, 524288 + 1, 524288 + 15, 524288 + 16, 1_400_000])
def test_blocks_cover_a_row_once_and_draw_its_numbers(length: int) -> None:
    cuts = blocks(length)
    assert [i for s in cuts for i in (s.start, s.stop)] == [0, *(x for s in cuts[1:] for x in (s.start, s.start)), length]
    one, many = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    whole = torch.randn(1, length, generator=one)
    parts = [torch.randn(1, s.stop - s.start, generator=many) for s in cuts]
    assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize("chains", [1, 3])
def test_inner_products_are_accumulated_in_float64(chains: int) -> None:
    """1 + 1e-8 * 300,000: a float32 sum would lose most of it."""
    a = torch.full((chains, 300_001), 1e-4)
    a[:, 0] = 1.0
    expected = 1 + 300_000 * float(torch.tensor(1e-4).double() ** 2)
    torch.testing.assert_close(inner(a, a), torch.full((chains,), expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_select_chooses_by_chain() -> None:
    yes, no = (torch.ones(3, 2),), (torch.zeros(3, 2),)
    assert select(torch.tensor([True, False, True]), yes, no)[0][:, 0].tolist() == [1, 0, 1]
    assert select(torch.tensor([True] * 3), yes, no) is yes
    assert select(torch.tensor([False] * 3), yes, no) is no


def test_packing_puts_values_where_they_belong_and_back() -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (400, 100), (), (5,))]
    params.append(nn.Parameter(torch.randn(4, dtype=torch.float64)))
    packing = Packing(params, ["a", "a", "b", "a", "a"])
    assert packing.members == [[0, 3], [1], [2], [4]], "by label and dtype, the large one alone"
    leaves = packing.pack([p.detach() for p in params], packing.current)
    assert [tuple(x.shape) for x in leaves] == [(1, 11), (1, 400, 100), (1, 1), (1, 4)]
    joined = packing.views(packing.join([p.detach() for p in params]))
    for view, p, other in zip(packing.views(leaves), params, joined, strict=True):
        assert torch.equal(view, p)
        assert torch.equal(other, p)
    pointers = [p.data_ptr() for p in params]
    packing.write(tuple(x + 1 for x in leaves))
    for view, p in zip(packing.views(leaves), params, strict=True):
        assert torch.equal(view + 1, p.detach())
    assert pointers == [p.data_ptr() for p in params]


def test_packing_handles_other_memory_layouts() -> None:
    p = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    packing = Packing([p], ["a"])
    packing.write(tuple(2 * x for x in packing.pack([p.detach()], packing.current)))
    assert p.is_contiguous(memory_format=torch.channels_last)


def test_noise_drawn_ahead_is_the_noise_drawn_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for cores in (1, 64):  # none free, many free
        monkeypatch.setattr("adammcmc.backends.workspace._num_cores", lambda cores=cores: cores)
        params = torch.zeros(1, 100_003), torch.zeros(1, 7)
        work, kernel = Workspace(params), AdamMCMCKernel(Adam(0.1), Prolate(0.1), Minibatch())
        generator = torch.Generator().manual_seed(4)
        here = Evaluation(torch.ones(1), torch.zeros(1), tuple(torch.ones_like(x) for x in params))
        with work.ahead(generator):
            move, _ = work.propose(kernel, params, here, kernel.first_memory(params), generator, torch.full((1,), -1))
        results.append((move.along, *(x.clone() for x in move.noise), generator.get_state()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_error_in_the_loss_leaves_nobody_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.backends.workspace._num_cores", lambda: 64)
    work = Workspace((torch.zeros(1, 1_000_000),))
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(KeyError), work.ahead(generator):
        raise KeyError
    before = generator.get_state()
    assert torch.equal(before, generator.get_state())
    assert work._drawing is None
