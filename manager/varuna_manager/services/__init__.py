"""What controllers and API share: jobs, live VM state, planning, events, agents' sessions, logs."""
