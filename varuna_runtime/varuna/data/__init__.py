"""Data for training scripts: the examples of each step, and datasets by URL."""

from varuna.data.batches import Batches, SizedDataset, replica_indices
from varuna.data.local_copy import local_copy

__all__ = ["Batches", "SizedDataset", "local_copy", "replica_indices"]
