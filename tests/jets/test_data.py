"""Jets in memory: packed particles are what a slow loop over jets says, and momenta and codes come back as they were."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from adammcmc.jets import KINDS, Jets, bundled, jets_from_p4, read_jets
from adammcmc.jets.data import ANGLE_SCALE, LOG_PT_SCALE, wrapped

JETS = read_jets(bundled("others"), max_jets=60)


def each(jets: Jets) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """The jets one by one: particles, jet, kind. The slow way, with sums of Python."""
    parts, start = [], 0
    for i, count in enumerate(jets.counts.tolist()):
        parts.append((jets.particles[start : start + count], jets.jet[i], int(jets.kind[i])))
        start += count
    return parts


def same(a: list[tuple[torch.Tensor, torch.Tensor, int]], b: list[tuple[torch.Tensor, torch.Tensor, int]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(p, q) and torch.equal(j, k) and s == t for (p, j, s), (q, k, t) in zip(a, b, strict=True)
    )


def equal(a: Jets, b: Jets) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("counts", "particles", "jet", "kind"))


def made_up(*pt_eta_phi: tuple[float, float, float], kind: int = 0) -> Jets:
    """One jet of massless particles."""
    pt, eta, phi = torch.tensor(pt_eta_phi, dtype=torch.float64).T
    p4 = torch.stack([pt * eta.cosh(), pt * phi.cos(), pt * phi.sin(), pt * eta.sinh()], 1)
    return jets_from_p4(p4[None], torch.tensor([kind]))


CHOICES: dict[str, Any] = {
    "slice": slice(5, 40, 3),
    "slice from the end": slice(-7, None),
    "empty slice": slice(9, 9),
    "beyond the end": slice(50, 1000),
    "mask": torch.arange(60) % 7 == 2,
    "array mask": np.arange(60) % 5 == 1,
    "numbers": torch.tensor([3, 3, 59, 0, 17]),
    "list": [8, 2, 2],
    "numbers from the end": [-1, 4, -2, -60],
    "no numbers": [],
}


@pytest.mark.parametrize("name", CHOICES)
def test_indexing_is_what_a_loop_over_jets_gives(name: str) -> None:
    chosen = CHOICES[name]
    numbers = np.arange(60)[chosen if isinstance(chosen, slice) else np.asarray(chosen, None if len(chosen) else int)]
    slow = each(JETS)
    assert same(each(JETS[chosen]), [slow[i] for i in numbers])


def test_numbers_from_the_end_are_not_silently_other_jets() -> None:
    # the jet before the last has fewer particles than the last: they could all be taken from that one
    jets = Jets(torch.tensor([1, 2]), torch.arange(12.0).reshape(3, 4), torch.ones(2, 5), torch.tensor([0, 1]))
    assert jets[[-2]].particles.tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_jets_without_particles_stay_in_their_place() -> None:
    counts = torch.tensor([0, 2, 0, 0, 1, 0])
    jets = Jets(counts, torch.arange(12.0).reshape(3, 4), torch.arange(30.0).reshape(6, 5), torch.arange(6))
    assert jets.owner.tolist() == [1, 1, 4]
    assert jets.rank.tolist() == [0, 1, 0]
    slow = each(jets)
    assert same(each(jets[[5, 4, 0, 1]]), [slow[i] for i in (5, 4, 0, 1)])


def test_offsets_owner_and_rank_are_those_of_a_loop() -> None:
    owner = [i for i, count in enumerate(JETS.counts.tolist()) for _ in range(count)]
    rank = [k for count in JETS.counts.tolist() for k in range(count)]
    assert JETS.owner.tolist() == owner
    assert JETS.rank.tolist() == rank
    assert JETS.offsets.tolist() == [sum(JETS.counts.tolist()[:i]) for i in range(61)]


def test_particles_are_ordered_by_pt() -> None:
    assert all((p[:, 0].diff() <= 0).all() for p, *_ in each(JETS))


@pytest.mark.parametrize("number", [1, 10, 1000])
def test_leading_keeps_the_hardest_and_the_jet_as_it_was(number: int) -> None:
    assert same(each(JETS.leading(number)), [(p[:number], j, k) for p, j, k in each(JETS)])


@pytest.mark.parametrize("names", [("top",), ("gluon", "w"), tuple(KINDS)])
def test_of_kind_takes_these_kinds_in_their_order(names: tuple[str, ...]) -> None:
    numbers = [KINDS.index(name) for name in names]
    assert same(each(JETS.of_kind(*names)), [jet for jet in each(JETS) if jet[2] in numbers])
    assert len(JETS.of_kind(*names)) > 0


def test_cat_puts_one_set_behind_another() -> None:
    parts = [JETS[:3], JETS[3:3], JETS[40:], JETS[3:40]]
    assert same(each(Jets.cat(parts)), each(JETS[:3]) + each(JETS[40:]) + each(JETS[3:40]))
    assert equal(Jets.cat(part for part in (JETS[:9], JETS[9:])), JETS)


def test_shuffled_is_a_permutation_that_the_seed_fixes() -> None:
    mixed = JETS.shuffled(3)
    assert equal(mixed, JETS.shuffled(3))
    assert not equal(mixed, JETS.shuffled(4))
    # no two of these jets have the same pT, so that it names them
    order = [JETS.jet[:, 0].tolist().index(pt) for pt in mixed.jet[:, 0].tolist()]
    assert sorted(order) == list(range(60))
    assert order != list(range(60))
    assert equal(mixed, JETS[order])


@pytest.mark.parametrize("width", [None, 7, 150])
def test_padded_holds_the_particles_then_zeros(width: int | None) -> None:
    full, mask = JETS.padded(width)
    assert full.shape == (60, width or int(JETS.counts.max()), 4)
    for row, real, (particles, *_) in zip(full, mask, each(JETS), strict=True):
        kept = particles[: len(row)]
        assert torch.equal(row[: len(kept)], kept)
        assert real.tolist() == [True] * len(kept) + [False] * (len(row) - len(kept))
        assert not row[len(kept) :].any()


def test_no_jets_pad_to_an_empty_rectangle() -> None:
    assert JETS[:0].padded(5)[0].shape == (0, 5, 4)
    assert JETS[:0].padded()[1].shape == (0, 0)


def test_momenta_are_those_of_the_particles() -> None:
    p4 = JETS.p4(20)
    for row, (particles, jet, _) in zip(p4, each(JETS), strict=True):
        pt, deta, dphi, energy = particles[0].tolist()
        eta, phi = deta + float(jet[1]), dphi + float(jet[2])
        wanted = [energy, pt * math.cos(phi), pt * math.sin(phi), pt * math.sinh(eta)]
        assert row[0].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-4)
        assert not row[len(particles) :].any()


def test_momenta_give_the_particles_back() -> None:
    # the jets' own momenta are given, since a sum of rounded particles has another axis
    pt, eta, phi, _, energy = JETS.jet.double().unbind(1)
    jet = torch.stack([energy, pt * phi.cos(), pt * phi.sin(), pt * eta.sinh()], 1)
    back = jets_from_p4(JETS.p4(), JETS.kind, jet)
    assert torch.equal(back.counts, JETS.counts)
    assert torch.equal(back.kind, JETS.kind)
    assert torch.allclose(back.particles, JETS.particles, rtol=1e-5, atol=2e-6)
    assert torch.allclose(back.jet, JETS.jet, rtol=1e-4, atol=1e-2)
    # and without: the axis is that of the sum, the particles lie around it
    again = jets_from_p4(JETS.p4(), JETS.kind)
    assert torch.equal(again.counts, JETS.counts)
    assert torch.allclose(again.p4(), JETS.p4(), rtol=1e-5, atol=1e-3)
    assert torch.allclose(again.particles, JETS.particles, rtol=1e-5, atol=1e-3)


def test_the_order_and_the_zeros_of_the_rows_do_not_matter() -> None:
    p4 = JETS.p4(160)  # wider than any of the jets: zeros everywhere between
    assert int(JETS.counts.max()) < 160
    mixed = p4[:, torch.randperm(160, generator=torch.Generator().manual_seed(0))]
    a, b = jets_from_p4(p4, JETS.kind), jets_from_p4(mixed, JETS.kind)
    assert torch.equal(a.counts, b.counts)
    assert torch.equal(a.particles[:, 0], b.particles[:, 0])
    assert torch.allclose(a.p4().sum(1), b.p4().sum(1))
    assert torch.allclose(a.jet, b.jet)


def test_a_massive_particle_keeps_its_energy() -> None:
    jet = jets_from_p4(torch.tensor([[[13.0, 3.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]), torch.tensor([2]))
    assert jet.particles.tolist() == [[5.0, 0.0, 0.0, 13.0]]
    assert jet.jet[0].tolist() == pytest.approx([5.0, 0.0, math.atan2(4, 3), 12.0, 13.0])


@pytest.mark.parametrize("axis", [math.pi, -math.pi, 0.0, 3.0])
def test_angles_do_not_jump_at_pi(axis: float) -> None:
    jet = made_up((50.0, 0.3, axis + 0.1), (50.0, 0.5, axis - 0.1))
    assert sorted(jet.particles[:, 2].tolist()) == pytest.approx([-0.1, 0.1], abs=1e-6)
    assert math.cos(float(jet.jet[0, 2]) - axis) == pytest.approx(1.0)
    # mass of two massless particles, from the angles alone
    assert float(jet.jet[0, 3]) == pytest.approx(math.sqrt(2 * 50 * 50 * (math.cosh(0.2) - math.cos(0.2))), rel=1e-5)


def test_wrapped_is_the_same_angle_between_minus_pi_and_pi() -> None:
    angle = torch.linspace(-20, 20, 999, dtype=torch.float64)
    assert wrapped(angle).abs().max() <= math.pi
    assert torch.allclose(wrapped(angle).sin(), angle.sin())
    assert torch.allclose(wrapped(angle).cos(), angle.cos())


def raw() -> Jets:
    """Jets that never went through the code: with all digits."""
    generator = torch.Generator().manual_seed(0)
    pt = torch.empty(30, 12).exponential_(0.1, generator=generator).double() + 1e-3
    eta, phi = (0.5 * torch.randn(30, 12, generator=generator).double() + shift for shift in (1.0, 3.0))
    p4 = torch.stack([pt * eta.cosh(), pt * phi.cos(), pt * phi.sin(), pt * eta.sinh()], -1)
    return jets_from_p4(p4, torch.arange(30) % 9 - 1)


def test_the_code_is_half_a_step_away_at_most() -> None:
    jets = raw()
    back = Jets.decode(jets.encode())
    step = 0.5 * (1 + 1e-3)  # float32 has steps of its own
    a, b = jets.particles.double(), back.particles.double()
    assert ((a[:, 0] / b[:, 0]).log().abs() * LOG_PT_SCALE).max() <= step
    assert ((a[:, 1:3] - b[:, 1:3]).abs() * ANGLE_SCALE).max() <= step
    assert torch.allclose(a[:, 3], b[:, 3], rtol=3e-4)  # massless, as ours are
    for name in ("counts", "jet", "kind"):
        assert torch.equal(getattr(jets, name), getattr(back, name)), name
    assert not torch.equal(a, b)


def test_a_second_round_of_the_code_changes_nothing() -> None:
    once = Jets.decode(raw().encode())
    code, again = once.encode(), Jets.decode(once.encode()).encode()
    assert equal(Jets.decode(code), once)
    assert code.keys() == again.keys()
    assert all(np.array_equal(code[name], again[name]) and code[name].dtype == again[name].dtype for name in code)


def test_the_code_holds_more_than_255_particles() -> None:
    jet = Jets(torch.tensor([300, 1]), torch.rand(301, 4) + 0.1, torch.zeros(2, 5), torch.tensor([1, -1]))
    assert Jets.decode(jet.encode()).counts.tolist() == [300, 1]
    assert Jets.decode(jet.encode()).kind.tolist() == [1, -1]


def test_no_jets_have_a_code_too() -> None:
    assert len(Jets.decode(JETS[:0].encode())) == 0


@pytest.mark.parametrize(("column", "name"), [(1, "delta eta"), (2, "delta phi")])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_too_wide_angle_is_refused_and_the_widest_is_not(column: int, name: str, sign: int) -> None:
    jets = JETS[:2]
    jets.particles[3, column] = sign * 3.2766
    assert Jets.decode(jets.encode()).particles[3, column].item() == pytest.approx(sign * 3.2766, abs=1e-4)
    jets.particles[3, column] = sign * 3.3
    with pytest.raises(ValueError, match=rf"3\.30 from its jet axis in {name}"):
        jets.encode()


@pytest.mark.parametrize("pt", [1e-6, 1e5, 0.0])
def test_a_pt_outside_the_code_is_refused_and_not_another_pt(pt: float) -> None:
    jets = JETS[:2]
    jets.particles[3, 0] = pt
    with pytest.raises(ValueError, match="pT"):
        jets.encode()


def test_the_text_names_what_is_there() -> None:
    jets = Jets(torch.tensor([1, 2, 3]), torch.ones(6, 4), torch.ones(3, 5), torch.tensor([1, 1, -1]))
    assert repr(jets) == "<Jets: 3 (2 top, 1 unknown), 2.0 particles on average>"


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "too few particles": ((4, 4), (2, 5), (2,), r"5 particles need `particles` of shape \(5, 4\).*\(4, 4\)"),
    "too few columns": ((5, 3), (2, 5), (2,), r"\(5, 3\)"),
    "jets": ((5, 4), (3, 5), (2,), r"2 jets.*`jet` of \(2, 5\).*\(3, 5\)"),
    "columns of jets": ((5, 4), (2, 4), (2,), r"\(2, 4\)"),
    "kinds": ((5, 4), (2, 5), (1,), r"`kind` of \(2,\).*\(1,\)"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_wrong_shapes_are_told(case: str) -> None:
    particles, jet, kind, message = SHAPES[case]
    with pytest.raises(ValueError, match=message):
        Jets(torch.tensor([2, 3]), torch.ones(particles), torch.ones(jet), torch.ones(kind, dtype=torch.int64))


def test_wrong_requests_are_told() -> None:
    with pytest.raises(ValueError, match=r"no kind of jet 'tau'\. Known: qcd, top"):
        JETS.of_kind("top", "tau")
    with pytest.raises(ValueError, match="`num_particles` must be positive, got 0"):
        JETS.leading(0)
    with pytest.raises(ValueError, match="no jets to concatenate"):
        Jets.cat([])
    with pytest.raises(ValueError, match=r"`p4` must be .*\(59,\)"):
        jets_from_p4(JETS.p4(), torch.zeros(59))
    with pytest.raises(IndexError):
        JETS[[60]]


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 5), (3, 2, 3)])
def test_momenta_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`p4`.*\(3, "):
        jets_from_p4(torch.ones(shape), torch.zeros(3))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises((IndexError, ValueError)):
        JETS[torch.ones(10, dtype=torch.bool)]
