"""ParticleNet: weaver-core's numbers to the last digits, packed and padded one function, first principles by slow loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weaver.nn.model.ParticleNet import ParticleNet as Weaver

from adammcmc import AdamMCMC, Gaussian, sample
from adammcmc.jets import Cloud, JetData, Jets, ParticleNet, ParticleNetLite, cloud_of, padded_inputs
from adammcmc.jets.data import Rows
from adammcmc.jets.particlenet import NOBODY, nearest
from adammcmc.target.batches import joined_batches

EXACT: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-9}
# fewer particles than neighbours, just as many, one and two more; many; all 128 places
COUNTS = [1, 3, 10, 15, 16, 17, 18, 40, 5, 128, 2, 64]
SHAPES: dict[str, tuple[Callable[..., ParticleNet], list[Any], list[Any]]] = {
    "ParticleNet": (ParticleNet, [(16, (64, 64, 64)), (16, (128, 128, 128)), (16, (256, 256, 256))], [(256, 0.1)]),
    "Lite": (ParticleNetLite, [(7, (32, 32, 32)), (7, (64, 64, 64))], [(128, 0.1)]),
}


def made_up(counts: list[int], seed: int = 0) -> Jets:
    """Jets of so many particles, with the numbers of real ones in size."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    pt = torch.rand(total, generator=generator).mul(5).exp()
    pt = pt[(owner * 1e6 - pt).argsort()]  # the hardest of each jet first
    deta, dphi = 0.2 * torch.randn(2, total, generator=generator)
    jet = torch.tensor([600.0, 0.5, 1.0, 100.0, 700.0]).repeat(len(counts), 1)
    particles = torch.stack([pt, deta, dphi, pt * (deta + 0.5).cosh()], 1)
    return Jets(torch.tensor(counts), particles, jet, torch.arange(len(counts)) % 2)


def in_double(cloud: Cloud) -> Cloud:
    return cloud._replace(points=cloud.points.double(), features=cloud.features.double())


def both(jets: Jets, k: int = 16) -> tuple[Cloud, tuple[Tensor, Tensor, Tensor]]:
    """The same jets packed and padded, in float64."""
    points, features, mask = padded_inputs(jets)
    return in_double(cloud_of(jets, num_neighbours=k)), (points.double(), features.double(), mask)


