"""The planner: from a graph of operators with their costs to a plan."""

from .assemble import assemble as assemble
from .choose import BUDGET as BUDGET
from .choose import choose_schedule as choose_schedule
from .choose import partition_stages as partition_stages
from .choose import plan as plan
from .even import even_plan as even_plan
from .oracle import longest_path as longest_path
from .score import Oracle as Oracle
from .score import Score as Score
