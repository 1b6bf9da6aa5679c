"""Three small network posteriors, a long HMC reference for each, and what every kernel makes of them.

    python -m benchmarks.networks reference [--device cuda] [--chains 128]     # writes benchmarks/reference/*.safetensors
    python -m benchmarks.networks compare [--gradients 5000] [--chains 8]      # prints the table of the docs
    python -m benchmarks.networks optimizers                                   # only the rows of `Underdamped` as an optimizer
    python -m benchmarks.networks two-sided [--output docs/assets/two_sided.png]

The data ship with scikit-learn. Tanh networks, weights N(0, 4 / fan-in), biases N(0, 1), lambda = 1: diabetes 10-50-1 (squared
error with noise 0.7 of the standardised target), breast cancer 30-20-20-1, digits 64-50-10 (500 of them). All chains start from
Adam-trained points, except the chain of Theorem 1: its momentum spread is measured where the underdamped chains ended, and it
starts there.

W2 is the error of a chain's predictive mean m and standard deviation s against those of the reference, over the test inputs,
in units of the reference's own standard deviation: sqrt(mean((m - m')^2 + (s - s')^2) / mean(s'^2)).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from adammcmc import (
    AlwaysAccept,
    BurnIn,
    Density,
    Gaussian,
    Kernel,
    Underdamped,
    kernels,
    sample_density,
    two_sided,
    warm_up,
)
from adammcmc.kernels.proposal import Prolate
from adammcmc.samplers.adaptation import momentum_spread

FOLDER = Path(__file__).parent / "reference"
NAMES = ("diabetes", "cancer", "digits")


@dataclass(frozen=True)
class Problem:
    """A network, its data, and its posterior, for many chains at once: theta is (chains, P) in the order of the modules."""

    name: str
    widths: tuple[int, ...]
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor

    @property
    def num_params(self) -> int:
        return sum(a * b + b for a, b in zip(self.widths, self.widths[1:], strict=False))

    @property
    def scales(self) -> Tensor:
        """Standard deviations of the prior, (P,)."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        parts = [torch.cat([torch.full((a * b,), 2 / math.sqrt(a)), torch.ones(b)]) for a, b in pairs]
        return torch.cat(parts).to(self.inputs)

    def forward(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """(chains, examples, outputs)"""
        x, at = inputs.expand(len(theta), -1, -1), 0
        for i, (a, b) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            weight = theta[:, at : at + a * b].view(-1, b, a)
            bias = theta[:, at + a * b : at + a * b + b]
            x = torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2))
            x = x if i == len(self.widths) - 2 else x.tanh()
            at += a * b + b
        return x

    def losses(self, outputs: Tensor) -> Tensor:
        """Negative log likelihoods from outputs (..., examples, k): (..., examples)."""
        if self.name == "diabetes":
            return 0.5 * ((outputs[..., 0] - self.targets) / 0.7) ** 2
        if self.name == "cancer":
            targets = self.targets.expand(outputs.shape[:-1])
            return F.binary_cross_entropy_with_logits(outputs[..., 0], targets, reduction="none")
        log_p = outputs.log_softmax(-1)
        return -log_p.gather(-1, self.targets.expand(outputs.shape[:-1])[..., None])[..., 0]

    def log_density(self, theta: Tensor) -> Tensor:
        return -self.losses(self.forward(theta, self.inputs)).sum(1) - 0.5 * (theta / self.scales).square().sum(1)

    @torch.no_grad()
    def predict(self, theta: Tensor) -> Tensor:
        """What the network says about the test inputs: values or probabilities, (chains, outputs)."""
        outputs = self.forward(theta, self.test_inputs)
        if self.name == "cancer":
            outputs = outputs.sigmoid()
        elif self.name == "digits":
            outputs = outputs.softmax(-1)
        return outputs.flatten(1)

    def model(self) -> nn.Sequential:
        """The same network as modules."""
        layers: list[nn.Module] = []
        for a, b in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(a, b), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def prior(self, model: nn.Module) -> Gaussian:
        return Gaussian.fan_in(model, gain=2.0)

    def trained(self, num_chains: int, seed: int = 0, num_steps: int = 1500) -> Tensor:
        """Points that Adam arrives at from draws of the prior, (chains, P)."""
        generator = torch.Generator().manual_seed(seed)
        start = 0.5 * torch.randn(num_chains, self.num_params, generator=generator).to(self.inputs) * self.scales
        theta = start.requires_grad_()
        optimizer = torch.optim.Adam([theta], lr=1e-2)
        for _ in range(num_steps):
            optimizer.zero_grad()
            (-self.log_density(theta).sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return theta.detach()


def problem(name: str, device: str = "cpu") -> Problem:
    """One of the three."""
    widths, num_train, num_test = {
        "diabetes": ((10, 50, 1), 400, 42),
        "cancer": ((30, 20, 20, 1), 455, 114),
        "digits": ((64, 50, 10), 500, 100),
    }[name]
    x, y = _load(name)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: num_train + num_test]
    x, y = x[order], y[order]
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6) if name != "digits" else x / 16
    if name == "diabetes":
        y = ((y - y.mean()) / y.std()).float()
    elif name == "cancer":
        y = y.float()
    x, y = x.to(device), y.to(device)
    return Problem(name, widths, x[:num_train], y[:num_train], x[num_train:])


