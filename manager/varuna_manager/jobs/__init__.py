"""Jobs as their users see them: submitted, watched, cancelled; their code, secrets and logs."""
