"""Cutting sections into stages: what the stages of a cut cost."""
