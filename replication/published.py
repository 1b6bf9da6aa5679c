"""The paper's published numbers: read off its figures (to about the width of a line) and taken from its text.

Keys are the paper's nominal sigma, sigma_Delta or 1 - beta. `ERROR` is 1 - accuracy of the mean over ten draws.
"""

from __future__ import annotations

ACCEPTANCE_READ_TO = 0.02
ERROR_READ_TO = 0.002
SPREAD_READ_TO = 0.01
INFORMATION_READ_TO = 0.2  # of the value

# --- Figure 1: loss after 500 steps and at the end, highest test accuracy, that at the end (epoch 98) -----------------

FIG1: dict[str, dict[str, float]] = {
    "adam": {"early": 0.2, "loss_at_most": 0.09, "best": 0.936, "end": 0.924},
    "sgd": {"early": 0.27, "loss": 0.147, "best": 0.931, "end": 0.930},
    "sghmc": {"early": 0.2, "loss": 0.155, "best": 0.933, "end": 0.932},
    "sigma 0.2": {"early": 0.2, "best": 0.937, "end": 0.925},
    "sigma 2.0": {"early": 0.2, "loss": 0.158, "best": 0.932, "end": 0.932},
}
FIG1_EARLY = 500
"""The step at which the loss is `early`, "about 0.2"."""

# --- Figure 2a: by sigma, then by sigma_Delta or 1 - beta -------------------------------------------------------------

FIG2A_DELTA_ACCEPTANCE: dict[float, dict[float, float]] = {
    0.2: {
        0.0: 0.0, 0.37: 0.0, 3.7: 0.0, 37.0: 0.50, 370.0: 0.57, 3661.6: 0.60, 7_000.0: 0.57, 12_000.0: 0.54, 37_000.0: 0.49,
        370_000.0: 0.01, 3_700_000.0: 0.0,
    },
    2.0: {
        0.0: 0.49, 0.37: 0.49, 3.7: 0.49, 37.0: 0.50, 370.0: 0.52, 3661.6: 0.52, 37_000.0: 0.49, 370_000.0: 0.11,
        3_700_000.0: 0.0,
    },
}  # fmt: skip
FIG2A_DELTA_ERROR: dict[float, dict[float, float]] = {
    0.2: {0.0: 0.18, 3.7: 0.11, 370.0: 0.064, 3661.6: 0.064, 12_000.0: 0.064, 37_000.0: 0.08, 370_000.0: 0.165},
    2.0: {0.0: 0.064, 3.7: 0.064, 37.0: 0.064, 370.0: 0.064, 3661.6: 0.064, 37_000.0: 0.08, 370_000.0: 0.165},
}
FIG2A_BETA_ACCEPTANCE: dict[float, dict[float, float]] = {
    0.2: {0.001: 0.50, 0.01: 0.60, 0.1: 0.08, 0.5: 0.0, 0.9: 0.0},
    2.0: {0.001: 0.50, 0.01: 0.52, 0.1: 0.68, 0.5: 0.81, 0.9: 0.58},
}
FIG2A_BETA_ERROR: dict[float, dict[float, float]] = {
    0.2: {0.001: 0.063, 0.01: 0.063, 0.1: 0.068, 0.5: 0.081, 0.9: 0.11},
    2.0: {0.001: 0.063, 0.01: 0.063, 0.1: 0.068, 0.5: 0.071, 0.9: 0.079},
}

# --- Figure 2b: "with" noise along the step (sigma_Delta 3661.6) and "without", by sigma ------------------------------

FIG2B_ACCEPTANCE: dict[str, dict[float, float]] = {
    "with": {
        0.2: 0.60, 0.5: 0.575, 1.0: 0.54, 2.0: 0.515, 3.0: 0.50, 4.0: 0.49, 5.0: 0.48, 6.0: 0.465, 8.0: 0.435, 10.0: 0.40,
    },
    "without": {
        0.2: 0.0, 0.5: 0.0, 1.0: 0.42, 2.0: 0.49, 3.0: 0.495, 4.0: 0.485, 5.0: 0.48, 6.0: 0.46, 8.0: 0.43, 10.0: 0.41,
    },
}  # fmt: skip
FIG2B_ERROR: dict[str, dict[float, float]] = {
    "with": {
        0.2: 0.0635, 0.5: 0.0635, 1.0: 0.0635, 2.0: 0.0635, 3.0: 0.068, 4.0: 0.071, 5.0: 0.076, 6.0: 0.081, 8.0: 0.088,
        10.0: 0.102,
    },
    "without": {0.2: 0.18, 0.5: 0.225},
}  # fmt: skip

# --- Figure 3: by true class and correctness, by sigma ----------------------------------------------------------------

FIG3_MEAN: dict[str, dict[float, float]] = {
    "top, right": {1.0: 0.99, 8.0: 0.95, 10.0: 0.83},
    "top, wrong": {1.0: 0.3},
    "qcd, right": {1.0: 0.0},
    "qcd, wrong": {1.0: 0.75},
}
"""The mean prediction of the class top. The figure shows wrong "top" jets at 0.75 and wrong "QCD" jets at 0.3: it is
labelled by predicted class, since a top jet classified as QCD lies below 0.5. Here means and spreads are labelled by
true class."""
FIG3_SPREAD: dict[str, dict[float, float]] = {
    "top, right": {1.0: 0.01, 4.0: 0.02, 6.0: 0.06, 8.0: 0.09},
    "top, wrong": {1.0: 0.10, 4.0: 0.15, 5.0: 0.20, 8.0: 0.26, 10.0: 0.33},
    "qcd, right": {1.0: 0.0, 10.0: 0.0},
    "qcd, wrong": {1.0: 0.08, 4.0: 0.12, 8.0: 0.14},
}

# --- Figure 4: sigma 2.0 ----------------------------------------------------------------------------------------------

FIG4_ACCEPTANCE: dict[str, float] = {"minibatch": 0.476, "full": 0.405}
FIG4_LOSS = (0.16, 0.02)
"""Batch loss after burn-in, and its scatter; the curves of both tests were indistinguishable."""

# --- Out-of-distribution jets: mutual information, by sigma -------------------------------------------------------

OOD_BY_SIGMA: dict[str, dict[float, float]] = {
    "training tops": {0.01: 0.0005, 0.1: 0.002, 0.2: 0.005, 0.5: 0.02},
    "tops from elsewhere": {0.01: 0.0017, 0.1: 0.008, 0.2: 0.016, 0.5: 0.06},
}
OOD_BY_PT: dict[str, dict[float, tuple[float, float]]] = {
    "top": {600.0: (0.016, 0.003), 950.0: (0.03, 0.006)},
    "quark": {600.0: (0.003, 0.001), 950.0: (0.035, 0.007)},
    "gluon": {600.0: (0.003, 0.001), 950.0: (0.035, 0.007)},
    **{kind: {600.0: (0.025, 0.005), 950.0: (0.045, 0.005)} for kind in ("w", "z", "h_bb", "h_ww")},
}
"""At sigma 0.2, by kind and pT, with the reading error. Quark and gluon jets were one class; for the other kinds a
range was published, 0.02 to 0.03, rising to 0.04 to 0.05."""
