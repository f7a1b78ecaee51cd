"""Instructions: what each kind of action does on a device. Each file registers those of a group of kinds."""

from . import compute, messages, offload, step_end  # noqa: F401 - so that all kinds are registered
