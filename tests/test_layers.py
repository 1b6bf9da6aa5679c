"""Layers with state: the same mask on both sides, buffers restored on rejection, policies in the description."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc import (
    AdamMCMC,
    AlwaysAccept,
    FullData,
    Gaussian,
    GaussianNLL,
    PerExampleLossRequired,
    StochasticClosure,
    TensorExamples,
    Underdamped,
    check_closure,
    kernels,
    sample,
    sample_density,
)
from tests.optimizers import OPTIMIZERS, X, Y, seeded


def network(dropout: float = 0.3, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)]
    return nn.Sequential(*layers).train()


def everything(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Recorder(nn.Module):
    """Keeps what passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return x


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "ExactAdamMCMC"])
def test_both_sides_of_a_step_see_the_same_mask(optimizer: str) -> None:
    recorder = Recorder()
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), recorder, nn.Linear(40, 3)).train()
    sampler = OPTIMIZERS[optimizer](model)
    masks = []
    for _ in range(4):
        recorder.seen.clear()
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        first, *others = [x == 0 for x in recorder.seen]
        assert others, "the loss was evaluated once only"
        assert all(torch.equal(first, other) for other in others)
        masks.append(first)
    assert not torch.equal(masks[0], masks[1]), "another step has another mask"


def test_evaluations_at_one_point_agree_bit_for_bit() -> None:
    """A move of length zero: dropout and BatchNorm in training mode, and yet Y = 0 to the last bit."""
    model = network()
    sampler = AdamMCMC(model.parameters(), lr=0.0, num_data=64, sigma=1e-30, generator=seeded())
    sampler.parameters.check_noise = lambda *_: None  # type: ignore[method-assign]  # rounding swallows it, on purpose
    for _ in range(5):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        assert float(sampler.info.proposed_loss) == float(sampler.info.loss)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "ExactAdamMCMC"])
def test_a_rejection_restores_every_parameter_and_buffer_bit_for_bit(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model, sigma=0.2)
    counts = {True: 0, False: 0}
    for _ in range(40):
        before, tracked = everything(model), int(model[1].num_batches_tracked)
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        accepted = bool(sampler.info.is_accepted)
        counts[accepted] += 1
        if accepted:
            assert int(model[1].num_batches_tracked) == tracked + 1, "buffers move once"
        else:
            assert same(before, everything(model))
    assert counts[False] > 3, counts


def test_an_accepted_buffer_is_that_of_the_accepted_weights() -> None:
    """From the old statistics and the batch at the new weights, as one training forward there would have made it."""
    model = network(dropout=0.0)
    sampler = AdamMCMC(model.parameters(), lr=1e-2, num_data=64, sigma=1e-3, sigma_along=4.0, generator=seeded())
    for _ in range(10):
        old = copy.deepcopy(model[1].state_dict())
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        if sampler.info.is_accepted:
            expected = copy.deepcopy(model)
            expected[1].running_mean.copy_(old["running_mean"])
            expected[1].running_var.copy_(old["running_var"])
            expected(X)
            torch.testing.assert_close(model[1].running_mean, expected[1].running_mean, rtol=0, atol=0)
            torch.testing.assert_close(model[1].running_var, expected[1].running_var, rtol=0, atol=0)
            return
    raise AssertionError("nothing was accepted")


def test_frozen_statistics_stay_and_are_used() -> None:
    model = network(dropout=0.0)
    with pytest.raises(ValueError, match="has no running statistics yet"):
        AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, batch_norm="frozen").step(lambda: F.cross_entropy(model(X), Y))
    for _ in range(20):
        model(X)
    statistics = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        expected = F.cross_entropy(copy.deepcopy(model).eval()(X), Y)
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, batch_norm="frozen")
    loss = sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert float(loss) == float(expected)
    for _ in range(5):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert same(statistics, list(model.buffers()))
    assert model.training
    assert model[1].training, "the user's mode is left as it was"
    assert "BatchNorm: frozen statistics" in sampler.describe()


