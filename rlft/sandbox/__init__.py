"""Untrusted programs: isolated by bubblewrap, cgroups and seccomp; how they talk to their judge."""
