"""Log densities, up to a constant, summed over the last axis: (..., k) to (...,).

A scale is sampled by its logarithm s. The laws named `log_...` are those of s when exp(s) has the law: they contain the
logarithm of the Jacobian, which is s.
"""

from __future__ import annotations

from typing import Any

from benchmarks.posteriors.arrays import Array, Arrays

__all__ = [
    "bernoulli",
    "log_gamma",
    "log_half_cauchy",
    "log_half_normal",
    "log_inverse_gamma",
    "logit_beta",
    "negative_binomial",
    "normal",
    "poisson",
    "student_t",
]


def normal(xp: Arrays, x: Array, mean: Any = 0.0, sd: Any = 1.0) -> Array:
    """x ~ N(mean, sd^2)"""
    return xp.sum(-0.5 * ((x - mean) / sd) ** 2 - xp.log_of(sd))


def student_t(xp: Arrays, x: Array, degrees: Array, mean: Any, sd: Array) -> Array:
    """x ~ t with `degrees` of freedom, location `mean` and scale `sd`"""
    z = (x - mean) / sd
    norm = xp.lgamma(0.5 * (degrees + 1)) - xp.lgamma(0.5 * degrees) - 0.5 * xp.log(degrees) - xp.log(sd)
    return xp.sum(norm - 0.5 * (degrees + 1) * xp.log1p(z * z / degrees))


def bernoulli(xp: Arrays, y: Array, logit: Array) -> Array:
    """y ~ Bernoulli(sigmoid(logit))"""
    return xp.sum(y * logit - xp.softplus(logit))


def poisson(xp: Arrays, y: Array, log_rate: Array) -> Array:
    """y ~ Poisson(exp(log_rate))"""
    return xp.sum(y * log_rate - xp.exp(log_rate))


def negative_binomial(xp: Arrays, y: Array, log_mean: Array, log_size: Array) -> Array:
    """y ~ NegativeBinomial with mean m = exp(log_mean) and variance m + m^2 / exp(log_size)"""
    size = xp.exp(log_size)
    excess = log_mean - log_size
    return xp.sum(xp.lgamma(y + size) - xp.lgamma(size) + y * excess - (y + size) * xp.softplus(excess))


def log_half_normal(xp: Arrays, s: Array, sd: float = 1.0) -> Array:
    """exp(s) ~ |N(0, sd^2)|"""
    return xp.sum(s - 0.5 * (xp.exp(s) / sd) ** 2)


def log_half_cauchy(xp: Arrays, s: Array, scale: float = 1.0) -> Array:
    """exp(s) ~ |Cauchy(0, scale)|"""
    return xp.sum(s - xp.softplus(2 * (s - xp.log_of(scale))))


def log_gamma(xp: Arrays, s: Array, shape: float, rate: float) -> Array:
    """exp(s) ~ Gamma(shape, rate)"""
    return xp.sum(shape * s - rate * xp.exp(s))


def log_inverse_gamma(xp: Arrays, s: Array, shape: float, scale: float) -> Array:
    """exp(s) ~ InverseGamma(shape, scale)"""
    return xp.sum(-shape * s - scale * xp.exp(-s))


def logit_beta(xp: Arrays, x: Array, a: float, b: float) -> Array:
    """sigmoid(x) ~ Beta(a, b), the Jacobian included"""
    return xp.sum(-a * xp.softplus(-x) - b * xp.softplus(x))
