"""What a network sees of a jet: the seven numbers by hand, and jets as training data."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adammcmc
from adammcmc.jets import Cloud, JetData, Jets, ParticleNetLite, bundled, cloud_of, padded_inputs, read_jets
from adammcmc.jets.features import FEATURES, cloud_bytes, features

JETS = read_jets(bundled("jets"), max_jets=64)
SAMPLER = partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=1.0)
SHORT: dict[str, Any] = {"num_draws": 3, "gap": 2, "burn_in": 2, "progress": False}


def assert_same(a: Cloud, b: Cloud) -> None:
    for name, x, y in zip(Cloud._fields, a, b, strict=True):
        assert torch.equal(x, y), name


def network() -> ParticleNetLite:
    """With statistics of its BatchNorm that fit the jets, in evaluation mode."""
    torch.manual_seed(0)
    net = ParticleNetLite()
    net(cloud_of(JETS))
    return net.eval()


# --- the seven numbers ----------------------------------------------------------------------------------------------------


def test_the_features_are_the_papers() -> None:
    """pT = 20, E = 50 at (0.3, -0.4), of a jet with pT = 600 and E = 900."""
    found = features(torch.tensor([[20.0, 0.3, -0.4, 50.0]]), torch.tensor([[600.0, 1.0, 2.0, 170.0, 900.0]]))
    by_hand = [
        (2.995732 - 1.7) * 0.7,  # log 20
        (3.912023 - 2.0) * 0.7,  # log 50
        (-3.401197 + 4.7) * 0.7,  # log 20 / 600
        (-2.890372 + 4.7) * 0.7,  # log 50 / 900
        (0.5 - 0.2) * 4.0,
        0.3,
        -0.4,
    ]
    assert len(FEATURES) == len(by_hand)
    torch.testing.assert_close(found, torch.tensor([by_hand]), atol=1e-5, rtol=0)


def test_the_features_are_clipped_at_five() -> None:
    far = torch.tensor([[1e-9, 6.0, -7.0, 1e9]])
    found = dict(zip(FEATURES, features(far, torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]]))[0].tolist(), strict=True))
    assert found == {"log_pt": -5, "log_e": 5, "log_pt_rel": -5, "log_e_rel": 5, "dr": 5, "deta": 5, "dphi": -5}


def test_every_jet_has_features_by_a_slow_loop() -> None:
    cloud, row = cloud_of(JETS[:5]), 0
    for jet, count in zip(JETS.jet[:5].tolist(), JETS.counts[:5].tolist(), strict=True):
        for _ in range(count):
            pt, deta, dphi, energy = JETS.particles[row].tolist()
            expected = [
                0.7 * (math.log(pt) - 1.7),
                0.7 * (math.log(energy) - 2.0),
                0.7 * (math.log(pt / jet[0]) + 4.7),
                0.7 * (math.log(energy / jet[4]) + 4.7),
                4 * (math.hypot(deta, dphi) - 0.2),
                deta,
                dphi,
            ]
            expected = [min(5.0, max(-5.0, value)) for value in expected]
            torch.testing.assert_close(cloud.features[row], torch.tensor(expected), atol=1e-5, rtol=1e-5)
            assert cloud.points[row].tolist() == JETS.particles[row, 1:3].tolist()
            row += 1
    assert row == len(cloud.features)


def big_jets() -> Jets:
    """One of 150 particles, one of 5; pT falls from particle to particle."""
    pt = torch.linspace(100, 1, 150)
    particles = torch.stack([pt, 0.3 * (7 * pt).sin(), 0.3 * (5 * pt).cos(), 1.5 * pt], 1)
    jet = torch.tensor([[600.0, 0.0, 0.0, 100.0, 700.0]]).repeat(2, 1)
    return Jets(torch.tensor([150, 5]), torch.cat([particles, particles[:5]]), jet, torch.tensor([0, 1]))


def test_the_128_hardest_particles_are_used() -> None:
    jets = big_jets()
    cloud = cloud_of(jets)
    assert cloud.counts.tolist() == [128, 5]
    assert torch.equal(cloud.points[:128], jets.particles[:128, 1:3])
    assert int(cloud.neighbours[:128].max()) < 128
    assert cloud_of(jets, max_particles=40).counts.tolist() == [40, 5]


def test_padded_inputs_are_the_cloud_in_a_rectangle() -> None:
    jets = big_jets()
    points, seen, mask = padded_inputs(jets)
    cloud = cloud_of(jets)
    assert (points.shape, seen.shape, mask.shape) == ((2, 2, 128), (2, 7, 128), (2, 1, 128))
    assert mask.sum(2).flatten().tolist() == [128, 5]
    assert torch.equal(points[0].T, cloud.points[:128])
    assert torch.equal(seen[1, :, :5].T, cloud.features[128:])
    assert torch.equal(points[1, :, :5].T, cloud.points[128:])
    assert not seen[1, :, 5:].any()
    assert not points[1, :, 5:].any()


def test_the_size_of_a_cloud_is_known_before_it_is_made() -> None:
    cloud = cloud_of(JETS, num_neighbours=7)
    size = sum(x.numel() * x.element_size() for x in cloud) + 8 * len(JETS)  # and the labels
    assert cloud_bytes(JETS, 7) == size


def test_a_large_set_of_jets_is_a_cloud_like_a_small_one() -> None:
    """The first graph is made piece by piece: 4,096 jets and some more."""
    many = JETS[torch.arange(4200) % len(JETS)]
    cloud = cloud_of(many)
    assert_same(cloud.part(slice(4095, 4098)), cloud_of(many[4095:4098]))
    assert len(cloud.neighbours) == len(cloud.points)


# --- as training data -------------------------------------------------------------------------------------------------


def numbered() -> JetData:
    """Labels that say which jet it is."""
    return JetData(JETS, 10, labels=torch.arange(64))


def take(data: JetData, batches: int) -> list[Tensor]:
    return [next(data)[1] for _ in range(batches)]


def test_an_epoch_serves_every_jet_once() -> None:
    data = JetData(JETS, 16, labels=torch.arange(64))
    for _ in range(3):
        assert torch.cat(take(data, data.num_batches)).sort().values.tolist() == list(range(64))


def test_a_batch_is_the_cloud_of_its_jets() -> None:
    data = numbered()
    for _ in range(8):  # over the end of an epoch
        cloud, numbers = next(data)
        assert_same(cloud, cloud_of(JETS[numbers]))


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    data = numbered()
    first = take(data, 12)
    torch.manual_seed(123)
    data.restart(0)
    assert all(torch.equal(a, b) for a, b in zip(take(data, 12), first, strict=True))
    assert not torch.equal(torch.cat(first[:6]), torch.cat(first[6:]))  # another epoch
    data.restart(1)
    assert not torch.equal(torch.cat(take(data, 6)), torch.cat(first[:6]))  # another seed


@pytest.mark.parametrize("position", [0, 1, 5, 6, 9])
def test_loaded_data_go_on_with_the_very_next_batch(position: int) -> None:
    data = numbered()
    data.restart(7)
    take(data, position)
    state = data.state_dict()
    expected = [next(data) for _ in range(8)]
    other = numbered()
    take(other, 3)
    other.load_state_dict(state)
    for (cloud, numbers), (cloud_then, numbers_then) in zip((next(other) for _ in range(8)), expected, strict=True):
        assert torch.equal(numbers, numbers_then)
        assert_same(cloud, cloud_then)


@pytest.mark.parametrize("indices", [torch.tensor([5, 0, 63, 5]), slice(3, 9), slice(60, 100), slice(None)])
def test_fetched_jets_are_the_cloud_of_those(indices: slice | Tensor) -> None:
    cloud, labels = JetData(JETS, 8).fetch(indices)
    assert_same(cloud, cloud_of(JETS[indices]))
    assert torch.equal(labels, JETS.kind[indices])


def test_in_order_serves_all_jets_in_theirs() -> None:
    parts = list(numbered().in_order(25))
    assert [len(numbers) for _, numbers in parts] == [25, 25, 14]
    for cloud, numbers in parts:
        assert_same(cloud, cloud_of(JETS[numbers]))
    assert torch.equal(torch.cat([numbers for _, numbers in parts]), torch.arange(64))


def test_a_full_batch_is_all_jets_in_their_order() -> None:
    data = JetData(JETS)
    assert (data.batch_size, data.num_batches) == (64, 1)
    for _ in range(2):
        cloud, labels = next(data)
        assert_same(cloud, cloud_of(JETS))
        assert torch.equal(labels, JETS.kind)


def test_other_jets_have_another_fingerprint() -> None:
    assert JetData(JETS, 8).fingerprint() == JetData(JETS, 16).fingerprint()
    changed = JETS[:]
    changed.particles[0, 0] *= 1.01
    assert JetData(changed, 8).fingerprint() != JetData(JETS, 8).fingerprint()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: JetData(JETS, labels=torch.zeros(3)), "64 jets need as many labels, got 3"),
        (lambda: JetData(JETS, 0), "`batch_size` must be a positive integer, got 0"),
        (lambda: JetData(JETS, 8).load_state_dict(JetData(JETS, 4).state_dict()), "batches of 4, .* batches of 8"),
    ],
)
def test_wrong_arguments_are_told_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_no_jets_are_told_of() -> None:
    with pytest.raises(ValueError, match=r"data set is empty|no jets"):
        JetData(JETS[:0])


def test_more_particles_than_a_graph_can_number_are_refused() -> None:
    """Places are bytes: particle 300 would be taken for particle 44."""
    jets = big_jets()
    many = Jets(torch.tensor([300, 5]), torch.cat([jets.particles[:150]] * 2 + [jets.particles[:5]]), jets.jet, jets.kind)
    with pytest.raises(ValueError, match="255"):
        cloud_of(many, max_particles=300)


# --- through the library ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jets_are_sampled_and_predicted() -> None:
    net = network()
    posterior = adammcmc.sample(net, JetData(JETS, 16, num_neighbours=7), F.cross_entropy, sampler=SAMPLER, **SHORT)
    assert len(posterior) == 3
    assert "n = 64" in posterior.target
    whole = posterior.predict(JetData(JETS, num_neighbours=7), raw=True, progress=False)
    parts = posterior.predict(JetData(JETS, num_neighbours=7), batch_size=7, raw=True, progress=False)
    assert torch.equal(whole.targets, JETS.kind)
    assert whole.raw is not None
    for name in ("raw", "mean", "spread", "mutual_information"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=2e-6, rtol=1e-4)
    for draw, row in zip(posterior, whole.raw, strict=True):
        net.load_state_dict(draw)
        with torch.no_grad():
            torch.testing.assert_close(row, net(cloud_of(JETS)).softmax(1), atol=2e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_whole_data_set_can_decide() -> None:
    """FullData needs the losses of single jets, in chunks."""
    sampler = partial(SAMPLER, acceptance=adammcmc.FullData(chunk_size=20))
    posterior = adammcmc.sample(network(), JetData(JETS, 16, num_neighbours=7), F.cross_entropy, sampler=sampler, **SHORT)
    assert len(posterior) == 3
    assert posterior.trace("loss").isfinite().all()
