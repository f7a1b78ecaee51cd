"""Whether a backend keeps the contract: what panpipe's tests run for every backend, and authors for theirs.

    def test_it_keeps_the_contract():
        conformance.check(my_package.BACKEND)

From the shell, once its package is installed: ``panpipe backends NAME --check``.
"""

from .examination import ConformanceError as ConformanceError
from .examination import Finding as Finding
from .examination import check as check
from .examination import examine as examine
from .rules import RULES as RULES
from .rules import Rule as Rule
