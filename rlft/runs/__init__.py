"""What a run leaves on disk: its folder, status and checkpoints, and how runs are found and forked."""
