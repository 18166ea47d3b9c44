"""What has to do with the machine, not with learning: disk, files, locks, memory, signals, time, the hub."""
