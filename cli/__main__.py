"""``python -m panpipe.cli``."""

import sys

from . import main

sys.exit(main())