def test_policies_are_described() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2)
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert "BatchNorm: batch statistics, running averages in the draws" in sampler.describe()
    assert "dropout: one mask for both sides" in sampler.describe()
    reasons = " ".join(sampler.approximations())
    assert "dropout draws a new mask" in reasons
    assert "batch statistics tie" in reasons
    model.eval()
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert "dropout" not in sampler.describe()
    assert "BatchNorm" not in sampler.describe()
    with pytest.raises(ValueError, match="`batch_norm` must be 'batch' or 'frozen'"):
        AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, batch_norm="off")  # type: ignore[arg-type]


def test_there_are_no_per_example_losses_under_batch_statistics() -> None:
    model = network(dropout=0.0)

    def sampler(**options: object) -> AdamMCMC:
        examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
        settings = {"num_data": 64, "sigma": 1e-2, "acceptance": FullData(), "examples": examples} | options
        return AdamMCMC(model.parameters(), **settings)  # type: ignore[arg-type]

    before = everything(model)
    with pytest.raises(PerExampleLossRequired, match=r"'1' \(BatchNorm1d\) uses the statistics of its batch"):
        sampler().step(lambda: F.cross_entropy(model(X), Y))
    assert same(before, everything(model)), "an error leaves nothing behind"
    for _ in range(3):
        model(X)
    frozen = sampler(batch_norm="frozen")
    frozen.step(lambda: F.cross_entropy(model(X), Y))
    model.eval()
    sampler().step(lambda: F.cross_entropy(model(X), Y))


def test_full_data_refuses_dropout_and_names_it() -> None:
    model = network(norm=False)
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, acceptance=FullData(), examples=examples)
    with pytest.raises(StochasticClosure, match=r"'3' \(Dropout\)"):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    plain = nn.Linear(5, 3)
    functional = TensorExamples(lambda x, y: F.cross_entropy(F.dropout(plain(x)), y, reduction="none"), X, Y)
    other = AdamMCMC(plain.parameters(), num_data=64, sigma=1e-2, acceptance=FullData(), examples=functional)
    with pytest.raises(StochasticClosure, match="draws random numbers"):
        other.step(lambda: F.cross_entropy(plain(X), Y))


def test_batch_statistics_of_all_data_are_a_function_of_the_weights() -> None:
    """With fixed data BatchNorm is deterministic, so an exact sampler is allowed; dropout is refused."""
    model = network(dropout=0.0)
    sampler = Underdamped(model.parameters(), 1e-2, num_data=64, prior=Gaussian(), fixed_data=True)
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert sampler.approximations() == []
    model = network()
    with pytest.raises(StochasticClosure, match=r"At fault: '3' \(Dropout\)"):
        Underdamped(model.parameters(), 1e-2, num_data=64, prior=Gaussian(), fixed_data=True).step(
            lambda: F.cross_entropy(model(X), Y)
        )


def test_a_density_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(StochasticClosure, match="two different values at the same point"):
        sample_density(lambda x: -F.dropout(x.square()).sum(1), torch.ones(5, 30), kernels.mala(0.1), num_steps=2)


def test_the_sampler_s_own_noise_is_not_rewound_with_the_mask() -> None:
    """Even if it draws from torch's default generator, whose numbers the closure uses too."""
    model = network(norm=False)
    sampler = AdamMCMC(model.parameters(), lr=0.0, num_data=64, sigma=1e-2, generator=torch.default_generator)
    torch.manual_seed(0)
    moves = []
    for _ in range(6):
        before = everything(model)
        sampler.step(lambda: 0 * F.cross_entropy(model(X), Y))
        moves.append(model[0].weight.detach() - before[0])
    assert all(not torch.equal(a, b) for i, a in enumerate(moves) for b in moves[:i])


def test_an_error_in_the_closure_leaves_buffers_as_they_were() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        loss = F.cross_entropy(model(X), Y)
        if len(calls) in (1, 5):
            raise KeyError("broken data")
        return loss

    for _ in range(4):
        before = everything(model)
        try:
            sampler.step(closure)
        except KeyError:
            assert same(before, everything(model))
    assert len(calls) > 5


