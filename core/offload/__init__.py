"""Offload: which saved tensors leave the device, and between which compute actions they are copied."""
