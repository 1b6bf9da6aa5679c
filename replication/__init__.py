"""The paper, replicated: each of its figures as one file, with its settings; `adammcmc replicate` runs them.

A figure is made of trials (`trials.py`): one sampler with one setting on one network. Trials are kept one by one
(`work.py`), so that figures share them and a command that was stopped goes on.
"""
