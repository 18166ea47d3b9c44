"""Run folders: their files, status and names, and forks of a run."""
