"""Runs untrusted programs, isolated by bubblewrap, cgroups and seccomp, and connects them to their tests."""
