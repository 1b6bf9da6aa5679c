"""Regressions: linear, generalised linear, robust, sparse, and with censored times.

Data are generated from a fixed seed, or ship with scikit-learn.
"""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from benchmarks.posteriors.arrays import Array, Arrays
from benchmarks.posteriors.laws import (
    bernoulli,
    log_gamma,
    log_half_cauchy,
    log_half_normal,
    log_inverse_gamma,
    negative_binomial,
    normal,
    poisson,
    student_t,
)
from benchmarks.posteriors.target import Target


def linear_uncentred() -> Target:
    """y ~ N(a + b_1 year + b_2 weight + b_3 dose, sigma^2), predictors in their units and not centred.

    a ~ N(0, 100^2), b ~ N(0, 10^2), sigma ~ |N(0, 5^2)|; year is about 2010, weight about 70. The intercept and the
    slopes are correlated by more than 0.99.
    """
    rng = default_rng(101)
    n = 120
    x = np.stack([rng.integers(1995, 2025, n), rng.normal(70, 12, n), rng.gamma(2.0, 0.5, n)], 1)
    y = -98.0 + x @ [0.05, 0.03, -0.8] + rng.normal(0, 1.0, n)

    def density(xp: Arrays, a: Array, b: Array, log_sigma: Array) -> Array:
        mean = a + b @ xp.array(x.T)
        prior = normal(xp, a, 0.0, 100.0) + normal(xp, b, 0.0, 10.0) + log_half_normal(xp, log_sigma, 5.0)
        return prior + normal(xp, xp.array(y), mean, xp.exp(log_sigma))

    return Target("linear_uncentred", "linear regression, uncentred predictors", {"a": 1, "b": 3, "log_sigma": 1}, density)


def linear_diabetes() -> Target:
    """y ~ N(a + X b, sigma^2): scikit-learn's diabetes data in the original units, 10 predictors, 442 patients.

    a ~ N(0, 500^2), b ~ N(0, 50^2), sigma ~ |N(0, 100^2)|. Predictors have scales from 0.5 to 35, far from the origin;
    the serum measurements are collinear.
    """
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    x, y = data.data, data.target

    def density(xp: Arrays, a: Array, b: Array, log_sigma: Array) -> Array:
        mean = a + b @ xp.array(x.T)
        prior = normal(xp, a, 0.0, 500.0) + normal(xp, b, 0.0, 50.0) + log_half_normal(xp, log_sigma, 100.0)
        return prior + normal(xp, xp.array(y), mean, xp.exp(log_sigma))

    return Target("linear_diabetes", "linear regression, diabetes, raw units", {"a": 1, "b": 10, "log_sigma": 1}, density)