def lived_in(net: nn.Module, seed: int = 3) -> nn.Module:
    """BatchNorm as after a training: neither its statistics nor its weights are the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            for tensor, low, high in (
                (module.running_mean, -0.3, 0.3),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.3, 0.3),
            ):
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
    return net


def network(**settings: Any) -> ParticleNet:
    """A small one, lived in, in float64 and evaluation mode: three blocks, one of them without a shortcut of its own."""
    torch.manual_seed(0)
    settings = {"blocks": ((4, (8, 8, 8)), (5, (8, 6, 8)), (3, (12, 12, 12))), "hidden": 8} | settings
    net = ParticleNet(**settings)
    lived_in(net)
    return net.double().eval()


def gradients(net: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    net.zero_grad()
    logits = net(*inputs)
    F.cross_entropy(logits, torch.arange(len(logits)) % 2).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


# --- weaver-core's ------------------------------------------------------------------------------------------------------


def test_the_number_of_parameters_is_the_papers() -> None:
    assert sum(p.numel() for p in ParticleNet().parameters()) == 366_160
    assert sum(p.numel() for p in ParticleNetLite().parameters()) == 26_416


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_and_statistics_are_weavers(name: str, training: bool) -> None:
    ours, blocks, hidden = SHAPES[name]
    torch.manual_seed(0)
    theirs = Weaver(7, 2, blocks, hidden, use_fusion=False, trim=False).double()
    lived_in(theirs)
    net = ours().double()
    net.load_state_dict(theirs.state_dict(), strict=True)
    jets = made_up(COUNTS)
    assert int(jets.counts.max()) == 128
    points, features, mask = both(jets)[1]
    results = []
    for model in (theirs, net):
        model.train(training)
        torch.manual_seed(1)  # the dropout's
        # weaver-core asks its features whether to count the particles with gradient
        logits = model(points.clone(), features.clone().requires_grad_(), mask)
        F.cross_entropy(logits, jets.kind).backward()
        results.append((logits, {n: p.grad for n, p in model.named_parameters()}, model.state_dict()))
    (their_logits, their_gradients, their_state), (logits, our_gradients, state) = results
    torch.testing.assert_close(logits, their_logits, **EXACT)
    torch.testing.assert_close(our_gradients, their_gradients, **EXACT)
    torch.testing.assert_close(state, their_state, **EXACT)  # with the running statistics
    assert max(float(g.abs().max()) for g in our_gradients.values() if g is not None) > 1e-3


# --- packed and padded ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
def test_packed_is_padded_in_evaluation_mode(name: str) -> None:
    torch.manual_seed(0)
    net = SHAPES[name][0]().double().eval()
    lived_in(net)
    cloud, padded = both(made_up(COUNTS))
    torch.testing.assert_close(net(cloud), net(*padded), **EXACT)
    torch.testing.assert_close(gradients(net, cloud), gradients(net, *padded), **EXACT)


def test_packed_is_padded_for_particles_that_are_there_twice() -> None:
    jets = made_up([30, 6, 2, 20])
    for first, second in ((3, 4), (3, 5), (31, 33), (36, 37)):  # three of a kind in the first jet
        jets.particles[second] = jets.particles[first]
    cloud, padded = both(jets)
    net = network()
    torch.testing.assert_close(net(cloud), net(*padded), **EXACT)
    torch.testing.assert_close(gradients(net, cloud), gradients(net, *padded), **EXACT)


def test_a_jet_without_particles_has_an_answer() -> None:
    jets = made_up([5, 0, 12, 0])
    cloud, padded = both(jets)
    net = network()
    torch.testing.assert_close(net(cloud), net(*padded), **EXACT)
    torch.testing.assert_close(net(cloud)[[0, 2]], net(in_double(cloud_of(jets[[0, 2]]))), **EXACT)


def test_without_a_mask_all_particles_are_real() -> None:
    cloud, (points, features, mask) = both(made_up([128, 128]))
    assert mask.all()
    net = network()
    torch.testing.assert_close(net(points, features), net(cloud), **EXACT)


def test_what_lies_in_the_padding_does_not_matter_in_evaluation_mode() -> None:
    points, features, mask = both(made_up([20, 3, 1]))[1]
    net = network()
    junk = torch.randn(features.shape, dtype=features.dtype, generator=torch.Generator().manual_seed(0))
    other = net(points + junk[:, :2] * (1 - mask), features + junk * (1 - mask), mask)
    torch.testing.assert_close(other, net(points, features, mask), **EXACT)


def test_the_order_of_the_jets_does_not_matter() -> None:
    jets = made_up(COUNTS)
    order = torch.randperm(len(jets), generator=torch.Generator().manual_seed(0))
    for net in (network(), network(dropout=0.0).train()):
        torch.testing.assert_close(net(in_double(cloud_of(jets[order]))), net(in_double(cloud_of(jets)))[order], **EXACT)


def test_a_jet_more_does_not_change_the_others() -> None:
    jets = made_up(COUNTS)
    net = network()
    whole = net(in_double(cloud_of(jets)))
    for number in (1, 4, 11):
        torch.testing.assert_close(net(in_double(cloud_of(jets[:number]))), whole[:number], **EXACT)
        torch.testing.assert_close(net(in_double(cloud_of(jets[number:]))), whole[number:], **EXACT)
    assert whole.std(0).min() > 1e-3  # the jets are told apart at all


def test_the_order_of_the_particles_does_not_matter() -> None:
    jets = made_up([40, 9])
    order = torch.cat([torch.randperm(40, generator=torch.Generator().manual_seed(0)), 40 + torch.arange(9).flip(0)])
    turned = Jets(jets.counts, jets.particles[order], jets.jet, jets.kind)
    net = network()
    torch.testing.assert_close(net(in_double(cloud_of(turned))), net(in_double(cloud_of(jets))), **EXACT)


# --- from first principles ------------------------------------------------------------------------------------------------


def edges_by_hand(x: Tensor, cloud: Cloud, k: int, weight: Tensor) -> Tensor:
    """W [x_i, x_j - x_i], one edge at a time: (particles, k, channels)."""
    rows = []
    first = 0
    for count in cloud.counts.tolist():
        for i in range(first, first + count):
            for place in cloud.neighbours[i, :k].tolist():
                x_j = torch.zeros_like(x[i]) if place == NOBODY else x[first + place]
                rows.append(weight @ torch.cat([x[i], x_j - x[i]]))
        first += count
    return torch.stack(rows).view(len(x), k, -1)


def watched(module: nn.Module) -> list[Tensor]:
    """What goes into a module, call after call."""
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    return seen


@pytest.mark.parametrize("training", [False, True])
def test_the_first_block_is_the_edge_formula(training: bool) -> None:
    """Its first layer edge by edge, BatchNorm's statistics over all edges of real particles, and the whole block."""
    cloud = in_double(cloud_of(made_up([1, 3, 12, 6])))
    net = network().train(training)
    block, k = net.edge_convs[0], 4
    before = [bn.running_mean.clone() for bn in block.bns], [bn.running_var.clone() for bn in block.bns]
    seen, entered, left = watched(block.bns[0]), watched(block), watched(net.edge_convs[1])
    net(cloud)

    x = entered[0]
    f = cloud.features
    if training:
        normed = (f - f.mean(0)) / (f.var(0, correction=0) + 1e-5).sqrt()
    else:
        normed = (f - net.bn_fts.running_mean) / (net.bn_fts.running_var + 1e-5).sqrt()
    torch.testing.assert_close(x, normed * net.bn_fts.weight + net.bn_fts.bias, **EXACT)

    edges = edges_by_hand(x, cloud, k, block.convs[0].weight.flatten(1))
    torch.testing.assert_close(seen[0].view_as(edges), edges, **EXACT)
    for i, bn in enumerate(block.bns):
        if i > 0:
            edges = torch.einsum("ab,pkb->pka", block.convs[i].weight.flatten(1), edges)
        flat = edges.flatten(0, 1)
        mean, var = (flat.mean(0), flat.var(0, correction=0)) if training else (before[0][i], before[1][i])
        if training:
            torch.testing.assert_close(bn.running_mean, 0.9 * before[0][i] + 0.1 * mean, **EXACT)
            torch.testing.assert_close(bn.running_var, 0.9 * before[1][i] + 0.1 * flat.var(0), **EXACT)
        else:
            assert torch.equal(bn.running_mean, before[0][i])
        edges = ((edges - mean) / (var + 1e-5).sqrt() * bn.weight + bn.bias).relu()
    shortcut = x @ block.sc.weight.flatten(1).T
    mean, var = (
        (shortcut.mean(0), shortcut.var(0, correction=0)) if training else (block.sc_bn.running_mean, block.sc_bn.running_var)
    )
    shortcut = (shortcut - mean) / (var + 1e-5).sqrt() * block.sc_bn.weight + block.sc_bn.bias
    torch.testing.assert_close(left[0], (shortcut + edges.mean(1)).relu(), **EXACT)


