"""Targets known for their shape: Gaussian processes, mixtures, a simplex, funnels, bananas, ill-conditioned Gaussians."""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from benchmarks.posteriors.arrays import Array, Arrays
from benchmarks.posteriors.laws import log_gamma, log_half_normal, log_inverse_gamma, logit_beta, normal
from benchmarks.posteriors.target import Moments, Target


def gaussian_rotated() -> Target:
    """N(m, Q diag(s^2) Q') in 50 dimensions, Q a random rotation, variances s^2 from 10^-2 to 10^2, m ~ N(0, 1)."""
    rng = default_rng(401)
    dim = 50
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    sd = np.logspace(-1, 1, dim)
    mean = rng.normal(size=dim)

    def density(xp: Arrays, x: Array) -> Array:
        return -0.5 * xp.sum((((x - xp.array(mean)) @ xp.array(rotation)) / xp.array(sd)) ** 2)

    def exact() -> Moments:
        return mean, np.sqrt(((rotation * sd) ** 2).sum(1))

    return Target("gaussian_rotated", "Gaussian of condition 10^4, rotated", {"x": dim}, density, exact=exact)


def banana() -> Target:
    """Five independent bananas: x_i ~ N(1, 1), y_i ~ N(x_i^2, 0.25^2), as Rosenbrock's function has them."""

    def density(xp: Arrays, x: Array, y: Array) -> Array:
        return normal(xp, x, 1.0, 1.0) + normal(xp, y, x * x, 0.25)

    def exact() -> Moments:  # x^2 = (1 + g)^2: mean 2, variance 4 + 2
        return np.repeat([1.0, 2.0], 5), np.repeat([1.0, np.sqrt(6.0 + 0.25**2)], 5)

    return Target("banana", "five Rosenbrock bananas", {"x": 5, "y": 5}, density, exact=exact)


def funnel_noncentred() -> Target:
    """Neal's funnel with one faint observation of each of nine, non-centred: y_i ~ N(exp(v / 2) z_i, 1), v ~ N(0, 3^2)."""
    y = default_rng(402).normal(0, 1.3, 9)

    def density(xp: Arrays, v: Array, z: Array) -> Array:
        return normal(xp, v, 0.0, 3.0) + normal(xp, z) + normal(xp, xp.array(y), xp.exp(0.5 * v) * z)

    return Target("funnel_noncentred", "funnel with data, non-centred", {"v": 1, "z": 9}, density)


def simplex() -> Target:
    """Shares p of eight categories from sparse counts: p ~ Dirichlet(1/2 + counts), x_j = log p_j - log p_8.

    The density in x is that of p times the Jacobian p_1 ... p_8.
    """
    weights = 0.5 + np.array([40.0, 12.0, 5.0, 3.0, 1.0, 1.0, 0.0, 6.0])

    def density(xp: Arrays, x: Array) -> Array:
        logits = xp.concat([x, xp.zeros_like(x[..., :1])])
        return xp.sum(xp.array(weights) * logits) - weights.sum() * xp.logsumexp(logits)

    def exact() -> Moments:
        from scipy.special import digamma, polygamma

        mean, variance = digamma(weights), polygamma(1, weights)
        return mean[:-1] - mean[-1], np.sqrt(variance[:-1] + variance[-1])

    return Target("simplex", "Dirichlet on a simplex, sparse counts", {"x": 7}, density, exact=exact)


