"""What passes between Varuna's processes: agent and manager, worker and agent."""
