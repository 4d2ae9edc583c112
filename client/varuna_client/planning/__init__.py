"""Commands that plan: they ask the planner in this process and need no manager."""
