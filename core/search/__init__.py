"""The planner: from a graph of operators with their costs to a plan.

The search itself (`choose`) is imported from its own module: it loads what is compiled.
"""

from .problem.assemble import assemble as assemble
from .problem.assemble import even_plan as even_plan
from .problem.oracle import Oracle as Oracle
from .problem.oracle import Score as Score
from .problem.oracle import longest_path as longest_path
