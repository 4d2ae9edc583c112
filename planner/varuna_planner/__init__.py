"""The planner: from a measured profile and a number of GPUs to a plan. No torch, no IO, no clock.

`schedule`, `actions` and `batching` load in a worker without numba; `simulator` and `auto_config` compile with it.
"""
