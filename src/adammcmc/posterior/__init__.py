"""The draws of a run: prediction, calibration, diagnostics and reports."""
