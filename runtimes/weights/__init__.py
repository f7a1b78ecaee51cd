"""The values of parameters and buffers: safetensors checkpoints, initialisation, memory that is allocated later, and
tensors whose values another process holds."""

from .places import places as places
from .places import tensor_at as tensor_at
from .sources import ModuleInit as ModuleInit
from .sources import Weights as Weights
from .sources import weights_from as weights_from
