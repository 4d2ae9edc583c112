"""What Prometheus is told: counted in memory as it happens, or read from the store when somebody asks."""
