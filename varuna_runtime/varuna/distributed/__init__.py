"""How the ranks of a generation meet, prove who they are, agree, and notice that one is gone."""