def test_check_closure_names_the_layers() -> None:
    model = network()
    before = everything(model)
    report = check_closure(lambda: F.cross_entropy(model(X), Y))
    assert not report.is_deterministic
    assert report.losses[0] != report.losses[1]
    assert report.random_layers == ["'3' (Dropout)"]
    assert report.batch_layers == ["'1' (BatchNorm1d)"]
    assert "'1' (BatchNorm1d).running_mean" in report.moved_buffers
    assert same(before, everything(model))
    for words in ("differ", "'3' (Dropout)", "use batch statistics", "changed by a call"):
        assert words in str(report)
    model.eval()
    report = check_closure(lambda: F.cross_entropy(model(X), Y))
    assert report.is_deterministic
    assert str(report) == "two calls at the same weights agree bit for bit"


def test_check_closure_takes_every_kind_of_closure() -> None:
    model = network(norm=False).eval()

    def calls_backward() -> Tensor:
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    assert check_closure(calls_backward).is_deterministic
    assert check_closure([lambda: F.cross_entropy(model(X[:32]), Y[:32]), lambda: F.cross_entropy(model(X[32:]), Y[32:])])


def test_the_released_behaviour_changes_the_acceptance() -> None:
    """Other masks on the two sides, as in the released code: the ratio is then mostly the noise of the masks."""
    model = network(dropout=0.5)
    start = copy.deepcopy(model.state_dict())

    def run(other_masks: bool) -> tuple[float, float]:
        model.load_state_dict(start)
        torch.manual_seed(1)
        sampler = AdamMCMC(model.parameters(), lr=1e-4, num_data=6400, sigma=1e-4, sigma_along=2.0, generator=seeded())
        noise = torch.Generator().manual_seed(2)

        def closure() -> Tensor:
            if other_masks:
                torch.manual_seed(int(torch.randint(2**31, (), generator=noise)))
            return F.cross_entropy(model(X), Y)

        rates, ratios = [], []
        for _ in range(150):
            sampler.step(closure)
            rates.append(float(sampler.info.acceptance_rate))
            ratios.append(abs(float(sampler.info.log_ratio)))
        return sum(rates) / len(rates), sum(ratios) / len(ratios)

    (rate, size), (released_rate, released_size) = run(False), run(True)
    assert released_size > 20 * size
    assert abs(rate - released_rate) > 0.1
    assert 0 < released_rate < 1


def test_spectral_norm_and_other_moving_buffers_are_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3)).train()
    sampler = AdamMCMC(model.parameters(), num_data=64, lr=1e-2, sigma=0.3, generator=seeded())
    rejected = 0
    for _ in range(20):
        before = everything(model)
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        if not sampler.info.is_accepted:
            rejected += 1
            assert same(before, everything(model))
    assert rejected > 0


def test_always_accept_moves_buffers_once() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=0.0, acceptance=AlwaysAccept())
    for k in range(1, 4):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        assert int(model[1].num_batches_tracked) == k
    assert math.isfinite(float(sampler.info.loss))


# --- changes between steps --------------------------------------------------------------------------------------------


def fixed(model: nn.Module, **options: object) -> Underdamped:
    return Underdamped(model.parameters(), 1e-6, num_data=64, prior=Gaussian(), fixed_data=True, generator=seeded(), **options)


def test_dropout_switched_on_under_fixed_data_is_refused() -> None:
    model = network(norm=False).eval()
    sampler = fixed(model)
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    model.train()
    with pytest.raises(StochasticClosure, match="Dropout"):
        sampler.step(lambda: F.cross_entropy(model(X), Y))


def test_functional_dropout_is_detected_by_its_random_numbers() -> None:
    class Functional(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    model = Functional(5, 3).eval()
    sampler = fixed(model)
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    model.train()
    with pytest.raises(StochasticClosure, match="the loss draws random numbers"):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    other = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2)
    other.step(lambda: F.cross_entropy(model(X), Y))
    assert "the loss draws new random numbers at each step" in other.approximations()


