"""How the manager asks the planner."""
