"""Where notices of preemption come from."""