def logistic_cancer() -> Target:
    """Breast cancer (scikit-learn), 30 standardised and strongly correlated predictors: a, b ~ N(0, 1)."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x = (data.data - data.data.mean(0)) / data.data.std(0)

    def density(xp: Arrays, a: Array, b: Array) -> Array:
        return normal(xp, a) + normal(xp, b) + bernoulli(xp, xp.array(data.target), a + b @ xp.array(x.T))

    return Target("logistic_cancer", "logistic regression, breast cancer", {"a": 1, "b": 30}, density)


def logistic_credit() -> Target:
    """1,000 applicants with 24 attributes such as those of the German credit data, generated, as they are recorded.

    y ~ Bernoulli(sigmoid(a + X b)), a ~ N(0, 5^2), b ~ N(0, 1). Three attributes are amounts with scales of tens, the
    others are grades and indicators; nothing is standardised.
    """
    rng = default_rng(102)
    n = 1000
    months = rng.gamma(3.0, 7.0, n)
    age = 19 + rng.gamma(2.5, 6.5, n)
    amount = np.exp(rng.normal(0.6, 0.6, n) + 0.02 * months)
    grades = rng.integers(1, 5, (n, 9)).astype(float)
    flags = (rng.random((n, 12)) < rng.uniform(0.05, 0.5, 12)).astype(float)
    x = np.concatenate([np.stack([months, age, amount], 1), grades, flags], 1)
    slopes = np.concatenate([[0.03, -0.02, 0.1], rng.normal(0, 0.25, 9), rng.normal(0, 0.5, 12)])
    logit = (x - x.mean(0)) @ slopes - 0.9
    y = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(float)

    def density(xp: Arrays, a: Array, b: Array) -> Array:
        return normal(xp, a, 0.0, 5.0) + normal(xp, b) + bernoulli(xp, xp.array(y), a + b @ xp.array(x.T))

    return Target("logistic_credit", "logistic regression, credit, raw units", {"a": 1, "b": 24}, density)


def poisson_offset() -> Target:
    """Counts y ~ Poisson(exposure exp(a + X b)), 200 units, 4 predictors: a ~ N(0, 5^2), b ~ N(0, 1)."""
    rng = default_rng(103)
    n = 200
    exposure = rng.gamma(2.0, 5.0, n)
    x = rng.normal(size=(n, 4)) @ np.linalg.cholesky(0.4 * np.eye(4) + 0.6).T
    y = rng.poisson(exposure * np.exp(-1.0 + x @ [0.4, -0.3, 0.2, 0.0])).astype(float)

    def density(xp: Arrays, a: Array, b: Array) -> Array:
        log_rate = xp.array(np.log(exposure)) + a + b @ xp.array(x.T)
        return normal(xp, a, 0.0, 5.0) + normal(xp, b) + poisson(xp, xp.array(y), log_rate)

    return Target("poisson_offset", "Poisson regression with exposure", {"a": 1, "b": 4}, density)


def negative_binomial_counts() -> Target:
    """Overdispersed counts: y ~ NegativeBinomial(exp(a + X b), phi), a ~ N(0, 5^2), b ~ N(0, 1), phi ~ Gamma(2, 0.5)."""
    rng = default_rng(104)
    n = 150
    x = rng.normal(size=(n, 4))
    x[:, 3] = 0.9 * x[:, 2] + 0.44 * x[:, 3]
    mean = np.exp(1.2 + x @ [0.5, -0.4, 0.3, 0.0])
    y = rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, n)).astype(float)

    def density(xp: Arrays, a: Array, b: Array, log_phi: Array) -> Array:
        prior = normal(xp, a, 0.0, 5.0) + normal(xp, b) + log_gamma(xp, log_phi, 2.0, 0.5)
        return prior + negative_binomial(xp, xp.array(y), a + b @ xp.array(x.T), log_phi)

    return Target("negative_binomial", "negative binomial regression", {"a": 1, "b": 4, "log_phi": 1}, density)


def student_t_regression() -> Target:
    """y ~ t_nu(a + X b, sigma), 100 points with outliers: nu ~ Gamma(2, 0.1), sigma ~ |N(0, 2^2)|, a, b ~ N(0, 5^2)."""
    rng = default_rng(105)
    n = 100
    x = rng.normal(size=(n, 3))
    y = 1.0 + x @ [1.0, -0.5, 0.0] + 0.7 * rng.standard_t(3.0, n)

    def density(xp: Arrays, a: Array, b: Array, log_sigma: Array, log_nu: Array) -> Array:
        prior = normal(xp, a, 0.0, 5.0) + normal(xp, b, 0.0, 5.0)
        prior = prior + log_half_normal(xp, log_sigma, 2.0) + log_gamma(xp, log_nu, 2.0, 0.1)
        return prior + student_t(xp, xp.array(y), xp.exp(log_nu), a + b @ xp.array(x.T), xp.exp(log_sigma))

    blocks = {"a": 1, "b": 3, "log_sigma": 1, "log_nu": 1}
    return Target("student_t", "Student-t regression, unknown degrees of freedom", blocks, density)


def horseshoe() -> Target:
    """Regularised horseshoe, non-centred: 60 points, 20 predictors of which 3 matter.

    b_j = z_j tau l_j, l_j^2 = c^2 lambda_j^2 / (c^2 + tau^2 lambda_j^2), z ~ N(0, 1), lambda_j ~ |Cauchy(0, 1)|,
    tau ~ |Cauchy(0, 0.05)|, c^2 ~ InverseGamma(2, 8), y ~ N(a + X b, sigma^2), a ~ N(0, 5^2), sigma ~ |N(0, 2^2)|.
    """
    rng = default_rng(106)
    n, p = 60, 20
    x = rng.normal(size=(n, p))
    truth = np.zeros(p)
    truth[:3] = 2.0, -1.5, 0.7
    y = x @ truth + rng.normal(0, 1.0, n)

    def density(xp: Arrays, a: Array, log_sigma: Array, log_tau: Array, log_c2: Array, log_lambda: Array, z: Array) -> Array:
        log_size = log_tau + log_lambda - 0.5 * xp.softplus(2 * (log_tau + log_lambda) - log_c2)
        b = z * xp.exp(log_size)
        prior = normal(xp, z) + log_half_cauchy(xp, log_lambda) + log_half_cauchy(xp, log_tau, 0.05)
        prior = prior + log_inverse_gamma(xp, log_c2, 2.0, 8.0) + normal(xp, a, 0.0, 5.0)
        prior = prior + log_half_normal(xp, log_sigma, 2.0)
        return prior + normal(xp, xp.array(y), a + b @ xp.array(x.T), xp.exp(log_sigma))

    blocks = {"a": 1, "log_sigma": 1, "log_tau": 1, "log_c2": 1, "log_lambda": p, "z": p}
    return Target("horseshoe", "regularised horseshoe regression", blocks, density)


def weibull_censored() -> Target:
    """Survival times t with scale exp(a + X b) and shape 1 / s, censored on the right, 150 patients.

    With w = (log t - a - X b) / s: an event contributes w - exp(w) - log s, a censored time -exp(w).
    a ~ N(0, 5^2), b ~ N(0, 1), s ~ Gamma(2, 2).
    """
    rng = default_rng(107)
    n = 150
    x = rng.normal(size=(n, 3))
    x[:, 2] = (x[:, 2] > 0.3).astype(float)
    time = np.exp(2.0 + x @ [0.3, 0.0, -0.6] + 0.7 * np.log(rng.exponential(1.0, n)))
    limit = rng.uniform(2.0, 15.0, n)
    is_event = (time <= limit).astype(float)
    log_time = np.log(np.minimum(time, limit))

    def density(xp: Arrays, a: Array, b: Array, log_s: Array) -> Array:
        w = (xp.array(log_time) - a - b @ xp.array(x.T)) / xp.exp(log_s)
        prior = normal(xp, a, 0.0, 5.0) + normal(xp, b) + log_gamma(xp, log_s, 2.0, 2.0)
        return prior + xp.sum(xp.array(is_event) * (w - log_s) - xp.exp(w))

    return Target("weibull_censored", "censored Weibull survival", {"a": 1, "b": 3, "log_s": 1}, density, start_sd=0.5)
