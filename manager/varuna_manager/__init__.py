"""The manager: watches the fleet through agents, decides each job's shape, and keeps the history.

Layers, each importing only those below: main > api > controllers > services > providers | db > domain.
"""
