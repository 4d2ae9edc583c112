"""This process as a worker of a generation, and what it reports to its agent."""
