"""The draws of a run, and what they say: prediction, calibration, diagnostics, report."""
