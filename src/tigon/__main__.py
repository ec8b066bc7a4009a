"""`python -m tigon`, the same as the command `tigon`."""

import sys

from .cli import main

sys.exit(main())
