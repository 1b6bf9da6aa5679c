"""The kernels of ParticleNet's edge layers against its plain lines. On the CPU they run under Triton's interpreter."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of the kernels
pytest.importorskip("triton")

from adammcmc.jets import Cloud, JetData, Jets, ParticleNet, cloud_of, particlenet
from adammcmc.jets.data import Rows
from adammcmc.jets.particlenet import NOBODY, EdgeConv, nearest

with warnings.catch_warnings():  # torch's own, as its compiler is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from adammcmc.jets import edges

# the interpreter computes on numpy, which warns of 0 / 0 in places that are masked
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLACK = 1.0 if DEVICE.type == "cpu" else 20.0  # products of matrices add in another order there
COUNTS = [1, 2, 17, 40, 0, 8]
TOTAL = sum(COUNTS)
WIDTH = 48


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks use them on this device, interpreted or not."""
    monkeypatch.setattr(particlenet, "_KERNEL_DEVICES", {DEVICE.type})


def made_up(counts: list[int], seed: int = 0) -> Jets:
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    pt = torch.rand(total, generator=generator).mul(5).exp()
    deta, dphi = 0.2 * torch.randn(2, total, generator=generator)
    jet = torch.tensor([600.0, 0.5, 1.0, 100.0, 700.0]).repeat(len(counts), 1)
    particles = torch.stack([pt, deta, dphi, pt * (deta + 0.5).cosh()], 1)
    return Jets(torch.tensor(counts), particles, jet, torch.arange(len(counts)) % 2)


def there(cloud: Cloud) -> Cloud:
    return Cloud(*(x.to(DEVICE) for x in cloud))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def layout_of(rows: int = TOTAL, counts: list[int] = COUNTS) -> edges.Layout:
    return edges.Layout.of(torch.tensor(counts, device=DEVICE), rows, WIDTH)


def padded(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - len(x)), value=value)


def lived_in(module: nn.Module, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor, low, high in (
                (m.running_mean, -0.3, 0.3),
                (m.running_var, 0.5, 2.0),
                (m.weight.data, 0.5, 1.5),
                (m.bias.data, -0.3, 0.3),
            ):
                assert tensor is not None
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))


