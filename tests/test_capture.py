"""Steps as CUDA graphs: the same chain, the same masks, a fallback that says why. (On the CPU they are plain steps.)"""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    FullData,
    Gaussian,
    Minibatch,
    NonFiniteLoss,
    Sampler,
    TensorExamples,
    Underdamped,
    UniformBox,
    sample,
)
from adammcmc.backends.graphs import Captured, _no_collection
from adammcmc.target.batches import Parts
from adammcmc.target.potential import Target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = {"plain": [], "dropout": [nn.Dropout(0.3)], "norm": [nn.BatchNorm1d(32)]}[kind]
    return nn.Sequential(nn.Linear(10, 32), *middle, nn.Tanh(), nn.Linear(32, 4)).to(DEVICE)


def batches(count: int = 5, size: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 10, generator=generator).to(DEVICE), torch.randint(4, (size,), generator=generator).to(DEVICE))
        for _ in range(count)
    ]


Make = Callable[[nn.Module], Sampler]


def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(3)


def adam(model: nn.Module, **options: Any) -> Sampler:
    return AdamMCMC(model.parameters(), num_data=320, sigma=1e-3, sigma_along=2.0, generator=generator(), **options)


def full_data(model: nn.Module, **options: Any) -> Sampler:
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    dtype = next(model.parameters()).dtype
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x.to(dtype), y)
    return Underdamped(
        model.parameters(), 1e-2, num_data=320, prior=Gaussian(), acceptance=FullData(), examples=examples,
        generator=generator(), **options,
    )  # fmt: skip


SAMPLERS: dict[str, Make] = {
    "AdamMCMC": adam,
    "AdamMCMC, prior": lambda m: adam(m, prior=Gaussian(0.5)),
    "AdamMCMC, bounded": lambda m: adam(m, prior=UniformBox(-3, 3)),
    "AdamMCMC, always": lambda m: adam(m, acceptance=AlwaysAccept()),
    "AdamMCMC, fixed": lambda m: adam(m, fixed_data=True),
    "AdamMCMC, fixed, prior": lambda m: adam(m, fixed_data=True, prior=Gaussian(0.5)),
    "MALA": lambda m: MALA(m.parameters(), 1e-5, num_data=320, prior=Gaussian(), generator=generator()),
    "MALA, fixed": lambda m: MALA(m.parameters(), 1e-5, num_data=320, prior=Gaussian(), fixed_data=True, generator=generator()),
    "Underdamped": lambda m: Underdamped(m.parameters(), 1e-2, num_data=320, prior=Gaussian(), generator=generator()),
    "Underdamped, fixed": lambda m: Underdamped(
        m.parameters(), 1e-2, num_data=320, prior=Gaussian(), fixed_data=True, generator=generator()
    ),
    "Underdamped, full data": full_data,
}


def chain(
    make: Make, model: nn.Module, data: list[Any], *, captured: bool, reduction: str = "none"
) -> tuple[list[Any], Sampler]:
    """What 40 steps leave: weights, buffers, numbers."""
    sampler = make(model)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    torch.manual_seed(5)
    path = []
    for batch in itertools.islice(itertools.cycle(data), 40):
        value = sampler.step(loss, batch) if captured else sampler.step(lambda: loss(batch))  # noqa: B023
        state = [x.detach().clone() for x in model.state_dict().values()]
        path.append((state, sampler.info, value.clone()))
    return path, sampler