def _load(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    loaders = {"diabetes": datasets.load_diabetes, "cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
    data = loaders[name]()
    return torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)


# --- the reference --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What a long HMC run found."""

    mean: Tensor
    """Predictive mean at the test inputs, (outputs,)."""
    sd: Tensor
    draws: Tensor
    """A few draws of the weights, (draws, P), from different chains."""
    potential: float
    """Mean of U."""
    potential_sd: float
    facts: dict[str, str]


def load_reference(name: str) -> Reference:
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        facts = file.metadata()
        mean, sd, draws = (file.get_tensor(key) for key in ("mean", "sd", "draws"))
    return Reference(mean, sd, draws.float(), float(facts["potential"]), float(facts["potential_sd"]), facts)


def make_reference(name: str, device: str, num_chains: int, num_steps: int, num_leapfrog: int = 20) -> None:
    """HMC with a learnt preconditioner: half of the steps adapt and settle, the other half are kept."""
    began = time.time()
    p = problem(name, device)
    initial = p.trained(num_chains)
    kernel = kernels.hmc(1e-2, num_leapfrog)
    draws, info = sample_density(
        p.log_density,
        initial,
        kernel,
        num_steps=num_steps,
        burn_in=num_steps // 2,
        gap=5,
        tune=BurnIn(num_steps=num_steps // 4),
    )
    values = torch.stack([p.predict(draws[:, i]) for i in range(draws.shape[1])], 1)  # (chains, draws, outputs)
    ess = effective_size(values.cpu())
    r_hat = split_r_hat(values.double().cpu())
    potential = info.potential
    facts = {
        "potential": f"{float(potential.mean()):.4f}",
        "potential_sd": f"{float(potential.std()):.4f}",
        "kernel": f"hmc, {num_leapfrog} leapfrog steps, diagonal preconditioner",
        "acceptance": f"{float(info.acceptance_rate.mean()):.3f}",
        "chains": str(num_chains),
        "steps": str(num_steps),
        "r_hat_median": f"{float(r_hat.median()):.4f}",
        "r_hat_max": f"{float(r_hat.max()):.4f}",
        "effective_draws_median": f"{float(ess.median()):.0f}",
        "command": f"python -m benchmarks.networks reference --device {device} --chains {num_chains} --steps {num_steps}",
        "torch": torch.__version__,
        "seconds": f"{time.time() - began:.0f}",
    }
    FOLDER.mkdir(exist_ok=True)
    kept = draws[torch.arange(16) * num_chains // 16, -1].half()
    flat = values.flatten(0, 1).double()
    tensors = {"mean": flat.mean(0).float().cpu(), "sd": flat.std(0).float().cpu(), "draws": kept.cpu().contiguous()}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata=facts)
    print(name, facts, flush=True)


def split_r_hat(values: Tensor) -> Tensor:
    """R-hat of (chains, draws, outputs), each chain cut in two."""
    half = values.shape[1] // 2
    parts = torch.cat([values[:, :half], values[:, half : 2 * half]])
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0)
    return ((within * (half - 1) / half + between) / within.clamp_min(1e-30)).sqrt()


def effective_size(values: Tensor) -> Tensor:
    """Effective number of draws in (chains, draws, outputs), by Geyer's initial positive sequence."""
    chains, n, _ = values.shape
    centred = (values - values.mean((0, 1))).double()
    spectrum = torch.fft.rfft(centred, n=2 * n, dim=1)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, n=2 * n, dim=1)[:, :n].mean(0) / n
    rho = covariance / covariance[0].clamp_min(1e-300)
    pairs = rho[: n - n % 2].view(-1, 2, rho.shape[1]).sum(1)
    positive = torch.cumprod((pairs > 0).double(), 0)
    time_ = (-1 + 2 * (pairs * positive).sum(0)).clamp_min(1 / n)
    return chains * n / time_


# --- the comparison -------------------------------------------------------------------------------------------------


def error(mean: Tensor, sd: Tensor, reference: Reference) -> float:
    """W2, see above."""
    square = (mean - reference.mean).square() + (sd - reference.sd).square()
    return float((square.mean() / reference.sd.square().mean()).sqrt())


def outputs(p: Problem, draws: Tensor) -> Tensor:
    """What the network says before sigmoid or softmax, (chains, draws, outputs)."""
    with torch.no_grad():
        return torch.stack([p.forward(draws[:, i], p.test_inputs).flatten(1) for i in range(draws.shape[1])], 1)


