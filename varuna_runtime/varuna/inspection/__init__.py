"""The report of `varuna inspect` on a model."""
