"""The manager's REST API as typed calls."""
