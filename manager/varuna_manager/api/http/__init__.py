"""REST under /api/v1, server-sent events, and the status page."""
