"""Metrics for Prometheus: counted in memory as things happen, or read from the store at each scrape."""