@pytest.mark.parametrize("how", ["mode", "statistics"])
def test_caches_are_dropped_when_the_loss_changes(how: str) -> None:
    """Another mode, or statistics that the user's own forwards moved: a move of length zero must still have Y = 0."""
    model = network(dropout=0.0)
    for _ in range(20):
        model(X + 1)
    sampler = fixed(model, batch_norm="frozen")
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    if how == "mode":
        model.eval()
        model[1].train()
    else:
        model(5 * X)
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    assert abs(float(sampler.info.log_ratio)) < 0.01


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_seen_from_outside(is_warm: bool) -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    if is_warm:
        compiled(X)
    sampler = AdamMCMC(model.parameters(), lr=1e-2, num_data=64, sigma=0.2, generator=seeded())
    rejected = 0
    for _ in range(15):
        before = everything(model)
        sampler.step(lambda: F.cross_entropy(compiled(X), Y))
        if not sampler.info.is_accepted:
            rejected += 1
            assert same(before, everything(model))
    assert rejected > 3
    assert "BatchNorm: batch statistics" in sampler.describe()
    assert "dropout: one mask" in sampler.describe()


def test_batch_norm_without_running_statistics_uses_the_batch_in_every_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)).eval()
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, acceptance=FullData(), examples=examples)
    with pytest.raises(PerExampleLossRequired, match="BatchNorm1d"):
        sampler.step(lambda: F.cross_entropy(model(X), Y))


def test_functional_batch_statistics_are_detected() -> None:
    model = nn.Linear(5, 3)
    examples = TensorExamples(
        lambda x, y: F.cross_entropy(F.batch_norm(model(x), None, None, training=True), y, reduction="none"), X, Y
    )
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, acceptance=FullData(), examples=examples)
    with pytest.raises(PerExampleLossRequired, match="differ from those of its halves"):
        sampler.step(lambda: F.cross_entropy(model(X), Y))


