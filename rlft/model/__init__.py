"""The base and what stands on it: adapters in roles, the forward pass, critics, reward models."""
