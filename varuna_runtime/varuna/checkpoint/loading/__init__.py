"""Loads a rank's state from a checkpoint or from pretrained weights."""