def off(a: Tensor, b: Tensor) -> float:
    """The difference in norm, relative to b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


# --- the parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [TOTAL, TOTAL + 9])
def test_the_layout_is_that_of_rows(rows: int) -> None:
    layout = layout_of(rows)
    where = Rows.of(torch.tensor(COUNTS), TOTAL)
    assert torch.equal(layout.start[:TOTAL].cpu().long(), where.first[where.owner])
    assert layout.total.tolist() == [TOTAL]


@pytest.mark.parametrize("k", [7, 16])
@pytest.mark.parametrize("channels", [2, 9, 80])
def test_nearest_is_the_plain_search(k: int, channels: int) -> None:
    x = normal(TOTAL, channels)
    where = Rows.of(torch.tensor(COUNTS, device=DEVICE), TOTAL)
    found = edges.nearest_places(x, layout_of(), k)
    assert found.dtype == torch.uint8
    assert torch.equal(found, nearest(x, where, k, WIDTH))
    assert (found[0] == NOBODY).all()  # one particle has no neighbours
    behind = edges.nearest_places(padded(x, TOTAL + 9, float("nan")), layout_of(TOTAL + 9), k)
    assert torch.equal(behind[:TOTAL], found)
    assert (behind[TOTAL:] == NOBODY).all()


def test_nearest_of_rounded_numbers_is_that_of_the_numbers() -> None:
    x = normal(TOTAL, 40).bfloat16()
    assert torch.equal(edges.nearest_places(x, layout_of(), 7), edges.nearest_places(x.float(), layout_of(), 7))


def test_twins_are_each_others_nearest_and_ties_go_to_the_first() -> None:
    x = normal(12, 3).round()
    x[5] = x[2]
    x[9] = x[2]
    found = edges.nearest_places(x, layout_of(12, [12]), 7).long()
    distances = torch.cdist(x.double(), x.double()).square()
    expected = distances.cpu().sort(dim=1, stable=True).indices[:, 1:8]
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [TOTAL, TOTAL + 21])
def test_norm_is_torchs(training: bool, rows: int) -> None:
    bn = nn.BatchNorm1d(7).to(DEVICE).train(training)
    lived_in(bn)
    other = copy.deepcopy(bn).double()
    x = normal(TOTAL, 7) * 3 + 100  # a mean that is large beside the deviation
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    weights = normal(TOTAL, 7, seed=1)
    out = edges.norm_rows(padded(x, rows, 1e6), bn, layout_of(rows))
    assert not out[TOTAL:].any()
    (out * padded(weights, rows)).sum().backward()
    expected = other(wide)
    (expected * weights).sum().backward()
    assert off(out[:TOTAL], expected) < 1e-5
    assert x.grad is not None
    assert wide.grad is not None
    assert off(x.grad, wide.grad) < 2e-5
    for name, value in other.state_dict().items():
        assert off(bn.state_dict()[name], value) < 1e-6, name
    for name, parameter in other.named_parameters():
        assert parameter.grad is not None
        assert off(bn.get_parameter(name).grad, parameter.grad) < 1e-5, name


def test_a_constant_column_has_no_variance() -> None:
    bn = nn.BatchNorm1d(3).to(DEVICE)
    out = edges.norm_rows(torch.full((TOTAL, 3), 12345.678, device=DEVICE), bn, layout_of())
    assert not out.any()
    assert torch.equal(bn.running_var, torch.full((3,), 0.9, device=DEVICE))


@pytest.mark.parametrize("rows", [TOTAL, TOTAL + 21])
def test_the_mean_of_jets(rows: int) -> None:
    x = normal(TOTAL, 20).requires_grad_()
    out = edges.mean_of_jets(padded(x, rows, 1e6), layout_of(rows))
    assert out.dtype == torch.float32
    expected = torch.stack([part.mean(0) if len(part) else part.sum(0) for part in x.split(COUNTS)])
    assert off(out, expected) < 1e-6
    weights = normal(*out.shape, seed=1)
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    assert off(grad, torch.autograd.grad((expected * weights).sum(), x)[0]) < 1e-6


# --- a block ------------------------------------------------------------------------------------------------------------


def block_results(
    block: EdgeConv, x: Tensor, places: Tensor, dtype: torch.dtype | None, *, kernels: bool, rows: int = TOTAL
) -> dict[str, Tensor]:
    """Output, gradients and running statistics of a copy."""
    block = copy.deepcopy(block)
    x = x.detach().clone().requires_grad_()
    weights = normal(TOTAL, block.bns[-1].num_features, seed=1)  # type: ignore[arg-type]
    with torch.autocast(DEVICE.type, dtype or torch.bfloat16, enabled=dtype is not None):
        if kernels:
            places = F.pad(places, (0, 0, 0, rows - TOTAL), value=NOBODY)
            out = block(padded(x, rows, 3.0), places, layout=layout_of(rows))
            assert not out[TOTAL:].any()
            out = out[:TOTAL]
        else:
            where = Rows.of(torch.tensor(COUNTS, device=DEVICE), TOTAL)
            out = block(x, particlenet._as_rows(places, where, TOTAL))
    (out * weights.to(out.dtype)).sum().backward()
    assert x.grad is not None
    results = {"out": out.detach(), "x": x.grad, **block.state_dict()}
    return results | {f"d {name}": p.grad for name, p in block.named_parameters() if p.grad is not None}


def made_block(sizes: tuple[int, ...], training: bool) -> tuple[EdgeConv, Tensor]:
    torch.manual_seed(0)
    block = EdgeConv(sizes[0], sizes[1:]).train(training)
    lived_in(block)
    return block.to(DEVICE), normal(TOTAL, sizes[0])


SIZES = [(5, 8, 16, 24), (24, 6, 24), (7, 20), (12, 12)]  # with a shortcut and without; one, two, three layers


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("sizes", "k"), [(sizes, 16 if sizes == SIZES[1] else 7) for sizes in SIZES], ids=str)
def test_a_block_is_the_plain_one(sizes: tuple[int, ...], k: int, training: bool) -> None:
    block, x = made_block(sizes, training)
    places = edges.nearest_places(normal(TOTAL, 3, seed=5), layout_of(), k + 2)[:, :k]  # not contiguous
    found = block_results(block, x, places, None, kernels=True)
    expected = block_results(copy.deepcopy(block).double(), x.double(), places, None, kernels=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert off(found[name], value) < 1e-5 * SLACK, name
    assert found["out"].abs().max() > 0.1
    behind = block_results(block, x, places, None, kernels=True, rows=TOTAL + 21)
    for name, value in found.items():
        if name.startswith(("d conv", "d sc.")) or name == "x":
            assert off(behind[name], value) < 1e-6 * SLACK, name  # a product of more rows may add in another order
        else:
            assert torch.equal(behind[name], value), name


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_block_in_bfloat16_is_as_good_as_the_plain_one(sizes: tuple[int, ...]) -> None:
    block, x = made_block(sizes, True)
    places = edges.nearest_places(normal(TOTAL, 3, seed=5), layout_of(), 7)
    exact = block_results(copy.deepcopy(block).double(), x.double(), places, None, kernels=False)
    plain = block_results(block, x, places, torch.bfloat16, kernels=False)
    found = block_results(block, x, places, torch.bfloat16, kernels=True)
    assert found["out"].dtype == plain["out"].dtype
    for name, value in exact.items():
        assert off(found[name], value) < max(2e-2, 2 * off(plain[name], value)), name


def test_the_same_call_gives_the_same_bits() -> None:
    block, x = made_block(SIZES[0], True)
    places = edges.nearest_places(x, layout_of(), 7)
    first, second = (block_results(block, x, places, torch.bfloat16, kernels=True) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name


def test_many_particles_find_their_place() -> None:
    """200 in a jet: two stretches of places."""
    block, _ = made_block((4, 8, 8), True)
    counts = [200, 3]
    x = normal(203, 4).requires_grad_()
    layout = edges.Layout.of(torch.tensor(counts, device=DEVICE), 203, 255)
    places = edges.nearest_places(x, layout, 7)
    where = Rows.of(layout.counts, 203)
    assert torch.equal(places, nearest(x, where, 7, 255))
    (found,) = torch.autograd.grad(copy.deepcopy(block)(x, places, layout=layout).square().sum(), x)
    (expected,) = torch.autograd.grad(block(x, particlenet._as_rows(places, where, 203)).square().sum(), x)
    assert off(found, expected) < 1e-5


# --- the network --------------------------------------------------------------------------------------------------------


def small(training: bool = True, **settings: Any) -> ParticleNet:
    torch.manual_seed(0)
    blocks = ((7, (8, 16, 24)), (5, (24, 24)))
    net = ParticleNet(blocks=blocks, hidden=8, dropout=0.0, max_particles=WIDTH, **settings)
    lived_in(net)
    return net.to(DEVICE).train(training)


def results(net: ParticleNet, cloud: Cloud, call: Any = None) -> dict[str, Tensor]:
    net = copy.deepcopy(net)
    logits = (net if call is None else call(net))(there(cloud))
    F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 2).backward()
    found = {"logits": logits.detach(), **net.state_dict()}
    return found | {f"d {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}


def plain_results(net: ParticleNet, cloud: Cloud) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(particlenet, "_KERNEL_DEVICES", set())
        return results(net, cloud)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(v.double().norm()) for name, v in expected.items() if name.startswith("d "))
    for name, value in expected.items():
        # where BatchNorm takes a gradient away, what is left is rounding
        scale = max(float(value.double().norm()), 0.1 * largest if name.startswith("d ") else 1e-12)
        assert float((found[name].double() - value.double()).norm()) < SLACK * tolerance * scale, name


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_the_plain_one(training: bool) -> None:
    net, cloud = small(training), cloud_of(made_up(COUNTS), num_neighbours=7)
    assert net._has_kernels(there(cloud))
    found = results(net, cloud)
    assert_close(found, plain_results(net, cloud), 1e-5)
    behind = results(net, cloud.padded(TOTAL + 21))
    assert torch.equal(behind["logits"], found["logits"])
    assert_close(behind, found, 1e-6)


@pytest.mark.usefixtures("with_kernels")
def test_the_network_in_bfloat16_is_as_good_as_the_plain_one() -> None:
    net, cloud = small(), cloud_of(made_up(COUNTS), num_neighbours=7)
    exact = results(net, cloud)
    net.autocast = torch.bfloat16
    plain, found = plain_results(net, cloud), results(net, cloud)
    assert found["logits"].dtype == torch.float32
    for name, value in exact.items():
        assert off(found[name], value) < max(2e-2, 2 * off(plain[name], value)), name


@pytest.mark.usefixtures("with_kernels")
def test_what_lies_behind_the_particles_does_not_matter() -> None:
    net, cloud = small(), cloud_of(made_up(COUNTS), num_neighbours=7)
    junk = cloud.padded(TOTAL + 13)
    junk.features[TOTAL:] = float("nan")
    junk.points[TOTAL:] = float("nan")
    junk.neighbours[TOTAL:] = 3
    assert_close(results(net, junk), results(net, cloud), 1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_padding_changes_nothing_in_the_plain_network(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, cloud = small(training).double(), cloud_of(made_up(COUNTS), num_neighbours=7)
    cloud = cloud._replace(points=cloud.points.double(), features=cloud.features.double())
    expected = results(net, cloud)
    if DEVICE.type == "cpu":
        found = results(net, cloud.padded(TOTAL + 21))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as on a GPU: nobody asks how many there are
    assert_close(results(net, cloud), expected, 1e-11)
    assert_close(results(net, cloud.padded(TOTAL + 21)), expected, 1e-11)


@pytest.mark.usefixtures("with_kernels")
def test_compiled_is_eager() -> None:
    net, cloud = small(), cloud_of(made_up(COUNTS), num_neighbours=7).padded(TOTAL + 21)
    compiled = results(net, cloud, lambda net: torch.compile(net, backend="aot_eager"))
    assert_close(compiled, results(net, cloud), 1e-5)


@pytest.mark.usefixtures("with_kernels")
def test_stacked_weights_and_single_gradients_take_the_plain_path() -> None:
    nets = [small(False), small(False)]
    cloud = there(cloud_of(made_up(COUNTS), num_neighbours=7))
    stacked = torch.func.stack_module_state(nets)  # type: ignore[arg-type]

    def call(state: tuple[Any, Any]) -> Tensor:
        return torch.func.functional_call(nets[0], state, (cloud,))

    torch.testing.assert_close(torch.func.vmap(call)(stacked)[0], nets[0](cloud), atol=1e-5, rtol=1e-5)
    one = {name: p[0].detach() for name, p in stacked[0].items()}, {name: b[0] for name, b in stacked[1].items()}
    grads = torch.func.grad(lambda p: call((p, one[1])).square().sum())(one[0])
    assert all(bool(g.isfinite().all()) for g in grads.values())


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("change", ["momentum", "double", "empty", "float16"])
def test_what_the_kernels_do_not_know_takes_the_plain_path(change: str) -> None:
    net, cloud = small(), there(cloud_of(made_up(COUNTS), num_neighbours=7))
    assert net._has_kernels(cloud)
    if change == "momentum":
        net.bn_fts.momentum = None
    elif change == "double":
        net.double()
    elif change == "empty":
        cloud = Cloud(*(x[:0] for x in cloud))
    with torch.autocast(DEVICE.type, torch.float16, enabled=change == "float16"):
        assert not net._has_kernels(cloud)


# --- a fixed number of rows ---------------------------------------------------------------------------------------------


def test_a_padded_cloud_has_its_rows() -> None:
    cloud = cloud_of(made_up(COUNTS), num_neighbours=7)
    more = cloud.padded(100)
    assert [len(x) for x in more] == [len(COUNTS), 100, 100, 100]
    assert not more.points[TOTAL:].any()
    assert not more.features[TOTAL:].any()
    assert (more.neighbours[TOTAL:] == NOBODY).all()
    for a, b in zip(more.part(slice(None)), cloud, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=f"with {TOTAL} rows does not fit in 5"):
        cloud.padded(5)


@pytest.mark.parametrize("capacity", ["auto", 90, 20])
def test_batches_with_a_capacity_are_the_same_batches(capacity: Any) -> None:
    jets = made_up([1, 2, 17, 40, 3, 8, 5, 9, 12, 30, 21])
    plain, data = JetData(jets, 3, device=DEVICE), JetData(jets, 3, device=DEVICE, capacity=capacity)
    for _ in range(7):
        (cloud, labels), (padded_cloud, same_labels) = next(plain), next(data)
        rows = len(cloud.points)
        assert torch.equal(labels, same_labels)
        expected = cloud.padded(data.capacity) if rows <= data.capacity else cloud
        for a, b in zip(padded_cloud, expected, strict=True):
            assert torch.equal(a, b)
    assert data.fingerprint() == plain.fingerprint()


def test_a_capacity_of_its_own_choice_is_enough_and_not_too_much() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(10, 80, (2000,), generator=generator).tolist()
    data = JetData(made_up(counts), 100, capacity="auto")
    assert data.capacity is not None
    assert data.capacity % 16 == 0
    assert all(len(next(data)[0].points) == data.capacity for _ in range(60))
    assert data.capacity < 1.5 * 100 * sum(counts) / len(counts)
    few = JetData(made_up([4, 9, 5]), 2, capacity="auto")
    assert few.capacity == 16  # 14 is the most that two have


@pytest.mark.parametrize("capacity", [0, -3, True, 2.5, "many"])
def test_a_wrong_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match="`capacity` must be a positive number of rows, 'auto' or None"):
        JetData(made_up([4, 9]), 1, capacity=capacity)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_step_can_be_captured(autocast: torch.dtype | None) -> None:
    net = small()
    net.autocast = autocast
    clouds = [there(cloud_of(made_up(COUNTS, seed), num_neighbours=7).padded(128)) for seed in range(3)]
    held = Cloud(*(x.clone() for x in clouds[0]))
    labels = torch.arange(len(COUNTS), device=DEVICE) % 2
    state = copy.deepcopy(net.state_dict())

    def step() -> Tensor:
        for p in net.parameters():
            p.grad = None
        loss = F.cross_entropy(net(held), labels)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    grads = [p.grad for p in net.parameters()]
    for cloud in clouds:
        net.load_state_dict(state)
        for to, value in zip(held, cloud, strict=True):
            to.copy_(value)
        graph.replay()
        replayed = loss.clone(), [g.clone() for g in grads if g is not None], net.bn_fts.running_mean.clone()
        net.load_state_dict(state)
        again = step()
        assert torch.equal(replayed[0], again)
        assert all(torch.equal(a, p.grad) for a, p in zip(replayed[1], net.parameters(), strict=True) if p.grad is not None)
        assert torch.equal(replayed[2], net.bn_fts.running_mean)
