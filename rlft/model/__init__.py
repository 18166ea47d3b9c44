"""The base and what is built on it: adapters in roles, the forward pass, critics, reward models."""
