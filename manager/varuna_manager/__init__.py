"""The manager: watches the fleet through agents, decides each job's shape, and keeps the history.

The import rules in pyproject.toml order its layers: main, server, api, controllers, services, world, providers and db,
domain.
"""
