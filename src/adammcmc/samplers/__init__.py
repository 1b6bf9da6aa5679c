"""Chains over the weights of a network, as torch optimizers, with warm-up and health."""
