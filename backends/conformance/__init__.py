"""Checks whether a backend keeps the contract: for panpipe's own backends and for those of other packages.

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
