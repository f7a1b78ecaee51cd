"""Cutting an operator graph's order into stages."""

from .held import Held as Held
from .problem import Cuts as Cuts
from .problem import PartitionProblem as PartitionProblem
from .problem import device_limits as device_limits
from .problem import in_flight_1f1b as in_flight_1f1b
from .problem import round_robin as round_robin
from .problem import stages_of as stages_of
from .ranges import RangeTables as RangeTables
from .solve import check_memory as check_memory
from .solve import nearest_cuts as nearest_cuts
from .solve import partition as partition
from .solve import refuse_above as refuse_above
