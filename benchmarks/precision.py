"""What bfloat16 arithmetic in the loss does to an exact chain, beside the roughness of U that the sampler reports.

    python -m benchmarks.precision [--num-data 500 5000 50000]

A network of 41 weights on a regression with all data at once; `Underdamped`, 1,500 steps of burn-in and 6,000 after
them. The predictions at nine points are compared with those of a chain in float64, which a second one in float64
repeats.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn

from adammcmc import BurnIn, Gaussian, Underdamped

NOISE = 0.3


def data(num_data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(8, generator=generator, dtype=torch.float64)
    return x, (0.5 * x @ weights).tanh()[:, None] + NOISE * torch.randn(num_data, 1, generator=generator, dtype=torch.float64)


def chain(num_data: int, dtype: torch.dtype, seed: int, num_steps: int) -> tuple[Tensor, float]:
    """Predictions (draws, 9), and the resolution of U in nats."""
    torch.manual_seed(1)
    x, y = data(num_data)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    adam = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(400):
        rows = torch.randint(num_data, (500,))
        adam.zero_grad()
        ((model(x[rows]) - y[rows]).square().mean() / (2 * NOISE**2)).backward()
        adam.step()
    if dtype == torch.bfloat16:
        model, x, y = model.float(), x.float(), y.float()
    points = torch.randn(9, 8, generator=torch.Generator().manual_seed(9)).to(x.dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = model(x)
        return (outputs.to(y.dtype) - y).square().mean() / (2 * NOISE**2)

    sampler = Underdamped(
        model.parameters(), num_data=num_data, prior=Gaussian(1.0), fixed_data=True, burn_in=BurnIn(num_steps=1500),
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    draws = []
    for step in range(1500 + num_steps):
        sampler.step(loss)
        if step >= 1500:
            draws.append(model(points).detach().double().flatten())
    assert sampler.resolution is not None
    return torch.stack(draws), sampler.resolution.nats


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, nargs="+", default=[500, 5000, 50000])
    parser.add_argument("--num-steps", type=int, default=6000)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print("| n | nats | bfloat16: means off by (sd) | sd / true sd | float64 again: means | sd |\n|---|---|---|---|---|---|")
    for n in options.num_data:
        truth, _ = chain(n, torch.float64, 3, options.num_steps)
        again, _ = chain(n, torch.float64, 4, options.num_steps)
        low, nats = chain(n, torch.bfloat16, 3, options.num_steps)
        off, repeat = (((x.mean(0) - truth.mean(0)) / truth.std(0)).abs() for x in (low, again))
        ratio, same = (x.std(0) / truth.std(0) for x in (low, again))
        print(
            f"| {n} | {nats:.2g} | {off.median():.2f} (at most {off.max():.1f}) | {ratio.min():.2f} to {ratio.max():.2f} | "
            f"{repeat.median():.2f} (at most {repeat.max():.1f}) | {same.min():.2f} to {same.max():.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
