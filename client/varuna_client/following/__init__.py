"""Following a job and its logs to their end."""
