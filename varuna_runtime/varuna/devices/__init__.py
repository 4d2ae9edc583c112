"""Devices, and their random generators."""
