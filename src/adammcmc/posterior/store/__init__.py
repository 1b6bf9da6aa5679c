"""Draws and checkpoints on disk or in memory."""
