"""Former path of `tuner.families.by_operation`."""

import sys

from tuner.families import by_operation

sys.modules[__name__] = by_operation