class Counter(nn.Module):
    """A buffer that moves, from some call on."""

    def __init__(self, rests: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls, self.rests = 0, rests

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.rests:
            self.count += 1
        return x


@pytest.mark.parametrize("rests", [0, 7])
def test_a_buffer_that_starts_to_move_later_is_put_back_too(rests: int) -> None:
    model = nn.Sequential(nn.Linear(5, 8), Counter(rests), nn.Tanh(), nn.Linear(8, 3))
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
    for options in ({}, {"acceptance": FullData(chunk_size=7), "examples": examples}):
        sampler = AdamMCMC(model.parameters(), lr=1e-2, num_data=64, sigma=0.1, generator=seeded(), **options)
        for _ in range(20):
            before = float(model[1].count)
            sampler.step(lambda: F.cross_entropy(model(X), Y))
            assert float(model[1].count) - before in ((0, 1) if sampler.info.is_accepted else (0,))


@pytest.mark.filterwarnings("ignore:burn-in reached")
def test_the_pilot_of_the_exact_chain_leaves_no_trace() -> None:
    model = network(dropout=0.0)
    sampler = OPTIMIZERS["ExactAdamMCMC"](model, burn_in=60)
    for _ in range(70):
        before, tracked = everything(model), int(model[1].num_batches_tracked)
        sampler.step(lambda: F.cross_entropy(model(X), Y))
        if sampler.info.is_accepted:
            assert int(model[1].num_batches_tracked) == tracked + 1
        else:
            assert same(before, everything(model))


# --- the statistics of a draw -------------------------------------------------------------------------------------------


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(60, 3, generator=seeded())
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    return net, x, torch.sin(x[:, :1])


def classes() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(600, 4, generator=seeded())
    norms = [nn.BatchNorm1d(8, momentum=0.01), nn.BatchNorm1d(8)]
    net = nn.Sequential(nn.Linear(4, 8), norms[0], nn.ReLU(), nn.Linear(8, 8), norms[1], nn.ReLU(), nn.Linear(8, 3))
    return net, x, x[:, :3].argmax(1)


def images() -> tuple[nn.Module, Tensor, Tensor]:
    """Few values in a channel: there the two variances, divided by n and by n - 1, differ most."""
    x = torch.randn(6, 1, 4, 4, generator=seeded())
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    return net, x, torch.arange(6) % 2


TASKS = {"regression": regression, "classes": classes, "images": images}
ALGORITHM_1 = partial(AdamMCMC, lr=3e-3, sigma=3e-2, sigma_along=2.0, prior=Gaussian())


def loss_in_evaluation_mode(model: nn.Module, draw: dict[str, Tensor], loss: object, x: Tensor, y: Tensor) -> float:
    twin = copy.deepcopy(model).eval()
    twin.load_state_dict(draw)
    with torch.no_grad():
        return float(loss(twin(x), y).mean())  # type: ignore[operator]


@pytest.mark.parametrize("how", ["alone", "stacked", "loop"])
@pytest.mark.parametrize("task", TASKS)
def test_a_draw_in_evaluation_mode_is_the_function_that_was_sampled(task: str, how: str) -> None:
    torch.manual_seed(0)
    model, x, y = TASKS[task]()
    loss = GaussianNLL(0.3) if task == "regression" else F.cross_entropy
    model.train()
    pairs = []
    if how == "loop":
        sampler = ALGORITHM_1(model.parameters(), num_data=len(x), fixed_data=True, generator=seeded())
        for step in range(20):
            sampler.step(lambda: loss(model(x), y).mean())
            if step % 5 == 4:
                pairs.append((sampler.draw(model), float(sampler.present_loss())))
        line = sampler.describe()
    else:
        options = {"num_draws": 4, "gap": 5, "burn_in": 3, "num_chains": 2, "progress": False, "stacked": how == "stacked"}
        posterior = sample(model, (x, y), loss, sampler=ALGORITHM_1, **options)  # type: ignore[arg-type]
        pairs = [(draw, record["loss"]) for draw, record in zip(posterior, posterior.index, strict=True)]
        line = posterior.target
    for draw, sampled in pairs:
        assert loss_in_evaluation_mode(model, draw, loss, x, y) == pytest.approx(sampled, rel=1e-5)
    assert len({sampled for _, sampled in pairs}) > 2
    assert "BatchNorm: batch statistics, recomputed for each draw" in line


def test_a_draw_leaves_no_trace_in_the_chain() -> None:
    """No buffer, mode, gradient, momentum or random number; the network may be in evaluation mode when it is drawn."""

    def run(with_draws: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = network(dropout=0.0)
        extra = nn.Dropout(0.5)
        sampler = Underdamped(model.parameters(), 3e-2, num_data=64, prior=Gaussian(), fixed_data=True, generator=seeded())

        def closure() -> Tensor:
            extra(X)  # random numbers without influence on the loss
            loss = F.cross_entropy(model(X), Y)
            if torch.is_grad_enabled():
                model.zero_grad()
                loss.backward()
            return loss

        for _ in range(12):
            sampler.step(closure)
            if with_draws:
                model[1].eval()
                model[0].weight.grad = torch.ones_like(model[0].weight)
                sampler.draw(model)
                assert not model[1].training
                assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
                model[1].train()
        assert model[1].momentum == 0.1
        assert not model[1]._forward_pre_hooks
        return [*everything(model), torch.get_rng_state()]

    assert same(run(True), run(False))


def test_the_closure_is_called_for_a_draw_only_where_there_are_such_layers() -> None:
    for model, options, more in (
        (network(dropout=0.0), {"fixed_data": True}, 1),
        (network(dropout=0.0, norm=False), {"fixed_data": True}, 0),
        (network(dropout=0.0).eval(), {"fixed_data": True}, 0),
        (network(dropout=0.0), {}, 0),
    ):
        calls = []

        def closure(model: nn.Module = model, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return F.cross_entropy(model(X), Y)

        sampler = ALGORITHM_1(model.parameters(), num_data=64, **options)
        for _ in range(3):
            sampler.step(closure)
        before = len(calls)
        sampler.draw(model)
        assert len(calls) - before == more


def test_statistics_of_micro_batches_are_pooled_and_called_approximate() -> None:
    """Unequal ones too. No single pair of statistics gives the sampled function, and the description says so."""
    model = network(dropout=0.0)
    whole, parts = fixed(model), fixed(model)

    def losses(rows: slice) -> Tensor:
        return F.cross_entropy(model(X[rows]), Y[rows], reduction="none")

    parts.step([lambda: losses(slice(0, 10)), lambda: losses(slice(10, 64))])
    weights = copy.deepcopy(model.state_dict())
    found = parts.draw(model)
    whole.step(lambda: losses(slice(None)))
    model.load_state_dict(weights)
    expected = whole.draw(model)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert parts.approximations() == ["batch statistics tie the loss of an example to its micro-batch"]
    assert parts.describe().endswith("approximate: batch statistics tie the loss of an example to its micro-batch")
    assert whole.approximations() == []


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(2 * torch.tanh(self.norm(x))))


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.BatchNorm1d(5, track_running_stats=False), "'0' (BatchNorm1d)"),
        (
            nn.Sequential(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()),
            "InstanceNorm1d",
        ),
        (Twice(), "'0.norm' (BatchNorm1d)"),
    ],
)
def test_layers_that_evaluation_mode_cannot_reproduce_are_named(layer: nn.Module, name: str) -> None:
    model = nn.Sequential(layer, nn.LazyLinear(3)).train()
    model(X)
    sampler = fixed(model)
    sampler.step(lambda: F.cross_entropy(model(X), Y))
    (reason,) = sampler.approximations()
    assert "predictions use other statistics than the chain" in reason
    assert name in reason
    sampler.draw(model)


