"""Where parameters and buffers get their values from, and the memory that they take meanwhile."""

from .sources import ModuleInit as ModuleInit
from .sources import Weights as Weights
from .sources import places as places
from .sources import tensor_at as tensor_at
from .sources import weights_from as weights_from
