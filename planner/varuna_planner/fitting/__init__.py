"""Fitting the hardware table's scales to measured mini-batch times."""
