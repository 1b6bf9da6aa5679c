"""Time series and dynamics: volatility, state space, a change point, rates of decay, a differential equation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng

from benchmarks.posteriors.arrays import Array, Arrays, recurrence
from benchmarks.posteriors.laws import log_gamma, log_half_normal, logit_beta, normal
from benchmarks.posteriors.target import Target


def garch() -> Target:
    """GARCH(1,1) on 300 returns: y_t ~ N(mu, s_t^2), s_t^2 = w + alpha (y_(t-1) - mu)^2 + beta s_(t-1)^2.

    mu ~ N(0, 1), w ~ |N(0, 1)|, (alpha, beta) uniform on alpha, beta > 0, alpha + beta < 1: alpha = sigmoid(p),
    beta = (1 - alpha) sigmoid(q).
    """
    rng = default_rng(301)
    n, variance, y = 300, 0.5, np.zeros(300)
    for t in range(n):
        y[t] = 0.1 + np.sqrt(variance) * rng.normal()
        variance = 0.1 + 0.2 * (y[t] - 0.1) ** 2 + 0.65 * variance
    first = y.var()

    def density(xp: Arrays, mu: Array, log_w: Array, p: Array, q: Array) -> Array:
        alpha = xp.sigmoid(p)
        beta = xp.sigmoid(-p) * xp.sigmoid(q)
        squares = (xp.array(y) - mu) ** 2
        inputs = xp.concat([xp.zeros_like(mu) + first, xp.exp(log_w) + alpha * squares[..., :-1]])
        variance = recurrence(xp, inputs, beta)
        prior = normal(xp, mu) + log_half_normal(xp, log_w) + logit_beta(xp, p, 1.0, 2.0) + logit_beta(xp, q, 1.0, 1.0)
        return prior - 0.5 * xp.sum(squares / variance + xp.log(variance))

    return Target("garch", "GARCH(1,1)", {"mu": 1, "log_w": 1, "p": 1, "q": 1}, density)


def stochastic_volatility() -> Target:
    """y_t ~ N(0, exp(h_t)), h an autoregression, non-centred, 100 returns.

    h_t - mu = phi (h_(t-1) - mu) + sigma z_t, h_0 stationary, phi = 2 sigmoid(p) - 1 with sigmoid(p) ~ Beta(20, 1.5),
    sigma = 0.2 exp(0.7 s), s ~ N(0, 1), mu ~ N(0, 2^2), z ~ N(0, 1).
    """
    rng = default_rng(302)
    n, h, y = 100, -0.5, np.zeros(100)
    for t in range(n):
        h = -0.5 + 0.95 * (h + 0.5) + 0.25 * rng.normal()
        y[t] = np.exp(h / 2) * rng.normal()

    def density(xp: Arrays, mu: Array, p: Array, s: Array, z: Array) -> Array:
        phi = xp.tanh(0.5 * p)
        scale = 0.2 * xp.exp(0.7 * s)
        stationary = xp.exp(0.5 * (xp.softplus(p) + xp.softplus(-p))) / 2  # (1 - phi^2)^(-1/2) = cosh(p / 2)
        h = mu + recurrence(xp, scale * xp.concat([stationary * z[..., :1], z[..., 1:]]), phi)
        prior = normal(xp, mu, 0.0, 2.0) + logit_beta(xp, p, 20.0, 1.5) + normal(xp, s) + normal(xp, z)
        return prior - 0.5 * xp.sum(xp.array(y**2) * xp.exp(-h) + h)

    return Target("stochastic_volatility", "stochastic volatility", {"mu": 1, "p": 1, "s": 1, "z": n}, density)


def random_walk() -> Target:
    """A random walk of 40 steps seen with noise, ten in the middle unseen: x_t ~ N(x_(t-1), q^2), y_t ~ N(x_t, r^2).

    x_0 ~ N(0, 1), log q, log r ~ N(-1, 0.5^2); centred. (With a prior that allows q = 0 this would be a funnel.)
    """
    rng = default_rng(303)
    n = 40
    walk = np.cumsum(rng.normal(0, 0.3, n))
    y = walk + rng.normal(0, 0.4, n)
    seen = np.r_[0:15, 25:40]

    def density(xp: Arrays, log_q: Array, log_r: Array, x: Array) -> Array:
        prior = normal(xp, log_q, -1.0, 0.5) + normal(xp, log_r, -1.0, 0.5) + normal(xp, x[..., :1])
        prior = prior + normal(xp, x[..., 1:], x[..., :-1], xp.exp(log_q))
        shown = xp.concat([x[..., :15], x[..., 25:]])
        return prior + normal(xp, xp.array(y[seen]), shown, xp.exp(log_r))

    return Target("random_walk", "random walk with noise and a gap", {"log_q": 1, "log_r": 1, "x": n}, density)


def change_point() -> Target:
    """Accidents in 110 years, with a rate that changes once, at a year summed out.

    y_t ~ Poisson(exp(e)) before the change and Poisson(exp(l)) from it on, the year uniform, both rates ~ Gamma(2, 1).
    """
    rng = default_rng(304)
    n = 110
    y = np.concatenate([rng.poisson(3.0, 42), rng.poisson(1.1, n - 42)]).astype(float)
    before = np.cumsum(y)[:-1]
    years = np.arange(1.0, n)

    def density(xp: Arrays, e: Array, l: Array) -> Array:  # noqa: E741
        early = xp.array(before) * e - xp.array(years) * xp.exp(e)
        late = xp.array(y.sum() - before) * l - xp.array(n - years) * xp.exp(l)
        return log_gamma(xp, e, 2.0, 1.0) + log_gamma(xp, l, 2.0, 1.0) + xp.logsumexp(early + late)

    return Target("change_point", "Poisson change point, summed out", {"e": 1, "l": 1}, density)


def two_rates() -> Target:
    """A decay of two rates: y(t) ~ N(A exp(-k t) + B exp(-(k + d) t), sigma^2), 40 times.

    log A, log B ~ N(0, 1), log k ~ N(-2, 1), log d ~ N(0, 1), sigma ~ |N(0, 0.5^2)|. The slow and the fast rate differ by 15.
    """
    rng = default_rng(305)
    t = np.concatenate([np.linspace(0.1, 3, 25), np.linspace(4, 25, 15)])
    y = 1.0 * np.exp(-0.08 * t) + 2.0 * np.exp(-1.2 * t) + 0.05 * rng.normal(size=len(t))

    def density(xp: Arrays, log_a: Array, log_b: Array, log_k: Array, log_d: Array, log_sigma: Array) -> Array:
        slow = xp.exp(log_k)
        mean = xp.exp(log_a - slow * xp.array(t)) + xp.exp(log_b - (slow + xp.exp(log_d)) * xp.array(t))
        prior = normal(xp, log_a) + normal(xp, log_b) + normal(xp, log_k, -2.0) + normal(xp, log_d)
        return prior + log_half_normal(xp, log_sigma, 0.5) + normal(xp, xp.array(y), mean, xp.exp(log_sigma))

    blocks = {"log_a": 1, "log_b": 1, "log_k": 1, "log_d": 1, "log_sigma": 1}
    return Target("two_rates", "exponential decay with two rates", blocks, density)


def lotka_volterra() -> Target:
    """Predator and prey, in logarithms: u' = a - b exp(v), v' = d exp(u) - c, by 20 Runge-Kutta steps of 0.5.

    The four rates are (0.6, 0.3, 0.8, 0.3) exp(0.5 z), the initial sizes 3 exp(0.5 i), z, i ~ N(0, 1); the logarithm of
    each size is seen with noise sigma ~ |N(0, 0.5^2)| after each step.
    """
    rng = default_rng(306)
    count, h = 20, 0.5
    centres = np.log([0.6, 0.3, 0.8, 0.3])

    def path(xp: Arrays, z: Array, i: Array) -> list[Array]:
        rates = xp.exp(xp.array(centres) + 0.5 * z)
        a, b, c, d = (rates[..., j : j + 1] for j in range(4))

        def slope(u: Array, v: Array) -> tuple[Array, Array]:
            return a - b * xp.exp(v), d * xp.exp(u) - c

        def step(state: Sequence[Array]) -> Sequence[Array]:
            u, v = state
            u1, v1 = slope(u, v)
            u2, v2 = slope(u + 0.5 * h * u1, v + 0.5 * h * v1)
            u3, v3 = slope(u + 0.5 * h * u2, v + 0.5 * h * v2)
            u4, v4 = slope(u + h * u3, v + h * v3)
            return u + h / 6 * (u1 + 2 * u2 + 2 * u3 + u4), v + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)

        first = np.log(3.0) + 0.5 * i
        return list(xp.iterate(step, (first[..., :1], first[..., 1:]), count))

    truth = _path_of_truth(path)
    y = truth + 0.2 * rng.normal(size=truth.shape)

    def density(xp: Arrays, z: Array, i: Array, log_sigma: Array) -> Array:
        u, v = path(xp, z, i)
        prior = normal(xp, z) + normal(xp, i) + log_half_normal(xp, log_sigma, 0.5)
        sigma = xp.exp(log_sigma)
        return prior + normal(xp, xp.array(y[0]), u, sigma) + normal(xp, xp.array(y[1]), v, sigma)

    return Target("lotka_volterra", "Lotka-Volterra equations", {"z": 4, "i": 2, "log_sigma": 1}, density, start_sd=0.7)


def _path_of_truth(path: object) -> np.ndarray:
    """The path at z = 0.2, i = (0.4, -0.4), (2, steps)."""
    from benchmarks.posteriors.arrays import torch_arrays

    xp = torch_arrays()
    u, v = path(xp, xp.array([0.2, 0.2, 0.2, 0.2]), xp.array([0.4, -0.4]))  # type: ignore[operator]
    return np.stack([u.numpy(), v.numpy()])
