"""Whole runs: plan, data, chains, callbacks."""
