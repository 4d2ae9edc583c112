"""The folders of jobs that were submitted with their code."""
