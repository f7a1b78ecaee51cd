"""The planner: from a graph of operators with their costs to a plan.

The search itself (`choose`) is imported from its own module: it loads what is compiled.
"""

from .assemble import assemble as assemble
from .even import even_plan as even_plan
from .oracle import longest_path as longest_path
from .score import Oracle as Oracle
from .score import Score as Score