def measure(p: Problem, kernel: Kernel, initial: Tensor, gradients: int, per_step: int = 1, seed: int = 0) -> dict[str, float]:
    """Run chains with `gradients` gradients each; means over the chains."""
    reference = load_reference(p.name)
    steps = gradients // per_step
    draws, info = sample_density(
        p.log_density, initial, kernel, num_steps=steps, gap=max(1, steps // 2500), seed=seed, progress=False
    )
    values = torch.stack([p.predict(draws[:, i]) for i in range(draws.shape[1])], 1)
    errors = [error(v.mean(0), v.std(0), reference) for v in values]
    return {
        "W2": sum(errors) / len(errors),
        "sd": float(values.std(1).mean() / reference.sd.mean()),
        "acceptance": float(info.acceptance_rate.mean()),
        "U": float(info.potential.mean()),
        "ess": float(effective_size(outputs(p, draws)).median()) / (len(initial) * gradients),
    }


def run_defaults(p: Problem, gradients: int, seed: int = 0, **options: Any) -> dict[str, float]:
    """`Underdamped` as a user has it: one chain in the optimizer API, nothing tuned by hand."""
    reference = load_reference(p.name)
    model = p.model()
    torch.nn.utils.vector_to_parameters(p.trained(1, seed=seed)[0], model.parameters())
    sampler = Underdamped(
        model.parameters(),
        num_data=len(p.inputs),
        prior=p.prior(model),
        fixed_data=True,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )

    def closure() -> Tensor:
        return p.losses(model(p.inputs))

    while sampler.is_adapting:
        sampler.step(closure)
    draws, potentials, used = [], [], 0.0
    while used < gradients:
        for _ in range(4):
            sampler.step(closure)
            potentials.append(float(sampler.info.potential))
        draws.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
        used = sampler.chains.health_sums()[0]["num_gradients"]
    kept = torch.stack(draws)
    values = p.predict(kept)
    health = sampler.health()
    return {
        "W2": error(values.mean(0), values.std(0), reference),
        "sd": float(values.std(0).mean() / reference.sd.mean()),
        "acceptance": health.acceptance,
        "U": sum(potentials) / len(potentials),
        "ess": float(effective_size(outputs(p, kept[None])).median()) / used,
        "ess_potential": float(effective_size(torch.tensor(potentials).double()[None, :, None])) / used,
        "gradients_per_step": used / len(potentials),
        "burn_in": sampler.warm_up.num_gradients,
        "healthy": float(health.is_healthy),
    }


def contenders(p: Problem, initial: Tensor) -> dict[str, tuple[Kernel, Tensor, int]]:
    """Each kernel, adapted from the trained points in a burn-in of its own; where its chains are; gradients in a step."""

    def tuned(kernel: Any, start: Tensor = initial, **options: Any) -> tuple[Any, Tensor]:
        return warm_up(p.log_density, start, kernel, tune=BurnIn(num_steps=3000, **options), progress=False)

    adam: dict[str, Any] = {"lr": 1e-3, "betas": (0.99, 0.99)}
    underdamped, at_rest = tuned(kernels.underdamped(1e-3))
    assert isinstance(underdamped, kernels.UnderdampedKernel)
    microcanonical, at_speed = tuned(kernels.microcanonical(1e-3))
    hmc, after_hmc = warm_up(p.log_density, initial, kernels.hmc(1e-3, 10), tune=BurnIn(num_steps=500), progress=False)
    density = Density(p.log_density)
    spread = momentum_spread(
        density,
        (at_rest,),
        density.evaluate((at_rest,), with_grad=True),
        Prolate(2e-3, 4.0),
        1e-3,
        torch.Generator().manual_seed(0),
    )
    exact, after_exact = tuned(kernels.exact_adam_mcmc(**adam, sigma=2e-3, momentum_spread=spread), at_rest)
    algorithm_1, after_1 = tuned(kernels.adam_mcmc(**adam, sigma=1e-3))
    released, after_released = tuned(kernels.as_released(**adam, sigma=1e-3))
    return {
        "`underdamped`, unadjusted": (replace(underdamped, acceptance=AlwaysAccept()), at_rest, 1),
        "`underdamped`": (underdamped, at_rest, 1),
        "`underdamped`, fresh uniform": (replace(underdamped, persistent_uniform=False), at_rest, 1),
        "`microcanonical`": (microcanonical, at_speed, 1),
        "`microcanonical`, unadjusted": (replace(microcanonical, acceptance=AlwaysAccept()), at_speed, 1),
        "`hmc`, 10 leapfrog steps": (hmc, after_hmc, 10),
        "`mala`, preconditioned": (*tuned(kernels.mala(1e-5)), 1),
        "`mala`": (*tuned(kernels.mala(1e-5), learn_preconditioner=False), 1),
        "`exact_adam_mcmc`": (exact, after_exact, 1),
        "random walk": (
            *tuned(kernels.adam_mcmc(0.0, sigma=1e-3), target_acceptance=0.25, proposal_acceptance=None),
            1,
        ),
        "`adam_mcmc` (Algorithm 1)": (algorithm_1, after_1, 1),
        "`as_released`": (released, after_released, 1),
    }


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "**`Underdamped`, one chain, at its defaults**": {},
    "the same with `num_chances=1`": {"num_chances": 1},
    'the same with `preconditioner="kron"`': {"preconditioner": "kron"},
}


