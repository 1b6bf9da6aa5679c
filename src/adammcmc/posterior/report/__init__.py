"""The report of a run: one HTML page that needs nothing else, and its figures as files."""

from adammcmc.posterior.report.page import write_report

__all__ = ["write_report"]
