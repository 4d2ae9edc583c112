"""A stage: a run of neighbouring sections, executed by the user's own forward."""
