"""Offload: which saved tensors are copied to the host and freed, and at which compute actions."""
