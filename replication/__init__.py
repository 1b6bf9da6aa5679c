"""The paper's figures, replicated: `python -m replication fig1`, from a clone of the repository.

A figure (one file each) is made of trials (`trials.py`): one sampler with one setting on one network. Finished trials
are kept one by one (`work.py`), so that figures share them and a stopped command continues.
"""