def mixture() -> Target:
    """Two normals with ordered means: y ~ w N(m, s_1^2) + (1 - w) N(m + d, s_2^2), 200 points.

    m ~ N(0, 5^2), d ~ Gamma(2, 0.5), s ~ Gamma(3, 3), w ~ Beta(5, 5).
    """
    rng = default_rng(403)
    y = np.where(rng.random(200) < 0.35, rng.normal(-1.2, 0.7, 200), rng.normal(1.5, 1.0, 200))

    def density(xp: Arrays, m: Array, log_d: Array, log_s: Array, logit_w: Array) -> Array:
        means = (m, m + xp.exp(log_d))
        log_w = (-xp.softplus(-logit_w), -xp.softplus(logit_w))
        parts = []
        for j in range(2):
            s = log_s[..., j : j + 1]
            parts.append(log_w[j] - s - 0.5 * ((xp.array(y) - means[j]) * xp.exp(-s)) ** 2)
        prior = normal(xp, m, 0.0, 5.0) + log_gamma(xp, log_d, 2.0, 0.5) + log_gamma(xp, log_s, 3.0, 3.0)
        return prior + logit_beta(xp, logit_w, 5.0, 5.0) + xp.sum(xp.logsumexp(xp.stack(parts)))

    blocks = {"m": 1, "log_d": 1, "log_s": 2, "logit_w": 1}
    return Target("mixture", "mixture of two normals, ordered means", blocks, density)


def gp_regression() -> Target:
    """Gaussian process, its values integrated out: y ~ N(0, a^2 K + sigma^2 I), K_ij = exp(-(t_i - t_j)^2 / (2 l^2)).

    25 points; l ~ InverseGamma(3, 3), a ~ |N(0, 2^2)|, sigma ~ |N(0, 1)|.
    """
    rng = default_rng(404)
    t = np.sort(rng.uniform(0, 10, 25))
    y = np.sin(t) + 0.4 * np.cos(2.3 * t) + 0.25 * rng.normal(size=len(t))
    squares = (t[:, None] - t) ** 2

    def density(xp: Arrays, log_l: Array, log_a: Array, log_sigma: Array) -> Array:
        log_l, log_a, log_sigma = (x[..., None] for x in (log_l, log_a, log_sigma))
        covariance = xp.exp(2 * log_a - 0.5 * xp.array(squares) * xp.exp(-2 * log_l))
        lower = xp.cholesky(covariance + xp.exp(2 * log_sigma) * xp.array(np.eye(len(t))))
        white = xp.solve_lower(lower, xp.array(y) + 0 * log_l[..., 0])
        prior = log_inverse_gamma(xp, log_l[..., 0], 3.0, 3.0) + log_half_normal(xp, log_a[..., 0], 2.0)
        prior = prior + log_half_normal(xp, log_sigma[..., 0])
        return prior - 0.5 * xp.sum(white * white) - xp.sum(xp.log(xp.diagonal(lower)))

    return Target("gp_regression", "Gaussian process regression", {"log_l": 1, "log_a": 1, "log_sigma": 1}, density)


def gp_probit() -> Target:
    """Classification of 30 points: y_i = 1 with probability Phi(f_i), f = a L z, L L' = K + 10^-6 I, z ~ N(0, 1).

    K as in `gp_regression`; l ~ InverseGamma(3, 3), a ~ |N(0, 2^2)|.
    """
    rng = default_rng(405)
    t = np.sort(rng.uniform(0, 8, 30))
    sign = np.where(1.5 * np.sin(1.2 * t) + 0.7 * rng.normal(size=len(t)) > 0, 1.0, -1.0)
    squares = (t[:, None] - t) ** 2

    def density(xp: Arrays, log_l: Array, log_a: Array, z: Array) -> Array:
        kernel = xp.exp(-0.5 * xp.array(squares) * xp.exp(-2 * log_l[..., None])) + xp.array(1e-6 * np.eye(len(t)))
        f = xp.exp(log_a) * xp.apply(xp.cholesky(kernel), z)
        prior = log_inverse_gamma(xp, log_l, 3.0, 3.0) + log_half_normal(xp, log_a, 2.0) + normal(xp, z)
        return prior + xp.sum(xp.log_ndtr(xp.array(sign) * f))

    return Target("gp_probit", "Gaussian process classification, probit", {"log_l": 1, "log_a": 1, "z": 30}, density)
