"""The agents' end of the manager."""