def test_a_layer_that_checkpointing_calls_again_is_one_layer() -> None:
    model = network(dropout=0.0)
    sampler = fixed(model)
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False), Y))
    assert sampler.approximations() == []
    draw = sampler.draw(model)
    assert loss_in_evaluation_mode(model, draw, F.cross_entropy, X, Y) == pytest.approx(float(sampler.present_loss()), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["compiled", "momentum None", "not finite"])
def test_statistics_of_a_draw_come_out_of_every_layer(kind: str) -> None:
    model = network(dropout=0.0)
    called = torch.compile(model, backend="eager") if kind == "compiled" else model
    if kind == "momentum None":
        model[1].momentum = None
    sampler = ALGORITHM_1(model.parameters(), num_data=64, fixed_data=True, generator=seeded())
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(called(X), Y))
    if kind == "not finite":
        model[1].running_var.fill_(math.nan)
    draw = sampler.draw(model)
    assert loss_in_evaluation_mode(model, draw, F.cross_entropy, X, Y) == pytest.approx(float(sampler.present_loss()), rel=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_run_with_batch_statistics_resumes_bit_for_bit_and_its_moments_are_of_its_draws(
    stacked: bool, tmp_path: Path
) -> None:
    model = network(dropout=0.0)
    options = {"sampler": ALGORITHM_1, "gap": 2, "burn_in": 3, "num_chains": 2, "stacked": stacked, "progress": False}
    whole = sample(model, (X, Y), F.cross_entropy, num_draws=4, **options)  # type: ignore[arg-type]
    for num_draws in (2, 4):
        path = tmp_path / "run"
        parts = sample(model, (X, Y), F.cross_entropy, num_draws=num_draws, path=path, resume=True, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(whole, parts, strict=True) for key in a)
    moments = sample(model, (X, Y), F.cross_entropy, num_draws=4, keep="moments", **options).moments()  # type: ignore[arg-type]
    mean = torch.stack([draw["1.running_var"].double() for draw in whole]).mean(0)
    torch.testing.assert_close(moments.mean["1.running_var"], mean)
