"""Hierarchical models: eight schools, varying intercepts and slopes, item response."""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from benchmarks.posteriors.arrays import Array, Arrays
from benchmarks.posteriors.laws import bernoulli, log_half_cauchy, log_half_normal, normal
from benchmarks.posteriors.target import Target

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools_noncentred() -> Target:
    """y_j ~ N(mu + tau z_j, s_j^2), z_j ~ N(0, 1), mu ~ N(0, 5^2), tau ~ |Cauchy(0, 5)|."""

    def density(xp: Arrays, mu: Array, log_tau: Array, z: Array) -> Array:
        prior = normal(xp, mu, 0.0, 5.0) + log_half_cauchy(xp, log_tau, 5.0) + normal(xp, z)
        return prior + normal(xp, xp.array(EFFECTS), mu + xp.exp(log_tau) * z, xp.array(ERRORS))

    blocks = {"mu": 1, "log_tau": 1, "z": 8}
    return Target("eight_schools_noncentred", "eight schools, non-centred", blocks, density)


def eight_schools_centred() -> Target:
    """The same in theta_j = mu + tau z_j: a funnel, narrow where tau is small. Its reference is drawn non-centred."""

    def density(xp: Arrays, mu: Array, log_tau: Array, theta: Array) -> Array:
        prior = normal(xp, mu, 0.0, 5.0) + log_half_cauchy(xp, log_tau, 5.0) + normal(xp, theta, mu, xp.exp(log_tau))
        return prior + normal(xp, xp.array(EFFECTS), theta, xp.array(ERRORS))

    def centred(x: np.ndarray) -> np.ndarray:
        theta = x[:, :1] + np.exp(x[:, 1:2]) * x[:, 2:]
        return np.concatenate([x[:, :2], theta], 1)

    blocks = {"mu": 1, "log_tau": 1, "theta": 8}
    via = ("eight_schools_noncentred", centred)
    return Target("eight_schools_centred", "eight schools, centred", blocks, density, via=via)


def varying_intercepts() -> Target:
    """Radon-like: 400 houses in 40 counties of unequal size, centred.

    y_i ~ N(alpha_c(i) + beta floor_i, sigma^2), alpha_c ~ N(mu + gamma u_c, tau^2), mu, beta, gamma ~ N(0, 5^2),
    tau, sigma ~ |N(0, 1)|; u_c is the county's uranium level.
    """
    rng = default_rng(201)
    n, counties = 400, 40
    county = rng.choice(counties, n, p=rng.dirichlet(np.full(counties, 2.0)))
    floor = (rng.random(n) < 0.2).astype(float)
    uranium = rng.normal(0, 0.4, counties)
    alpha = 1.4 + 0.7 * uranium + 0.25 * rng.normal(size=counties)
    y = alpha[county] - 0.65 * floor + 0.75 * rng.normal(size=n)
    member = np.eye(counties)[:, county]

    def density(xp: Arrays, mu: Array, gamma: Array, beta: Array, log_tau: Array, log_sigma: Array, alpha: Array) -> Array:
        prior = sum(normal(xp, x, 0.0, 5.0) for x in (mu, gamma, beta))
        prior = prior + log_half_normal(xp, log_tau) + log_half_normal(xp, log_sigma)
        prior = prior + normal(xp, alpha, mu + gamma * xp.array(uranium), xp.exp(log_tau))
        return prior + normal(xp, xp.array(y), alpha @ xp.array(member) + beta * xp.array(floor), xp.exp(log_sigma))

    blocks = {"mu": 1, "gamma": 1, "beta": 1, "log_tau": 1, "log_sigma": 1, "alpha": counties}
    return Target("varying_intercepts", "varying intercepts, radon-like", blocks, density)


def varying_slopes() -> Target:
    """Random intercepts and slopes with an unknown correlation: 25 groups of 8, non-centred, LKJ(2) prior.

    (u_g, v_g) = diag(tau) L (z_g, w_g), L = [[1, 0], [rho, sqrt(1 - rho^2)]], rho = tanh(r), p(rho) ~ 1 - rho^2;
    y ~ N(mu_1 + u_g + (mu_2 + v_g) x, sigma^2), mu ~ N(0, 5^2), tau, sigma ~ |N(0, 1)|.
    """
    rng = default_rng(202)
    groups, each = 25, 8
    group = np.repeat(np.arange(groups), each)
    x = rng.normal(size=groups * each)
    u, v = rng.multivariate_normal([0, 0], [[0.64, -0.24], [-0.24, 0.25]], groups).T
    y = 1.0 + u[group] + (0.5 + v[group]) * x + 0.6 * rng.normal(size=len(x))
    member = np.eye(groups)[:, group]

    def density(xp: Arrays, mu: Array, log_tau: Array, r: Array, log_sigma: Array, z: Array, w: Array) -> Array:
        rho, tau = xp.tanh(r), xp.exp(log_tau)
        log_cosh = xp.softplus(2 * r) - r  # and log 2
        u = tau[..., :1] * z
        v = tau[..., 1:] * (rho * z + xp.exp(-log_cosh) * 2 * w)  # sqrt(1 - tanh^2) = 1 / cosh
        prior = normal(xp, mu, 0.0, 5.0) + log_half_normal(xp, log_tau) + log_half_normal(xp, log_sigma)
        prior = prior + normal(xp, z) + normal(xp, w) - 4 * xp.sum(log_cosh)
        mean = (mu[..., :1] + u) @ xp.array(member) + (mu[..., 1:] + v) @ xp.array(member * x)
        return prior + normal(xp, xp.array(y), mean, xp.exp(log_sigma))

    blocks = {"mu": 2, "log_tau": 2, "r": 1, "log_sigma": 1, "z": groups, "w": groups}
    return Target("varying_slopes", "correlated intercepts and slopes, LKJ", blocks, density)


def item_response() -> Target:
    """Two-parameter logistic model: 60 persons answer 15 items.

    y_ij ~ Bernoulli(sigmoid(exp(log_a_j) (theta_i - b_j))), theta ~ N(0, 1), log_a ~ N(0, 0.5^2), b ~ N(mu, tau^2),
    mu ~ N(0, 2^2), tau ~ |N(0, 1)|.
    """
    rng = default_rng(203)
    persons, items = 60, 15
    ability, slope, level = rng.normal(size=persons), np.exp(0.4 * rng.normal(size=items)), rng.normal(0.3, 1.0, items)
    y = (rng.random((persons, items)) < 1 / (1 + np.exp(-slope * (ability[:, None] - level)))).astype(float)

    def density(xp: Arrays, mu: Array, log_tau: Array, log_a: Array, b: Array, theta: Array) -> Array:
        prior = normal(xp, mu, 0.0, 2.0) + log_half_normal(xp, log_tau) + normal(xp, theta)
        prior = prior + normal(xp, log_a, 0.0, 0.5) + normal(xp, b, mu, xp.exp(log_tau))
        logit = xp.exp(log_a)[..., None, :] * (theta[..., :, None] - b[..., None, :])
        return prior + xp.sum(bernoulli(xp, xp.array(y), logit))

    blocks = {"mu": 1, "log_tau": 1, "log_a": items, "b": items, "theta": persons}
    return Target("item_response", "item response, two parameters", blocks, density)