@pytest.mark.parametrize("layers", ["plain", "dropout", "norm"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_captured_chain_is_the_usual_one(name: str, layers: str) -> None:
    if layers != "plain" and ("fixed" in name or "full data" in name):
        pytest.skip("the loss must be a function of the weights there")
    data = batches(1 if "fixed" in name else 5, 320 if "fixed" in name else 64)
    is_fused = name.startswith("AdamMCMC")  # whose kernels are of float32; for the others rounding shall be no excuse
    data = data if is_fused else [(x.double(), y) for x, y in data]
    models = [network(layers) if is_fused else network(layers).double() for _ in range(2)]
    usual, first = chain(SAMPLERS[name], models[0], data, captured=False)
    graphs, second = chain(SAMPLERS[name], models[1], data, captured=True)
    if DEVICE == "cuda":
        assert second.chains.graphs._graphs, "nothing was captured"
    accepted = 0
    for (state, info, value), (other, found, loss) in zip(usual, graphs, strict=True):
        for a, b in zip(state, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for field, (a, b) in zip(info._fields, zip(info, found, strict=True), strict=True):
            torch.testing.assert_close(
                a.double(), b.double(), rtol=1e-2, atol=1e-2, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}"
            )
        torch.testing.assert_close(value, loss, rtol=1e-4, atol=1e-5)
        accepted += bool(info.is_accepted)
    assert 0 < accepted < 40 or "always" in name or "bounded" in name or "full" in name or accepted == 40
    assert first.num_steps == second.num_steps == 40
    totals, others = first.health_sums(), second.health_sums()
    assert totals["num_steps"] == others["num_steps"]
    assert totals["accepted"] == others["accepted"]


@pytest.mark.parametrize("name", ["AdamMCMC", "AdamMCMC, fixed", "Underdamped, fixed", "MALA"])
def test_a_captured_chain_goes_on_from_its_state(name: str) -> None:
    data = batches(1 if "fixed" in name else 5, 320 if "fixed" in name else 64)
    model = network()
    sampler = SAMPLERS[name](model)

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    stream = itertools.cycle(data)
    for batch in itertools.islice(stream, 10):
        sampler.step(loss, batch)
    saved, weights = copy.deepcopy(sampler.state_dict()), copy.deepcopy(model.state_dict())
    later = list(itertools.islice(stream, 10))
    for batch in later:
        sampler.step(loss, batch)
    end = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(weights)
    sampler.load_state_dict(saved)
    for batch in later:
        sampler.step(loss, batch)
    for a, b in zip(end, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


def test_settings_may_change_between_replays() -> None:
    """A scheduler, or the user: the next step has the new values, captured or not."""
    data = batches()
    ends = []
    for captured in (False, True):
        model = network()
        sampler = adam(model)

        def loss(batch: Any, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        for i, batch in enumerate(itertools.islice(itertools.cycle(data), 20)):
            sampler.param_groups[0]["lr"] = 1e-3 / (i + 1)
            sampler.param_groups[0]["sigma"] = 1e-3 / (1 + i % 3)
            if captured:
                sampler.step(loss, batch)
            else:
                sampler.step(lambda: loss(batch))  # noqa: B023
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_batches_of_two_shapes_and_usual_steps_in_between() -> None:
    data = [*batches(2), *batches(1, 17)]
    ends = []
    for captured in (False, True):
        model = network()
        sampler = SAMPLERS["Underdamped"](model)

        def loss(batch: Any, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        for i, batch in enumerate(itertools.islice(itertools.cycle(data), 30)):
            if captured and i % 7 != 6:
                sampler.step(loss, batch)
            else:
                sampler.step(lambda: loss(batch))  # noqa: B023
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_no_function_of_the_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="function of the batch"):
        adam(network()).step(3, batches(1)[0])  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
class TestFallback:
    """What cannot be captured runs as usual, after one warning that names the reason."""

    def run(self, sampler: Sampler, loss: Callable[[Any], torch.Tensor], steps: int = 12) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in itertools.islice(itertools.cycle(batches()), steps):
                sampler.step(loss, batch)
        return [str(w.message) for w in caught if "captured" in str(w.message)]

    def test_a_loss_that_looks_at_a_value(self) -> None:
        model = network()

        def loss(batch: Any) -> torch.Tensor:
            value = F.cross_entropy(model(batch[0]), batch[1])
            assert value.item() > 0
            return value

        said = self.run(sampler := adam(model), loss)
        assert len(said) == 1
        assert sampler.num_steps == 12
        assert float(sampler.mean_acceptance_rate) > 0

    def test_numbers_of_the_host(self) -> None:
        model = network()

        def loss(batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0] + torch.randn(10).cuda()), batch[1])

        said = self.run(adam(model), loss)
        assert len(said) == 1
        assert "random numbers on the host" in said[0]

    def test_a_new_function_each_time(self) -> None:
        model = network()
        sampler = adam(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in itertools.islice(itertools.cycle(batches()), 12):
                sampler.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
        said = [str(w.message) for w in caught if "captured" in str(w.message)]
        assert len(said) == 1
        assert "new function" in said[0]

    def test_a_sampler_that_counts_on_the_host(self) -> None:
        model = network()
        sampler = AdamMCMC(model.parameters(), num_data=320, sigma=1e-3, sigma_along=2.0, fused=False)

        def loss(batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        said = self.run(sampler, loss)
        assert len(said) == 1
        assert "counts its steps on the host" in said[0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_replays_do_not_wait_and_a_bad_batch_is_noticed() -> None:
    model = network()
    sampler = adam(model)

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    data = batches()
    for batch in itertools.islice(itertools.cycle(data), 8):
        sampler.step(loss, batch)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in itertools.islice(itertools.cycle(data), 60):
                sampler.step(loss, batch)
                _ = sampler.info.acceptance_rate
        finally:
            torch.cuda.set_sync_debug_mode("default")
    before = [p.detach().clone() for p in model.parameters()]
    bad = (torch.full_like(data[0][0], torch.nan), data[0][1])
    sampler.step(loss, bad)
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteLoss, match="at step 68"):
        sampler.step(loss, data[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "bit for bit"
    sampler.unfreeze()
    for batch in data:
        sampler.step(loss, batch)
    assert sampler.num_steps == 74


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_is_captured() -> None:
    ends = []
    for compiled in (False, True):
        model = network()
        sampler = adam(model)
        called = torch.compile(model) if compiled else model

        def loss(batch: Any, called: Any = called) -> torch.Tensor:
            return F.cross_entropy(called(batch[0]), batch[1])

        for batch in itertools.islice(itertools.cycle(batches()), 12):
            sampler.step(loss, batch)
        assert sampler.chains.graphs._graphs
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("layers", ["plain", "dropout", "norm"])
@pytest.mark.parametrize("name", ["AdamMCMC", "Underdamped", "fixed"])
def test_stacked_chains_are_captured_too(name: str, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "fixed" and layers != "plain":
        pytest.skip("the loss must be a function of the weights there")
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    sigma = torch.tensor([3e-4, 1e-3, 3e-3])
    factories: dict[str, Any] = {
        "AdamMCMC": partial(AdamMCMC, lr=1e-3, sigma=sigma, sigma_along=2.0),
        "Underdamped": partial(Underdamped, step_size=torch.tensor([1e-3, 3e-3, 1e-2]), acceptance=Minibatch()),
        "fixed": partial(MALA, step_size=torch.tensor([1e-6, 1e-5, 2e-5])),
    }
    size = None if name == "fixed" else 64
    options: dict[str, Any] = {"batch_size": size, "num_chains": 3, "stacked": True, "num_draws": 4, "gap": 5, "burn_in": 10}

    def draws() -> tuple[Any, int]:
        seen = []
        whole = Captured.step

        def step(self: Captured, *arguments: Any) -> torch.Tensor:
            seen.append(self)
            return whole(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Captured, "step", step)
            posterior = sample(network(layers), (inputs, targets), F.cross_entropy, sampler=factories[name], **options)
        return [list(draw.values()) for draw in posterior], max(len(c._graphs) for c in seen)

    graphs, count = draws()
    assert count > 0, "nothing was captured"
    monkeypatch.setattr("adammcmc.backends.graphs._WARM_UP", 10**9)
    usual, count = draws()
    assert count == 0
    for a, b in zip(graphs, usual, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("layers", ["dropout", "norm"])
def test_after_eval_another_graph_is_captured(layers: str) -> None:
    model = network(layers)
    sampler = adam(model)

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    data = batches()
    for batch in itertools.islice(itertools.cycle(data), 8):
        sampler.step(loss, batch)
    model.eval()
    buffers = [b.clone() for b in model.buffers()]
    for batch in itertools.islice(itertools.cycle(data), 10):
        with torch.no_grad():
            wanted = loss(batch)
        torch.testing.assert_close(sampler.step(loss, batch), wanted, rtol=1e-4, atol=1e-5)
    assert len(sampler.chains.graphs._graphs) == 2
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("extra", [torch.tensor(0.5), [1, 2].__iter__()], ids=["on the host", "no tensor"])
def test_what_a_graph_cannot_read_is_not_captured(extra: object) -> None:
    model = network()
    sampler = adam(model)
    x, y = batches(1)[0]
    with pytest.warns(UserWarning, match="on the host|holds a"):
        sampler.step(lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y, extra))
    sampler.step(lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y, extra))  # and not again
    assert sampler.num_steps == 2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_parameters_that_move_are_followed() -> None:
    model = network()
    sampler = adam(model)

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    data = batches()
    for round_ in range(2):
        for batch in itertools.islice(itertools.cycle(data), 8):
            with torch.no_grad():
                wanted = loss(batch)
            torch.testing.assert_close(sampler.step(loss, batch), wanted, rtol=1e-4, atol=1e-5)
        if round_ == 0:
            model.cpu()
            model.cuda()
    assert sampler.num_steps == 16


def test_a_callers_autocast_does_not_hide_the_proposal() -> None:
    """Its cache would hand the second evaluation the weights of the first."""
    model = network()
    sampler = adam(model)
    x, y = batches(1)[0]
    changes = []
    with torch.autocast(DEVICE, torch.bfloat16):
        for _ in range(6):
            sampler.step(lambda: F.cross_entropy(model(x).float(), y))
            changes.append(float(sampler.info.proposed_loss - sampler.info.loss))
    assert all(change != 0 for change in changes)


CHANGES: dict[str, Callable[[nn.Module, Sampler], object]] = {
    "a setting": lambda model, sampler: sampler.param_groups[0].update(lr=0.5),
    "a setting inside of a list": lambda model, sampler: sampler.param_groups[0]["betas"].__setitem__(0, 0.5),
    "a weight": lambda model, sampler: model[0].weight.detach().mul_(2),
    "the storage of a weight": lambda model, sampler: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "what is sampled": lambda model, sampler: model[0].weight.requires_grad_(False),
    "a mode": lambda model, sampler: model.eval(),
    "the target": lambda model, sampler: setattr(sampler, "target", Target(7)),
    "the generator": lambda model, sampler: setattr(sampler, "generator", torch.Generator(DEVICE)),
    "an option": lambda model, sampler: setattr(sampler, "fused", False),
    "the moments": lambda model, sampler: sampler.state[model[0].weight].update(exp_avg=torch.zeros(32, 10, device=DEVICE)),
    "a usual step": lambda model, sampler: sampler.step(lambda: model(torch.ones(2, 10, device=DEVICE)).square().mean()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_looked_into_before_the_next_replay(change: str) -> None:
    model = network("dropout")
    sampler = AdamMCMC(model.parameters(), 1e-3, [0.9, 0.9], num_data=320, sigma=1e-3)  # type: ignore[arg-type]
    x, y = batches(1)[0]
    for _ in range(2):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    sampler.chains.clock_at = sampler.num_steps  # as after a replay
    before = sampler.chains.token()
    assert sampler.chains.token() == before
    CHANGES[change](model, sampler)
    assert sampler.chains.token() != before


def test_nothing_is_collected_during_a_capture() -> None:
    seen = []
    assert gc.isenabled()
    with _no_collection():
        seen.append(gc.isenabled())
        with _no_collection():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
    assert seen == [False] * 3
    assert gc.isenabled()


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_the_graph_of_a_sampler_that_is_gone_spoils_no_other() -> None:
    (batch,) = batches(1)

    def captured() -> tuple[Sampler, nn.Module]:
        model = network()
        sampler = adam(model)

        def loss(b: Any) -> torch.Tensor:
            return F.cross_entropy(model(b[0]), b[1])

        for _ in range(8):
            sampler.step(loss, batch)
        assert sampler.chains.graphs._graphs
        return sampler, model

    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    for _ in range(3):
        old = [captured()]
        old.append(old)  # type: ignore[arg-type]  # a cycle: only the collector finds it
        del old
    gc.enable()
    gc.set_threshold(1, 1, 1)
    try:
        captured()
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [{}, {"forces": "bfloat16", "num_leapfrog": 3}], ids=["float32", "bfloat16"])
def test_all_data_in_parts_are_one_captured_step(options: dict[str, Any], reduction: str) -> None:
    """Unequal parts: the steps without a graph, energies in full precision, and nothing copied again."""
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    parts = Parts([(x[:150], y[:150]), (x[150:300], y[150:300]), (x[300:], y[300:])])

    def make(m: nn.Module) -> Sampler:
        own: dict[str, Any] = {"num_data": 320, "prior": Gaussian(), "fixed_data": True, "generator": generator()}
        return Underdamped(m.parameters(), 1e-2, num_chances=1, **own, **options)

    paths = []
    for is_captured in (True, False):
        model = network()
        sampler = make(model)
        loss = partial(_cross_entropy, model, reduction)
        if not is_captured:
            sampler.chains.graphs._reason = "a test"
        path = []
        for _ in range(30):
            sampler.step(loss, parts)
            path.append([p.detach().clone() for p in model.parameters()])
            true = float(_cross_entropy(model, "mean", (x, y)).detach())
            assert float(sampler.chains.present_loss()) == pytest.approx(true, rel=1e-5)
        paths.append(path)
        assert bool(sampler.chains.graphs._graphs) == (is_captured and DEVICE == "cuda")
        assert sampler.describe().endswith("| exact")
    for ours, theirs in zip(*paths, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def _cross_entropy(model: nn.Module, reduction: str, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)