def test_later_graphs_are_in_the_space_of_features() -> None:
    cloud = in_double(cloud_of(made_up([9, 2, 14])))
    net = network()
    x, seen = watched(net.edge_convs[1]), watched(net.edge_convs[1].bns[0])
    net(cloud)
    where = Rows.of(cloud.counts, len(cloud.points))
    graph = cloud._replace(neighbours=nearest_by_hand(x[0], where, 5))
    expected = edges_by_hand(x[0], graph, 5, net.edge_convs[1].convs[0].weight.flatten(1))
    # equally good as sets: the block takes the mean over them
    torch.testing.assert_close(seen[0].view_as(expected).sum(1), expected.sum(1), **EXACT)


def nearest_by_hand(x: Tensor, where: Rows, k: int) -> Tensor:
    rows = []
    for i in range(len(x)):
        first, count = int(where.first[where.owner[i]]), int(where.counts[where.owner[i]])
        others = [j for j in range(count) if first + j != i]
        others.sort(key=lambda j: float((x[first + j] - x[i]).square().sum()))
        rows.append((others + [NOBODY] * k)[:k])
    return torch.tensor(rows, dtype=torch.uint8)


@pytest.mark.parametrize("channels", [2, 9])
def test_nearest_is_the_slow_search(channels: int) -> None:
    counts = torch.tensor([1, 2, 30, 7, 8, 9, 1])
    x = torch.randn(int(counts.sum()), channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    where = Rows.of(counts, len(x))
    found = nearest(x, where, 7, 40)
    assert found.dtype == torch.uint8
    assert torch.equal(found, nearest_by_hand(x, where, 7))
    assert (found == NOBODY).sum() == 7 + 2 * 6 + 7 + 7 * 1  # of jets of 1, 2, 1 and 7 particles


# --- clouds -----------------------------------------------------------------------------------------------------------


def assert_same(a: Cloud, b: Cloud) -> None:
    for name, x, y in zip(Cloud._fields, a, b, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("rows", [slice(0, 3), slice(2, 5), slice(4, None), slice(-2, None), slice(3, 3), slice(None)])
def test_a_part_of_a_cloud_is_the_cloud_of_a_part(rows: slice) -> None:
    jets = made_up([4, 1, 20, 7, 18, 3])
    part = cloud_of(jets).part(rows)
    if len(jets[rows]):
        assert_same(part, cloud_of(jets[rows]))
    assert [len(x) for x in part] == [len(jets[rows]), *[int(jets[rows].counts.sum())] * 3]


def test_clouds_are_joined_like_their_jets() -> None:
    jets = made_up([4, 1, 20, 7, 18, 3])
    joined = joined_batches([cloud_of(jets[:1]), cloud_of(jets[1:4]), cloud_of(jets[4:])])
    assert isinstance(joined, Cloud)
    assert_same(joined, cloud_of(jets))


# --- faster ways ------------------------------------------------------------------------------------------------------


# torch's own, as its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("packed", "backend", "training"),
    [
        # C++ takes half a minute to two minutes a path to compile; what comes before it is run by the others as well
        pytest.param(True, "inductor", True, marks=pytest.mark.slow),
        pytest.param(False, "inductor", True, marks=pytest.mark.slow),
        (True, "aot_eager", True),
        (False, "aot_eager", True),
        (True, "aot_eager", False),
        (False, "aot_eager", False),
    ],
)
def test_compiled_is_eager(packed: bool, backend: str, training: bool) -> None:
    torch.manual_seed(0)
    net = ParticleNet(blocks=((4, (8,)), (4, (8,))), hidden=8, dropout=0.0).train(training)
    lived_in(net)
    # None, what Tagger takes: the first size first, then any; twice the C++
    compiled = torch.compile(net, backend=backend, dynamic=True if backend == "inductor" else None)
    for counts in ([20, 3, 9, 17], [5, 30, 1, 12, 7, 25]):
        jets = made_up(counts)
        inputs: tuple[Any, ...] = (cloud_of(jets),) if packed else padded_inputs(jets, 32)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        results = []
        for called in (net, compiled):
            net.load_state_dict(before)
            logits = called(*inputs)
            net.zero_grad()
            F.cross_entropy(logits, jets.kind).backward()
            after = {key: value.clone() for key, value in net.state_dict().items()}
            results.append((logits, {name: p.grad.clone() for name, p in net.named_parameters()}, after))
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_bfloat16_is_close_and_answers_in_float32(packed: bool) -> None:
    torch.manual_seed(0)
    net = ParticleNetLite().eval()
    lived_in(net)
    jets = made_up(COUNTS)
    inputs: tuple[Any, ...] = (cloud_of(jets),) if packed else padded_inputs(jets)
    with torch.no_grad():
        full = net(*inputs)
        net.autocast = torch.bfloat16
        half = net(*inputs)
        net.autocast = None
        assert torch.equal(net(*inputs), full)  # nothing of it stays
        with torch.autocast("cpu", torch.bfloat16):
            of_caller = net(*inputs)
    assert full.dtype == half.dtype == torch.float32
    assert of_caller.dtype == torch.bfloat16  # as of any model
    assert torch.equal(of_caller.float(), half)
    assert not torch.equal(half, full)  # something was rounded
    torch.testing.assert_close(half, full, atol=0.1, rtol=0.1)


def test_weights_can_be_stacked() -> None:
    nets = [network(), network()]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.add_(0.05)
    lived_in(nets[1], 4)
    stacked = torch.func.stack_module_state(nets)
    cloud, padded = both(made_up([1, 3, 12, 30]))
    for inputs in ((cloud,), padded):

        def call(state: tuple[Any, Any], inputs: Any = inputs) -> Tensor:
            return torch.func.functional_call(nets[0], state, inputs)

        together = torch.func.vmap(call)(stacked)
        torch.testing.assert_close(together, torch.stack([net(*inputs) for net in nets]), **EXACT)
    assert (together[0] - together[1]).abs().max() > 1e-3


# --- wrong arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ParticleNet()(torch.zeros(2, 2, 30)), TypeError, r"takes a Cloud, or padded \(points, features, mask\)"),
        (lambda: ParticleNet()(torch.zeros(2, 2, 16), torch.zeros(2, 7, 16)), ValueError, "at least 17 slots .* got 16"),
        (
            lambda: ParticleNet()(cloud_of(made_up([20]), num_neighbours=7)),
            ValueError,
            "has 7 neighbours for each particle, the network needs 16: make it with num_neighbours=16",
        ),
        (lambda: ParticleNet(max_particles=16), ValueError, "must be more than 16, the neighbours, and at most 255, got 16"),
        (lambda: ParticleNet(max_particles=256), ValueError, "at most 255, got 256"),
        (lambda: ParticleNetLite(max_particles=7), ValueError, "must be more than 7"),
        (lambda: cloud_of(made_up([2, 3])).part(slice(0, 2, 2)), ValueError, "the step of the slice must be 1"),
    ],
)
def test_wrong_arguments_are_told_what_is_wrong(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_cloud_may_have_more_neighbours_than_are_needed() -> None:
    jets = made_up([20, 3, 12])
    net = network()
    torch.testing.assert_close(
        net(in_double(cloud_of(jets, num_neighbours=16))), net(in_double(cloud_of(jets, num_neighbours=4))), **EXACT
    )


# --- many chains at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_many_networks_at_once_are_the_networks_alone(training: bool) -> None:
    """Under vmap each has its own neighbours and its own statistics: outputs, gradients, running statistics."""
    torch.manual_seed(0)
    net = ParticleNetLite(dropout=0.0).double().train(training)
    lived_in(net)
    cloud, _ = both(made_up(COUNTS))
    labels = torch.arange(len(COUNTS)) % 2
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.stack([p + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for _ in range(3)]).detach()
        for name, p in net.named_parameters()
    }
    buffers = {name: torch.stack([b + c for c in range(3)]) for name, b in net.named_buffers()}

    def loss(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = torch.func.functional_call(net, {**weights, **buffers}, (cloud,))
        return F.cross_entropy(logits, labels), buffers

    own = {name: b.clone() for name, b in buffers.items()}
    live = {name: w.clone().requires_grad_() for name, w in weights.items()}
    together, moved = torch.func.vmap(loss)(live, own)
    found = torch.autograd.grad(together.sum(), list(live.values()))
    losses = set()
    for c in range(3):
        net.load_state_dict({name: x[c] for name, x in (weights | buffers).items()})
        net.zero_grad()
        alone = F.cross_entropy(net(cloud), labels)
        alone.backward()
        torch.testing.assert_close(together[c], alone, **EXACT)
        for many, p in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(many[c], p.grad, **EXACT)
        for name, b in net.named_buffers():
            torch.testing.assert_close(moved[name][c], b, **EXACT)
        losses.add(float(alone.detach()))
    assert len(losses) == 3


@pytest.mark.parametrize("batch_size", [16, None])
def test_chains_of_jets_run_at_once(batch_size: int | None) -> None:
    """Through `sample`: batches of clouds, BatchNorm in training mode, a scan over the noise; and prediction."""
    torch.manual_seed(0)
    net = ParticleNetLite(dropout=0.0)
    data = JetData(made_up([*COUNTS, *COUNTS, 20, 21, 22]), batch_size, num_neighbours=7)
    sampler = partial(AdamMCMC, lr=1e-4, sigma=torch.tensor([1e-3, 2e-3]), sigma_along=2.0, prior=Gaussian())
    options: dict[str, Any] = {"sampler": sampler, "num_chains": 2, "num_draws": 3, "gap": 2, "burn_in": 2, "progress": False}
    stacked = sample(net, data, F.cross_entropy, stacked=True, **options)
    alone = sample(net, data, F.cross_entropy, stacked=False, **options)
    for many, one in zip(stacked.chain(0), alone.chain(0), strict=True):
        for name in one:
            torch.testing.assert_close(many[name], one[name], atol=2e-5, rtol=1e-3)
    name = "edge_convs.0.bns.0.running_mean"
    assert not torch.equal(stacked.chain(1)[-1][name], stacked.chain(0)[-1][name])
    if batch_size is None:  # then evaluation mode is the function that was sampled
        cloud, labels = data.fetch(slice(None))
        twin = ParticleNetLite(dropout=0.0).eval()
        for run in (stacked, alone):
            twin.load_state_dict(run[-1])
            with torch.no_grad():
                assert float(F.cross_entropy(twin(cloud), labels)) == pytest.approx(run.index[-1]["loss"], rel=1e-4)
    assert stacked.settings(1)["sigma"] == 2e-3
    many = stacked.predict(data, raw=True).raw
    one = stacked.predict(data, raw=True, batch_size=1).raw  # too small for two draws in one forward
    assert many is not None
    assert one is not None
    torch.testing.assert_close(many, one, atol=1e-5, rtol=1e-4)
