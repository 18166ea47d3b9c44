"""Conversations of several turns: tools that the policy calls, and environments that it acts in."""