def optimizers(p: Problem, gradients: int, num_seeds: int = 4) -> dict[str, str]:
    """One chain in the optimizer API, means over seeds: its columns of the table."""
    found = {}
    for label, options in OPTIMIZERS.items():
        runs = [run_defaults(p, gradients, seed, **options) for seed in range(num_seeds)]
        d = {key: sum(run[key] for run in runs) / num_seeds for key in runs[0]}
        found[label] = f"{d['W2']:.2f} ({d['sd']:.2f}) | {1e3 * d['ess']:.1f} | {d['acceptance']:.2f}"
        most = max(run["burn_in"] for run in runs)
        print(
            f"{p.name}: {label}: {found[label]} | U {d['U']:.0f} with {1e3 * d['ess_potential']:.1f} effective draws, "
            f"{d['gradients_per_step']:.2f} gradients a step, at most {most:.0f} gradients of burn-in",
            flush=True,
        )
    return found


def compare(names: Sequence[str], gradients: int, num_chains: int) -> None:
    """The table of the docs."""
    cells: dict[str, list[str]] = {}
    for name in names:
        p = problem(name)
        initial = p.trained(num_chains)
        for label, (kernel, start, per_step) in contenders(p, initial).items():
            m = measure(p, kernel, start, gradients, per_step)
            text = f"{m['W2']:.2f} ({m['sd']:.2f}) | {1e3 * m['ess']:.1f} | {m['acceptance']:.2f}"
            print(f"{name}: {label}: {text} | U {m['U']:.0f}", flush=True)
            cells.setdefault(label, []).append(text)
        for label, text in optimizers(p, gradients).items():
            cells.setdefault(label, []).append(text)
    print("\n| kernel | " + " | ".join(f"{n}: W2 (sd) | ESS | acceptance" for n in names) + " |")
    print("|---" * (1 + 3 * len(names)) + "|")
    for label, row in cells.items():
        print(f"| {label} | " + " | ".join(row) + " |")


def draw_two_sided(output: Path, name: str = "digits", num_steps: int = 3000) -> None:
    """U from the reference and from the optimum, for an exact kernel and for Algorithm 1."""
    from matplotlib.figure import Figure

    p, reference = problem(name), load_reference(name)
    initial = p.trained(len(reference.draws))
    adam: dict[str, Any] = {"lr": 1e-3, "betas": (0.99, 0.99)}
    panels = {
        "`underdamped`: exact": kernels.underdamped(1e-3),
        "`adam_mcmc`: Algorithm 1": kernels.adam_mcmc(**adam, sigma=1e-3),
    }
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    for axes, (label, kernel) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        tuned, _ = warm_up(p.log_density, initial, kernel, tune=BurnIn(num_steps=2000), progress=False)
        test = two_sided(p.log_density, tuned, reference.draws, initial, num_steps=num_steps, progress=False)
        print(f"{label}: {test.verdict} (drift {test.drift:.1f}, gap {test.gap:.1f} standard errors)", flush=True)
        axes.axhline(reference.potential, color="0.6", linewidth=3, label="the target's level (long HMC)")
        axes.plot(test.from_reference.mean(0), color="#0072B2", label="from draws of the target")
        axes.plot(test.from_optimum.mean(0), color="#D55E00", label="from the optimum")
        axes.set_title(label.replace("`", ""))
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("U, mean over 16 chains")
    figure.axes[0].legend(loc="center right", framealpha=0.9)
    figure.savefig(output, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["reference", "compare", "optimizers", "two-sided"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chains", type=int, default=None)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--gradients", type=int, default=5000)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("--output", type=Path, default=Path("docs/assets/two_sided.png"))
    arguments = parser.parse_args()
    if arguments.job == "reference":
        for name in arguments.names:
            make_reference(name, arguments.device, arguments.chains or 128, arguments.steps)
    elif arguments.job == "optimizers":
        for name in arguments.names:
            optimizers(problem(name), arguments.gradients)
    elif arguments.job == "compare":
        compare(arguments.names, arguments.gradients, arguments.chains or 8)
    else:
        draw_two_sided(arguments.output)


if __name__ == "__main__":
    main()
